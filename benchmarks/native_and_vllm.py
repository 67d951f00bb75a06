"""Compare Ballast's own engine with vLLM on CPUs: tokens per second, start-up time and memory, for equal answers.

    make vllm-env && .venv-vllm/bin/python benchmarks/native_and_vllm.py [--requests 1 8 32] [--rounds 7] [--quick]

The model is a Llama with 100 million random weights in float32. Prompts have 64 tokens, answers 128, and all requests
of a round arrive at once. The sides are Ballast's engine, vLLM with `--enforce-eager`, and vLLM as it compiles by
default.
Each computes in a process of its own on `--threads` threads, without HTTP. In each round, every side answers the same
new prompts, one side after the other. The table has medians over the rounds; a ratio is the median of the ratios of
each round. Times are those of the wall, so run this on an idle machine. On a busy machine, use `--clock cpu`: times are
then the processor time of the side, which computes on one thread. The greedy answers of all sides are compared token by
token.

The second table states what bounds the native engine. "Products" is the time of the matrix products of a decode step
alone, with the kernels of the engine. The bound is the larger of two times: that of reading weights and KV once, at the
rate at which the same threads read memory, and that of the arithmetic, at the rate of products whose weights are in
the cache. All rates are measured in the same run.

Start-up is the time from the start of the process to the end of its first answer of one token, by the same clock. At
the first start, all caches of compiled code are empty. Memory is the resident memory of the process after all rounds,
with 1 GiB of KV on each side; `vllm serve` has further processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from replay import build, machine, parser, write
from replay.random_llama import LlamaShape, make_model
from replay.side_process import SideProcess, send_result

SHAPE = LlamaShape(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048, vocabulary=32_000, is_tied=True)
SPREAD = 0.08
"""Of the weights; the greedy answers of a model with a smaller spread repeat one token."""
PROMPT, ANSWER = 64, 128
SLOTS, CONTEXT = 32, 256
NATIVE, EAGER, COMPILED = SIDES = ("native", "vLLM eager", "vLLM compiled")
PRODUCT_ROUNDS = 5
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Run:
    """What a side shall answer: this many requests at once."""

    number: int
    seed: str
    clock: str = "wall"
    answer: int = ANSWER
    """Tokens of an answer."""
    measures_products: bool = False
    """Measure the products of the native engine instead."""


@dataclass
class Found:
    """The result of a run. Times are in seconds."""

    seconds: float = 0.0
    decode_seconds: float = 0.0
    """Of one step that decodes all requests: the mean from the first token of the last request to the end."""
    cpu: float = 0.0
    cpu_since_start: float = 0.0
    """Of the process and its ended children."""
    memory: int = 0
    """Resident bytes of the process."""
    answers: list[list[int]] = field(default_factory=list)
    products: float = 0.0
    """Seconds of the matrix products of one decode step."""
    gflops: float = 0.0
    """Rate of products whose weights are in the cache."""
    gigabytes: float = 0.0
    """Rate of reading memory, per second."""


def prompts(run: Run) -> list[list[int]]:
    """Return the prompts of a run."""
    random = Random(run.seed)
    return [random.choices(range(5, 255), k=PROMPT) for _ in range(run.number)]


# One process: a side


class NativeSide:
    """Ballast's engine."""

    def __init__(self, model: Path, threads: int) -> None:
        self._engine = build(
            model, slots=SLOTS, threads=threads, max_model_len=CONTEXT, kv_memory_bytes=1 << 30, dtype="float32"
        )
        self._threads = threads

    def answer(self, run: Run, note: Callable[[int, list[int]], None]) -> None:
        """Answer the requests, and report each token."""
        from ballast_engine.request import GenerationRequest, SamplingParams  # noqa: PLC0415
        from ballast_policy.request import RequestClass  # noqa: PLC0415

        sampling = SamplingParams(temperature=0.0, max_tokens=run.answer, ignore_eos=True)
        for i, prompt in enumerate(prompts(run)):
            self._engine.submit(GenerationRequest(str(i), tuple(prompt), sampling, RequestClass.ONLINE, stream=False))
        while self._engine.has_work:
            for output in self._engine.step():
                note(int(output.request_id), output.token_ids)

    def products(self, rows: int, clock: Callable[[], float]) -> Found:
        """Measure the products of a decode step, their rate from the cache, and the rate of reading memory."""
        import torch  # noqa: PLC0415 - heavy

        from ballast_engine.models.packing import Packing  # noqa: PLC0415
        from ballast_engine.native.library import kernels  # noqa: PLC0415

        library = kernels()
        team, packing = library.team(self._threads), Packing(library.lanes)
        hidden, inner = SHAPE.hidden, SHAPE.intermediate
        layer = ((hidden + 2 * SHAPE.kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        shapes = [*layer * SHAPE.layers, (SHAPE.vocabulary, hidden)]
        packed = [(packing.matrix(torch.rand(shape)), *shape) for shape in shapes]
        inputs = {depth: torch.rand(rows, depth) for depth in (hidden, inner)}

        def timed(matrices: Sequence[tuple[torch.Tensor, int, int]], of: dict[int, torch.Tensor]) -> float:
            begun = clock()
            for matrix, columns, depth in matrices:
                library.multiply(of[depth], matrix, columns, team=team)
            return clock() - begun

        step = median(timed(packed, inputs) for _ in range(PRODUCT_ROUNDS))
        many = {hidden: torch.rand(96, hidden)}
        small = [(packing.matrix(torch.rand(128, hidden)), 128, hidden)] * 200
        fastest = min(timed(small, many) for _ in range(PRODUCT_ROUNDS))
        one = {depth: torch.rand(1, depth) for depth in (hidden, inner)}
        reading = min(timed(packed, one) for _ in range(PRODUCT_ROUNDS))
        return Found(
            products=step,
            gflops=2e-9 * 96 * 128 * hidden * len(small) / fastest,
            gigabytes=4e-9 * sum(columns * depth for columns, depth in shapes) / reading,
        )


class VllmSide:
    """vLLM, as its own server would run it."""

    def __init__(self, model: Path, *, is_eager: bool) -> None:
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - heavy

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model), dtype="float32", max_model_len=CONTEXT, max_num_seqs=SLOTS, enforce_eager=is_eager,
                disable_log_stats=True, seed=0,
            )
        )  # fmt: skip

    def answer(self, run: Run, note: Callable[[int, list[int]], None]) -> None:
        """Answer the requests, and report each token."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        sampling = SamplingParams(
            max_tokens=run.answer,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for i, prompt in enumerate(prompts(run)):
            self._engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                note(int(output.request_id), list(output.outputs[0].token_ids))


def measured(side: NativeSide | VllmSide, run: Run) -> Found:
    """Run a side, and measure it."""
    clock = CLOCKS[run.clock]
    if run.measures_products and isinstance(side, NativeSide):
        return side.products(run.number, clock)
    answers: list[list[int]] = [[] for _ in range(run.number)]
    begun_at: list[float] = []

    def note(index: int, tokens: list[int]) -> None:
        if tokens and not answers[index]:
            begun_at.append(clock())
        answers[index] += tokens

    begin, cpu = clock(), time.process_time()
    side.answer(run, note)
    end = clock()
    return Found(
        seconds=end - begin,
        decode_seconds=(end - max(begun_at)) / max(1, run.answer - 1),
        cpu=time.process_time() - cpu,
        cpu_since_start=sum(os.times()[:4]),
        memory=resident_bytes(),
        answers=answers,
    )


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answer_runs(name: str, model: Path, threads: int) -> None:
    """Load a side, read runs from the input, and print the result of each."""
    side = NativeSide(model, threads) if name == NATIVE else VllmSide(model, is_eager=name == EAGER)
    for line in sys.stdin:
        send_result(asdict(measured(side, Run(**json.loads(line)))))


# The process that compares


class Process(SideProcess):
    """A side in a process of its own, with caches in a folder."""

    def __init__(self, side: str, model: Path, threads: int, caches: Path) -> None:
        begun = time.perf_counter()
        super().__init__(
            __file__, "--side", side, "--model", str(model), "--threads", str(threads),
            environment={
                "OMP_NUM_THREADS": str(threads),
                "BALLAST_CACHE": str(caches / "kernels"),
                "VLLM_CACHE_ROOT": str(caches / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            },
        )  # fmt: skip
        first = self.run(Run(1, "start", answer=1))
        self.start = {"wall": time.perf_counter() - begun, "cpu": first.cpu_since_start}

    def run(self, run: Run) -> Found:
        """Answer requests there."""
        return Found(**self.replay(asdict(run)))


def compare(asked: argparse.Namespace, model: Path, caches: Path) -> dict[str, Any]:
    """Measure every side with each number of requests."""
    for name in ("kernels", "vllm", "inductor"):
        (caches / name).mkdir(mode=0o700)
    starts: dict[str, list[float]] = {side: [] for side in asked.sides}
    sides: dict[str, Process] = {}
    for turn in range(2):
        for side in asked.sides:
            process = Process(side, model, asked.threads, caches)
            starts[side].append(process.start[asked.clock])
            if turn == 0:
                process.close()
            else:
                sides[side] = process
    rows, bounds = [], []
    print(f"\n{'requests':>8}  {'side':14}{'tokens/s':>9}{'native':>8}{'step':>10}{'CPU/token':>11}{'differ':>8}")
    memory: dict[str, int] = {}
    steps: dict[int, float] = {}
    for number in asked.requests:
        found: dict[str, list[Found]] = {side: [] for side in asked.sides}
        for turn in range(asked.rounds + 1):
            for side, process in sides.items():
                result = process.run(Run(number, f"{number} {turn}", asked.clock))
                memory[side] = result.memory
                if turn:  # the first round is a warm-up
                    found[side].append(result)
        rows += [row(number, side, found) for side in asked.sides]
        steps[number] = median(one.decode_seconds for one in found[NATIVE])
    for number, step in steps.items():
        bounds.append(bound(number, step, sides[NATIVE].run(Run(number, "", asked.clock, measures_products=True))))
    print_bounds(bounds)
    for process in sides.values():
        process.close()
    print(f"\n{'side':14}{'first start':>13}{'second start':>14}{'memory':>12}")
    for side in asked.sides:
        print(f"{side:14}{starts[side][0]:11.1f} s{starts[side][1]:12.1f} s{memory[side] / 2**20:8.0f} MiB")
    return {"rows": rows, "bounds": bounds, "start_seconds": starts, "resident_bytes": memory}


def row(number: int, side: str, found: dict[str, list[Found]]) -> dict[str, Any]:
    """Print one row, and return its figures."""
    mine, native = found[side], found[NATIVE]
    figures = {
        "requests": number,
        "side": side,
        "tokens_per_s": median(number * ANSWER / one.seconds for one in mine),
        "native_ratio": median(one.seconds / ours.seconds for one, ours in zip(mine, native, strict=True)),
        "decode_ms": 1e3 * median(one.decode_seconds for one in mine),
        "cpu_ms_per_token": 1e3 * median(one.cpu for one in mine) / (number * ANSWER),
        "answers_that_differ": sum(
            a != b
            for one, ours in zip(mine, native, strict=True)
            for a, b in zip(one.answers, ours.answers, strict=True)
        ),
        "answers": number * len(mine),
        "distinct_tokens": median(len(set(answer)) for one in mine for answer in one.answers),
    }
    print(
        f"{number:8}  {side:14}{figures['tokens_per_s']:9.0f}{figures['native_ratio']:8.2f}"
        f"{figures['decode_ms']:7.1f} ms{figures['cpu_ms_per_token']:8.2f} ms{figures['answers_that_differ']:8}",
        flush=True,
    )
    return figures


def bound(number: int, step: float, products: Found) -> dict[str, float]:
    """Return what bounds a decode step of the native engine, in milliseconds."""
    parameters = SHAPE.computed_parameters
    kv_bytes = number * (PROMPT + ANSWER / 2) * 2 * 4 * SHAPE.layers * SHAPE.kv_size
    return {
        "requests": number,
        "step_ms": 1e3 * step,
        "products_ms": 1e3 * products.products,
        "read_ms": 1e-6 * (4 * parameters + kv_bytes) / products.gigabytes,
        "compute_ms": 1e-6 * 2 * parameters * number / products.gflops,
        "gflops": products.gflops,
        "gigabytes_per_s": products.gigabytes,
    }


def print_bounds(bounds: Sequence[dict[str, float]]) -> None:
    """Print how close a decode step of the native engine is to what the machine allows."""
    print(f"\n{'requests':>8}{'step':>10}{'products':>12}{'reading':>11}{'arithmetic':>13}{'bound/step':>12}")
    for one in bounds:
        share = max(one["read_ms"], one["compute_ms"]) / one["step_ms"]
        print(
            f"{one['requests']:8.0f}{one['step_ms']:7.1f} ms{one['products_ms']:9.1f} ms{one['read_ms']:8.1f} ms"
            f"{one['compute_ms']:10.1f} ms{share:12.0%}"
        )
    rates = [median(one[name] for one in bounds) for name in ("gigabytes_per_s", "gflops")]
    print(f"Rates: {rates[0]:.1f} GB/s of memory, {rates[1]:.0f} GFLOP/s from the cache")


def main() -> int:
    """Compare, or run one side."""
    options = parser(__doc__)
    options.set_defaults(model=None)
    options.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    options.add_argument("--threads", type=int, help="default: one for each core, and one with --clock cpu")
    options.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="native must be one of them")
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = options.parse_args()
    asked.threads = asked.threads or (1 if asked.clock == "cpu" else len(os.sched_getaffinity(0)))
    if asked.side is not None:
        answer_runs(asked.side, asked.model, asked.threads)
        return 0
    if asked.quick:
        asked.rounds = 2
    about = machine()
    print(f"{asked.threads} thread(s), {asked.clock} time, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or make_model(Path(folder) / "model", SHAPE, spread=SPREAD)
        found = compare(asked, model, Path(folder))
    write(asked.json, {"machine": about, "threads": asked.threads, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
