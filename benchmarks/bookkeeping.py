"""Measure the cost of a step without the model: plan, schedule and finish, with an executor that computes nothing.

    python benchmarks/bookkeeping.py [--json FILE] [--quick]

Times are CPU time of the thread, so that other work on the machine does not count. All slots decode, half of them
online and streaming, four tenants, some requests waiting.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from replay import MODEL, machine, median, parser, percentile, write

from ballast_engine.batch import Batch, Ints
from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.suspension import Interrupt, Suspended
from ballast_engine.tokenizer import Tokenizer
from ballast_policy.host import Planner
from ballast_policy.plan import StepPlan
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan


class Nothing:
    """Draws tokens without a model."""

    vocab_size = 4096
    max_model_len = 4096
    block_tokens = 16

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def run(self, batch: Batch, interrupt: Interrupt | None) -> Ints:  # noqa: ARG002 -- it is never in the middle
        """Return the token 100 for every request."""
        return np.full(len(batch.samples), 100, np.int64)

    def resume(self, suspended: Suspended, interrupt: Interrupt | None) -> Ints:
        """Do nothing. No step is ever suspended."""
        raise NotImplementedError


def make_engine(slots: int, planner: Planner) -> BallastEngine:
    """Return an engine with a decode in every slot."""
    num_blocks = slots * 160
    engine = BallastEngine(
        executor=Nothing(num_blocks),
        tokenizer=Tokenizer(MODEL),
        policy=PolicyConfig(slots=slots, num_blocks=num_blocks, chunk_tokens=8192),
        options=EngineOptions(directory=Path()),
        planner=planner,
    )
    rng = np.random.default_rng(0)
    for i in range(slots + 16):
        is_online = i % 2 == 0
        engine.submit(
            GenerationRequest(
                request_id=str(i),
                prompt=tuple(rng.integers(5, 4000, 300).tolist()),
                sampling=SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True),
                request_class=RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
                tenant=f"tenant {i % 4}",
                stream=is_online,
            )
        )
    while engine.last_step.num_decode < slots:
        engine.step()
    return engine


def main() -> int:
    """Print the bookkeeping time of a step by number of slots."""
    asked = parser(__doc__).parse_args()
    about = machine()
    steps = 200 if asked.quick else 1000
    figures = {}
    print(f"{'decoding':>10}{'whole ms':>10}{'p90':>8}{'plan ms':>10}")
    for slots in (1, 16, 64, 256):
        plans: list[float] = []

        def timed(snapshot: EngineSnapshot, plans: list[float] = plans) -> StepPlan:
            begin = time.thread_time()
            decided = plan(snapshot)
            plans.append(time.thread_time() - begin)
            return decided

        engine = make_engine(slots, timed)
        plans.clear()
        whole = []
        for _ in range(steps):
            begin = time.thread_time()
            engine.step()
            whole.append(time.thread_time() - begin)
        each = {"step_ms": 1e3 * median(whole), "p90_ms": 1e3 * percentile(whole, 90), "plan_ms": 1e3 * median(plans)}
        figures[slots] = each
        print(f"{slots:10}{each['step_ms']:10.3f}{each['p90_ms']:8.3f}{each['plan_ms']:10.3f}")
    write(asked.json, {"machine": about, "by_slots": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
