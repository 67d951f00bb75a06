"""Speculative decoding: drafts are added to grants, and their tokens are charged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bare_core import FULL, AsyncTimed, BareCore, SyncTimed
from real_core import RealCore, prompt_of, run_mixed

from ballast_policy.learning.cost import CostModel
from ballast_policy.step.budget import ONLINE_CHUNKS
from ballast_vllm.drafts import WINDOW

NUM_DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 1}


def drafts_of(method, model):
    """Return the speculative configuration in which the model is its own draft model, or that of another method."""
    if method == "draft_model":
        return {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
    return {**NGRAM, "method": method}


@pytest.mark.parametrize(
    ("method", "is_async"),
    [
        ("ngram", False),
        ("ngram_gpu", True),  # vLLM runs `ngram` only with synchronous scheduling
        ("draft_model", False),
        ("draft_model", True),
    ],
)
@pytest.mark.parametrize("blocks", [600, 80], ids=["plenty of KV", "tight KV"])
def test_only_drafts_exceed_a_grant_and_vllm_preempts_nothing_for_them(tiny_model, blocks, method, is_async):
    options = {"policy": {"ttft": 1.0, "tpot": 0.05}, "scheduler": AsyncTimed if is_async else SyncTimed, "seed": 2}
    drafts = drafts_of(method, tiny_model)
    core = BareCore(tiny_model, blocks=blocks, is_async=is_async, speculative_config=drafts, **options)
    rng, outputs, num_prompt = core.rng, {}, 0
    while not core.is_idle or len(core.made) < 100:
        if len(core.made) < 100 and rng.random() < 0.3:
            kind, prompt, output = rng.choice(["online", "offline"]), rng.randint(1, 200), rng.randint(1, 80)
            outputs[core.add(kind, prompt=prompt, output=output)] = output
            num_prompt += prompt
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
            assert extra == num_drafts
    core.check_idle()

    assert core.answers == outputs
    assert core.deviations.num_drafts > 0
    assert core.deviations.num_preempted == core.deviations.num_short == 0
    stats = core.scheduler.ballast_stats()["stats"]
    assert stats.online.decode_tokens + stats.offline.decode_tokens == sum(outputs.values())
    assert sum(stats.service.values()) == num_prompt + 2 * sum(outputs.values())
    if blocks == 600:
        assert not stats.online.wasted_tokens + stats.offline.wasted_tokens


@pytest.mark.parametrize(
    ("method", "with_drafts", "without"),
    [
        ("ngram", 3, 0),
        ("draft_model", 3, 3),  # a draft model writes KV ahead in both cases
    ],
)
def test_blocks_are_kept_for_drafts_only_while_they_are_on_and_near_the_end_of_a_block(
    tiny_model, method, with_drafts, without
):
    tables = [replace(FULL, block_size=128)]
    core = BareCore(tiny_model, speculative_config=drafts_of(method, tiny_model), tables=tables)
    for prompt in (100, 100, 100, 16, 16):
        core.add(prompt=prompt, output=64)
    driver = core.scheduler.driver
    while any(record.remaining != 1 for record in driver.records.values()):
        core.step()
    found = []
    for is_on in (True, False):
        driver.draft_gain.is_on = is_on
        driver.begin(0.0)
        found.append(driver.kv.draft_blocks)

    assert found == [with_drafts, without]


def test_the_drafts_of_all_slots_fit_into_a_step_beside_the_prompts(tiny_model):
    core = BareCore(tiny_model, speculative_config=NGRAM)
    config = core.scheduler.driver.host.config
    num_decode = config.slots * (1 + NUM_DRAFTS)

    assert num_decode + ONLINE_CHUNKS * config.chunk_tokens <= core.scheduler.max_num_scheduled_tokens


def test_a_plan_expects_the_time_of_drafts_and_a_step_reports_its_decodes_without_them(tiny_model):
    core = BareCore(tiny_model, speculative_config=NGRAM)
    driver = core.scheduler.driver
    driver.host.fit, driver.host.cost = None, CostModel(k3=1.0, is_trusted=True)
    for _ in range(4):
        core.add(prompt=16, output=64)
    for _ in range(5):
        core.step()
    num_drafts = 4 * driver.draft_gain.per_decode
    core.step()

    assert num_drafts > 0
    assert driver.plan.predicted_seconds == pytest.approx(4 + num_drafts)
    assert {record.num_decode for record in driver.counters.records} == {0, 4}


@pytest.mark.parametrize(
    ("method", "is_async", "num_off"),
    [
        ("ngram", False, 0),
        ("draft_model", False, 0),
        ("draft_model", True, 0),
        ("ngram_gpu", True, NUM_DRAFTS),  # this drafter of the V1 model runner fails if it gets another number
    ],
)
def test_the_drafter_proposes_nothing_while_drafts_are_off(tiny_model, method, is_async, num_off):
    core = BareCore(tiny_model, is_async=is_async, speculative_config=drafts_of(method, tiny_model))
    gain = core.scheduler.driver.draft_gain
    for _ in range(4):
        core.add(prompt=16, output=90)
    found = []
    for is_on in [True] * 4 + [False] * 4 + [True] * 4:
        gain.is_on = is_on
        output = core.step()
        core.check()
        found.append((output.num_spec_tokens_to_schedule, bool(output.scheduled_spec_decode_tokens)))

    assert [number for number, _ in found] == [NUM_DRAFTS] * 4 + [num_off] * 4 + [NUM_DRAFTS] * 4
    assert any(has_drafts for _, has_drafts in found[:4])
    assert not any(has_drafts for _, has_drafts in found[4:8])
    assert found[8][1] is (num_off > 0)
    assert any(has_drafts for _, has_drafts in found[9:])


def test_an_admission_of_one_token_has_no_room_for_drafts_while_they_are_off(tiny_model):
    core = BareCore(tiny_model, speculative_config=NGRAM)
    core.scheduler.driver.draft_gain.is_on = False
    prompt = list(range(33))
    core.add(prompt=prompt, output=60)
    core.step()
    core.add(prompt=prompt, output=60)  # two blocks of its prompt are cached

    assert list(core.step().num_scheduled_tokens.values()) == [1, 1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_trial_without_drafts_follows_a_window_with_drafts(tiny_model, is_async):
    core = BareCore(tiny_model, is_async=is_async, speculative_config=drafts_of("draft_model", tiny_model))
    host, gain = core.scheduler.driver.host, core.scheduler.driver.draft_gain
    host.fit, host.cost = None, CostModel(k0=4e-3, k3=3e-4, is_trusted=True)
    core.add(prompt=16, output=1000)

    numbers = [core.step().num_spec_tokens_to_schedule for _ in range(200)]

    begin, length = 1 + WINDOW + is_async, WINDOW + 1
    assert numbers[:begin] == [NUM_DRAFTS] * begin
    assert numbers[begin : begin + length] == [0] * length
    assert gain.is_on is gain.is_usual


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "is_async"), [("ngram", False), ("draft_model", False), ("draft_model", True)])
def test_answers_with_drafts_are_those_without(wandering_model, method, is_async):
    """Drafts go on and off every few steps."""
    policy, answers = {"ttft": 0.5, "tpot": 0.1, "chunk_tokens": 48}, []
    for arguments in ({}, {"speculative_config": drafts_of(method, wandering_model)}):
        with RealCore(wandering_model, policy=policy, is_async=is_async, **arguments) as core:
            gain, drafted = core.core.scheduler.driver.draft_gain, {True: 0, False: 0}

            def switch(core=core, gain=gain, drafted=drafted):
                drafted[gain.is_on] += core.deviations.num_drafts - sum(drafted.values())
                gain.is_on = core.num_steps % 10 < 6

            repeated = prompt_of("repeated", shortest=12, longest=12) * 6
            core.add("repeated", repeated, 20)
            answers.append(dict(run_mixed(core, number=5, output=(8, 20), after_step=switch)))

    assert answers[0] == answers[1]
    assert drafted[True] > 0
    assert drafted[False] == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_draft_model_runs_once_in_a_step_while_drafts_are_off(wandering_model, is_async):
    drafts = drafts_of("draft_model", wandering_model)
    with RealCore(wandering_model, policy={}, is_async=is_async, speculative_config=drafts) as core:
        gain, runs, found = core.core.scheduler.driver.draft_gain, [], {True: set(), False: set()}
        drafter = core.core.model_executor.driver_worker.worker.model_runner.drafter.model
        drafter.register_forward_hook(lambda *_: runs.append(1))
        core.add("x", prompt_of("x"), 40)
        for step in range(16):
            gain.is_on = step % 8 < 4
            runs.clear()
            core.step()
            found[gain.is_on].add(len(runs))

    assert found == {True: {NUM_DRAFTS}, False: {1}}
