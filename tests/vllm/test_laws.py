"""The laws of the policy (`tests/policy/laws.py`) hold in steps of vLLM."""

from __future__ import annotations

import pytest
import torch
from bare_core import FULL, BareCore
from laws import lawful, the_reservation_is_what_residents_and_backlog_say
from real_core import RealCore, run_mixed
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from ballast_policy.host import Dispatch
from ballast_policy.learning.cost import CostModel
from ballast_vllm.scheduler import AsyncBallastScheduler, SyncBallastScheduler

pytestmark = pytest.mark.timeout(900)

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=100)


class Lawful(SyncBallastScheduler):
    """Checks each plan against every law."""

    planner = staticmethod(lawful)

    def schedule(self, *args):
        output = super().schedule(*args)
        the_reservation_is_what_residents_and_backlog_say(self.driver.host, Dispatch(self.driver.plan, []))
        return output


class AsyncLawful(AsyncBallastScheduler):
    planner = staticmethod(lawful)


@pytest.mark.parametrize("scheduler", [Lawful, AsyncLawful], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("blocks", "tables"),
    [(600, [FULL]), (100, [FULL]), (170, [*[WINDOW] * 6, FULL])],
    ids=["plenty of KV", "tight KV", "tight KV and windows"],
)
def test_laws_hold_under_churn(tiny_model, scheduler, blocks, tables):
    policy = {"ttft": 0.4, "tpot": 0.02, "offline_share": 0.25, "tenants": {"a": {"weight": 2.0, "max_slots": 3}}}
    options = {"scheduler": scheduler, "is_async": scheduler is AsyncLawful, "policy": policy}
    core = BareCore(tiny_model, blocks=blocks, tables=tables, **options)
    host = core.scheduler.driver.host
    host.fit, host.cost = None, CostModel(k0=4e-3, k1=2e-5, k3=3e-4, k4=1e-7, is_trusted=True)
    host.configure(host.config)
    rng = core.rng
    while not core.is_idle or len(core.made) < 120:
        if len(core.made) < 120 and rng.random() < 0.25:
            kind = rng.choice(["online", "offline"])
            prompt = list(range(32)) + [rng.randrange(256) for _ in range(rng.randint(1, 200))]
            core.add(
                kind, prompt=prompt, output=rng.randint(1, 60), tenant=rng.choice("ab"), priority=rng.randint(0, 1)
            )
        if rng.random() < 0.02 and core.scheduler.requests:
            core.abort(rng.choice(sorted(core.scheduler.requests)))
        core.step()
        core.check()
        assert core.num_steps < 20_000
    core.check_idle()


@pytest.mark.parametrize("scheduler", [Lawful, AsyncLawful], ids=["sync", "async"])
def test_laws_hold_on_real_steps(wandering_model, scheduler):
    policy = {"ttft": 0.5, "tpot": 0.05, "offline_share": 0.25, "chunk_tokens": 64}
    options = {"scheduler": scheduler, "is_async": scheduler is AsyncLawful, "num_gpu_blocks_override": 24}
    with RealCore(wandering_model, policy=policy, **options) as core:
        answers = run_mixed(core, number=18)

    assert len(answers) == 18
    assert core.deviations.num_inexact == 0
