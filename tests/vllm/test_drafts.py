"""Speculative decoding: drafts are added to grants, and their tokens are charged."""

from __future__ import annotations

import pytest
from bare_core import BareCore
from real_core import RealCore, prompt_of, run_mixed

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}


@pytest.mark.parametrize(
    ("method", "is_async"),
    [
        ("ngram", False),
        ("ngram_gpu", True),  # vLLM runs `ngram` only with synchronous scheduling
        ("draft_model", False),
        ("draft_model", True),
    ],
)
@pytest.mark.parametrize("blocks", [600, 110], ids=["plenty of KV", "tight KV"])
def test_only_drafts_exceed_a_grant(tiny_model, blocks, method, is_async):
    drafts, policy = {**NGRAM, "method": method}, {"ttft": 1.0, "tpot": 0.05}
    if method == "draft_model":
        drafts = {"method": method, "model": str(tiny_model), "num_speculative_tokens": 3}
    core = BareCore(tiny_model, blocks=blocks, is_async=is_async, speculative_config=drafts, policy=policy)
    rng, counters = core.rng, core.scheduler.driver.counters
    outputs, num_prompt = {}, 0
    while not core.is_idle or len(core.made) < 100:
        if len(core.made) < 100 and rng.random() < 0.3:
            kind, prompt, output = rng.choice(["online", "offline"]), rng.randint(1, 200), rng.randint(1, 80)
            outputs[core.add(kind, prompt=prompt, output=output)] = output
            num_prompt += prompt
        before = counters.draft_tokens
        output = core.step()
        core.check()
        if output is not None:
            num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            grants = core.scheduler.driver.grants
            extra = sum(
                n - grants[request_id]
                for request_id, n in output.num_scheduled_tokens.items()
                if n > grants[request_id]
            )
            assert extra == num_drafts == counters.draft_tokens - before
    core.check_idle()

    assert core.answers == outputs
    found = core.scheduler.ballast_stats()
    assert found["draft_tokens"] > 0
    assert sum(of["decode_tokens"] for of in found["classes"].values()) == sum(outputs.values())
    assert sum(of["default"] for of in found["service"].values()) == num_prompt + 2 * sum(outputs.values())
    if blocks == 600:
        assert not any(of["wasted_tokens"] for of in found["classes"].values())


def test_no_blocks_are_kept_for_drafts_while_they_are_off(tiny_model):
    core = BareCore(tiny_model, speculative_config=NGRAM)
    for _ in range(4):
        core.add(prompt=16, output=64)
    driver = core.scheduler.driver
    core.step()
    core.step()
    with_drafts = driver._kv.draft_blocks
    driver.draft_gain.is_on = False
    core.step()

    assert with_drafts > 0
    assert driver._kv.draft_blocks == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_answers_with_drafts_are_those_without(wandering_model, method):
    drafts = NGRAM
    if method == "draft_model":
        drafts = {"method": method, "model": str(wandering_model), "num_speculative_tokens": 3}
    answers = []
    for arguments in ({}, {"speculative_config": drafts}):
        core = RealCore(wandering_model, policy={"ttft": 0.5, "tpot": 0.1, "chunk_tokens": 48}, **arguments)
        try:
            repeated = prompt_of("repeated", shortest=12, longest=12) * 6
            core.add("repeated", repeated, 20)
            answers.append(dict(run_mixed(core, number=5, output=(8, 20))))
            found = core.core.ballast_stats()
        finally:
            core.close()

    assert answers[0] == answers[1]
    assert found["draft_tokens"] > 0
