"""A model that returns vectors: prompts are scheduled by the policy, and the values do not change."""

from __future__ import annotations

from random import Random

import pytest
from bare_core import BareCore, SyncTimed

from ballast_policy.host import REFIT_STEPS


@pytest.mark.parametrize("can_chunk", [True, False], ids=["chunks", "whole prompts"])
def test_prompts_are_computed_as_the_plan_states(tiny_model, can_chunk):
    core = BareCore(
        tiny_model,
        runner="pooling",
        enable_chunked_prefill=can_chunk,
        step_tokens=2048,
        policy={"ttft": 1.0, "chunk_tokens": 64},
    )
    assert core.scheduler.scheduler_config.enable_chunked_prefill is can_chunk
    ids = [core.add("online" if i % 3 == 0 else "offline", prompt=20 + 9 * i, pooling=True) for i in range(24)]
    sizes = {request_id: core.scheduler.requests[request_id].num_prompt_tokens for request_id in ids}
    while not core.is_idle:
        output = core.step()
        core.check()
        assert output.num_scheduled_tokens == core.scheduler.driver.grants
        found = core.scheduler.ballast_stats()
        assert sum(found["in_step"].values()) == len(output.num_scheduled_tokens)
        if not can_chunk:
            assert all(sizes[request_id] == n for request_id, n in output.num_scheduled_tokens.items())
    core.check_idle()

    assert core.ended == set(ids)
    assert core.scheduler.driver.host.config.is_encoder
    stats = core.scheduler.ballast_stats()["stats"]
    assert stats.online.prefill_tokens + stats.offline.prefill_tokens == sum(sizes.values())
    assert stats.online.decode_tokens == stats.offline.decode_tokens == 0


def test_no_prompt_of_an_encoder_counts_as_a_decode(tiny_model):
    core = BareCore(tiny_model, runner="pooling", step_tokens=2048, policy={"ttft": 1.0}, scheduler=SyncTimed)
    rng = Random(7)
    while core.num_steps < 2 * REFIT_STEPS:
        core.add(rng.choice(["online", "offline"]), prompt=rng.choice([1, 20, 300]), pooling=True)
        core.step()
        core.check()

    driver = core.scheduler.driver
    assert driver.host.cost.is_trusted
    assert sum(record.num_decode for record in driver.counters.records) == 0
    assert driver.host.cost.k3 == driver.host.cost.k4 == 0
