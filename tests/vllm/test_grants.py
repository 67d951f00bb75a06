"""Each step of vLLM computes exactly the grants of the plan, whatever comes, goes, or lacks KV blocks."""

from __future__ import annotations

import pytest
from bare_core import BareCore


def churn(core: BareCore, *, number: int, most_output: int) -> None:
    """Run many requests through the core, with arrivals and aborts at any time, and check every step."""
    rng = core.rng
    for i in range(number // 2):
        core.add("online" if i % 3 == 0 else "offline", prompt=rng.randint(1, 300), output=rng.randint(1, most_output))
    while not core.is_idle or len(core.made) < number:
        output = core.step()
        core.check()
        counters, grants = core.scheduler.driver.counters, core.scheduler.driver.grants
        scheduled = {} if output is None else output.num_scheduled_tokens
        assert all(scheduled[request_id] <= grants[request_id] for request_id in scheduled), "more than was granted"
        assert counters.unplanned_preemptions or counters.deferred_grants or scheduled == (grants if output else {})
        if len(core.made) < number and rng.random() < 0.3:
            kind = rng.choice(["online", "offline"])
            tenant = rng.choice(["a", "b"])
            core.add(
                kind,
                prompt=rng.randint(1, 300),
                output=rng.randint(1, most_output),
                tenant=tenant,
                priority=rng.randint(-1, 1),
            )
        if rng.random() < 0.02 and core.scheduler.requests:
            core.abort(rng.choice(sorted(core.scheduler.requests)))
        assert core.num_steps < 60_000
    core.check_idle()
    assert core.ended == set(core.made)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [2000, 120], ids=["plenty of KV", "tight KV"])
@pytest.mark.parametrize("has_v2_runner", [False, True], ids=["V1", "V2"])
def test_vllm_computes_exactly_the_grants(tiny_model, is_async, blocks, has_v2_runner):
    core = BareCore(
        tiny_model, blocks=blocks, is_async=is_async, has_v2_runner=has_v2_runner, policy={"ttft": 1.0, "tpot": 0.05}
    )

    churn(core, number=300, most_output=150)

    counters = core.scheduler.driver.counters
    assert counters.exact_steps == counters.steps
    assert not counters.unplanned_preemptions
    assert not counters.short_grants
    if has_v2_runner:
        assert core.num_most_resident <= 8
