"""The greedy answers are those of plain vLLM, whatever the policy does to a request (float32)."""

from __future__ import annotations

import pytest
from real_core import RealCore, run_mixed

from ballast_vllm.plan_limits import CPU_MULTIPLE

SLO = {"ttft": 0.5, "tpot": 0.1, "offline_share": 0.25, "chunk_tokens": 24}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def plain_answers(wandering_model):
    with RealCore(wandering_model) as core:
        return dict(run_mixed(core))


def test_the_answers_of_the_model_wander(plain_answers):
    """Otherwise, equal answers would prove nothing."""
    distinct = [len(set(tokens)) / len(tokens) for tokens in plain_answers.values()]

    assert sum(distinct) / len(distinct) > 0.5


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("blocks", "policy"),
    [
        pytest.param(None, SLO, id="chunks"),
        pytest.param(22, SLO, id="few KV blocks"),
        pytest.param(None, SLO | {"slots": 3}, id="few slots, parked requests"),
    ],
)
def test_answers_are_those_of_plain_vllm(wandering_model, plain_answers, blocks, policy, is_async):
    few = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": True} if blocks else {}
    with RealCore(wandering_model, policy=policy, is_async=is_async, **few) as core:
        answers = run_mixed(core)
        found = core.core.ballast_stats()

    assert answers == plain_answers
    stats = found["stats"]
    assert core.deviations.num_inexact == 0
    if blocks:
        assert stats.online.preemptions or stats.offline.preemptions
    if "slots" in policy:
        assert stats.online.parked_steps + stats.offline.parked_steps > 0


def test_steps_with_offline_prompts_are_a_multiple_of_tokens(wandering_model, plain_answers):
    with RealCore(wandering_model, policy=SLO | {"chunk_tokens": 96}) as core:
        steps: list[dict[str, int]] = []
        answers = run_mixed(core, after_step=lambda: steps.append(dict(core.core.scheduler.driver.grants)))

    assert answers == plain_answers
    even = 0
    for grants in steps:
        total, longest = sum(grants.values()), longest_offline(grants)
        if total > CPU_MULTIPLE and longest > total % CPU_MULTIPLE:
            assert total % CPU_MULTIPLE == 0, grants
            even += longest > 1
    assert even > 5


def longest_offline(grants: dict[str, int]) -> int:
    return max((tokens for request_id, tokens in grants.items() if request_id.startswith("offline")), default=0)
