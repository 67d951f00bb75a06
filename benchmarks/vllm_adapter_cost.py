"""Measure what Ballast's scheduler adds to vLLM's own, without a model.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_adapter_cost.py [--running 1 32 256] [--waiting 1000]

Every running request decodes, and the others wait for a slot. Both sides run in turn in one process. Times are CPU
time of the thread, in microseconds per step, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "vllm" / "support")]
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

from bare_core import BareCore  # noqa: E402 - the module is not a package
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from ballast_policy.learning.cost import CostModel  # noqa: E402
from ballast_vllm.scheduler import BallastScheduler  # noqa: E402

MODEL = ROOT / "worker" / "ballast_cli" / "demo" / "model"
POLICY = {"ttft": 100.0, "tpot": 10.0, "offline_share": 0.1}
"""An SLO that the budget reads and that never binds, so that both sides compute the same batch."""
COST = CostModel(k0=1e-3, k1=1e-5, k3=1e-5, k4=1e-8, is_trusted=True)
"""A cost model that plans trust. The times without a model would fit none."""
STEP_SECONDS = 0.020


def main() -> None:
    """Print one row for each number of running requests, synchronous and asynchronous."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--waiting", type=int, default=1000)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    found = options.parse_args()
    print(f"{found.waiting} requests wait. Microseconds per step, median of {found.steps * found.rounds} steps.\n")
    print("| scheduling | running | vLLM | with Ballast | added | share of vLLM | share of a 20 ms step |")
    print("|---|---|---|---|---|---|---|")
    for is_async in (False, True):
        for running in found.running:
            plain = AsyncScheduler if is_async else Scheduler
            sides = [make_core(side, running, found.waiting, is_async=is_async) for side in (plain, BallastScheduler)]
            times: list[list[float]] = [[], []]
            for _ in range(found.rounds):
                for core, into in zip(sides, times, strict=True):
                    into.extend(timed(core, found.steps, running))
            own, both = median(times[0]), median(times[1])
            added = both - own
            print(
                f"| {'async' if is_async else 'sync'} | {running} | {own * 1e6:,.0f} | {both * 1e6:,.0f} "
                f"| {added * 1e6:,.0f} | {added / own:.0%} | {added / STEP_SECONDS:.1%} |",
                flush=True,
            )


def make_core(side: type, running: int, waiting: int, *, is_async: bool) -> BareCore:
    """Return a core in which `running` requests decode and `waiting` requests wait."""
    core = BareCore(
        MODEL,
        slots=running,
        blocks=60_000,
        is_async=is_async,
        scheduler=side,
        policy=POLICY,
        step_tokens=2048,
    )
    if side is BallastScheduler:
        core.scheduler.driver.host.fit, core.scheduler.driver.host.cost = None, COST
    for i in range(running):
        core.add("offline" if i % 4 else "online", prompt=64 + i % 128, output=1900)
    for _ in range(80 + running // 4):
        core.step()
    for _ in range(waiting):
        core.add("offline", prompt=128, output=1000)
    for _ in range(40):
        core.step()
    return core


def timed(core: BareCore, steps: int, running: int) -> list[float]:
    """Return the seconds of `schedule` and `update_from_output` of each step, without the fake model."""
    scheduler, seconds = core.scheduler, []
    for _ in range(steps):
        begun = time.thread_time()
        output: Any = scheduler.schedule()
        taken = time.thread_time() - begun
        if output.total_num_scheduled_tokens != running:
            raise RuntimeError(f"{output.total_num_scheduled_tokens} of {running} requests decode")
        core.flights.append((output, core.run(output)))
        if len(core.flights) > core.is_async:
            due = core.flights.popleft()
            begun = time.thread_time()
            scheduler.update_from_output(*due)
            taken += time.thread_time() - begun
        seconds.append(taken)
    return seconds


if __name__ == "__main__":
    main()
