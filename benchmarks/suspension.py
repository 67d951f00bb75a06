"""Measure how suspension between two layers helps newcomers, and what it costs other requests.

    python benchmarks/suspension.py [--model DIR | --shape 100m] [--json FILE] [--quick]

The first part measures the check of the interrupt before each layer: executor steps with and without an interrupt,
alternately. In the second part, online requests with short prompts arrive while offline work fills the steps. An engine
that may suspend steps and an engine that may not get the same requests at the same times, alternately. All times are
CPU time of the computing thread.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from engine_step import BLOCK_TOKENS, CASES, SHAPES, make_batch, write_config
from replay import Clock, build, machine, median, parser, percentile, write

from ballast_engine.build import build_engine
from ballast_engine.engine import BallastEngine
from ballast_engine.executor import Executor
from ballast_engine.loader import LoadFormat, load
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.suspension import Interrupt
from ballast_policy.request import RequestClass

OFFLINE_TOKENS = (1200, 40)
"""Prompt and answer of the offline requests."""


def check_ratios(model: Path, load_format: LoadFormat, repeats: int) -> dict[str, float]:
    """Print the CPU time of each step with an interrupt that is never raised, over the time without one."""
    loaded = load(model, dtype="float32", load_format=load_format, threads=1)
    num_blocks = 64 * -(-1024 // BLOCK_TOKENS)
    executor = Executor(loaded, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
    ratios = {}
    print(f"{'step':26}{'CPU ms':>9}{'with the check':>15}{'ratio':>9}")
    for name, requests in CASES.items():
        vocabulary = loaded.config.vocab_size
        batch = make_batch(requests, vocabulary=vocabulary, num_blocks=num_blocks, temperature=0.0)
        seconds: tuple[list[float], list[float]] = ([], [])
        for repeat in range(2 * repeats):
            is_checked = repeat % 2
            begun = time.thread_time()
            executor.run(batch, Interrupt() if is_checked else None)
            seconds[is_checked].append(time.thread_time() - begun)
        without, beside = (1e3 * median(each[1:]) for each in seconds)
        ratios[name] = beside / without
        print(f"{name:26}{without:9.3f}{beside:15.3f}{ratios[name]:9.3f}")
    return ratios


def ask(
    engine: BallastEngine, clock: Clock, times: list[float], num_prompt: int, *, is_suspending: bool
) -> dict[str, list[float]]:
    """Fill the engine with offline work, submit requests at these times, and return the seconds to each first token."""
    decide = engine.host.planner
    engine.host.planner = lambda seen: replace(decide(seen), suspendable_seconds=60.0 if is_suspending else 0.0)
    rng = np.random.default_rng(1)

    def request(name: str, size: tuple[int, int], request_class: RequestClass) -> GenerationRequest:
        sampling = SamplingParams(temperature=0.0, max_tokens=size[1], ignore_eos=True)
        prompt = tuple(rng.integers(5, 4000, size[0]).tolist())
        return GenerationRequest(name, prompt, sampling, request_class)

    online = [request(f"online {i}", (num_prompt, 1), RequestClass.ONLINE) for i in range(len(times))]
    for i in range(400):
        engine.submit(request(f"job {i}", OFFLINE_TOKENS, RequestClass.OFFLINE))
    asked: dict[str, float] = {}
    answered: dict[str, float] = {}
    steps = []
    begin = clock()

    def submit_all() -> None:
        for seconds, newcomer in zip(times, online, strict=True):
            while clock() < begin + seconds:
                time.sleep(0.0003)
            asked[newcomer.request_id] = clock()
            engine.submit(newcomer)

    thread = threading.Thread(target=submit_all)
    thread.start()
    tokens = 0
    while len(answered) < len(online):
        outputs = engine.step()
        now = clock()
        answered |= {output.request_id: now for output in outputs if output.request_id.startswith("online")}
        tokens += engine.last_step.num_prefill + engine.last_step.num_decode
        steps.append(engine.last_step.seconds)
    thread.join()
    rate = tokens / (clock() - begin)
    engine.give_back([f"job {i}" for i in range(400)])
    while engine.has_work:
        engine.step()
    engine.host.planner = decide
    return {"ttft": [answered[name] - asked[name] for name in asked], "steps": steps, "rate": [rate]}


def newcomers(engine: BallastEngine, clock: Clock, *, num_prompt: int, count: int, turns: int) -> dict[str, float]:
    """Print the time to the first token of requests that arrive during offline steps."""
    ask(engine, clock, [0.1] * 3, num_prompt, is_suspending=True)
    found: dict[bool, dict[str, list[float]]] = {is_suspending: {} for is_suspending in (False, True)}
    for turn in range(turns):
        steps = median(ask(engine, clock, [0.5], num_prompt, is_suspending=False)["steps"])
        gaps = np.random.default_rng(turn).uniform(2 * steps, 5 * steps, count)
        times = np.cumsum(gaps).tolist()
        for is_suspending in (False, True):
            engine.reset()
            for name, values in ask(engine, clock, times, num_prompt, is_suspending=is_suspending).items():
                found[is_suspending].setdefault(name, []).extend(values)
    print(f"\n{'newcomers with offline':26}{'step ms':>9}{'TTFT p50':>10}{'p95':>8}{'tokens/s':>10}")
    figures = {}
    for is_suspending, each in found.items():
        name = "steps are suspended" if is_suspending else "newcomers wait"
        p50, p95 = (1e3 * percentile(each["ttft"], share) for share in (50, 95))
        figures |= {f"{name}: p50 ms": p50, f"{name}: p95 ms": p95, f"{name}: tokens/s": mean(each["rate"])}
        print(f"{name:26}{1e3 * median(each['steps']):9.1f}{p50:10.1f}{p95:8.1f}{mean(each['rate']):10.0f}")
    return figures


def main() -> int:
    """Choose the model and measure both."""
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES)
    asked = options.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        model, load_format = asked.model, "auto"
        if asked.shape is not None:
            write_config(Path(folder), asked.shape)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (Path(folder) / name).write_bytes((asked.model / name).read_bytes())
            model, load_format = Path(folder), "dummy"
        ratios = check_ratios(model, load_format, 10 if asked.quick else 40)
        clock = Clock()
        policy = {"chunk_tokens": 256}
        maker = partial(build_engine, clock=clock)
        engine = build(model, slots=32, load_format=load_format, threads=1, policy=policy, maker=maker)
        figures = newcomers(
            engine, clock, num_prompt=24, count=20 if asked.quick else 60, turns=1 if asked.quick else 3
        )
    write(asked.json, {"machine": about, "check_ratio": ratios, "newcomers": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
