"""The phase that fills the reservation, and the time that it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_snapshot import Engine
from workloads import EXACT

from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, PARKED
from ballast_policy.snapshot import TenantShare
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.reserved import Reserved, fill_reservation

EXPERTS = replace(EXACT, k5=0.03, missed=0.9)


@pytest.mark.parametrize(
    ("free", "tokens"),
    [
        pytest.param(None, (12, 4), id="blocks do not count"),
        pytest.param(4, (12, 4), id="enough blocks"),
        pytest.param(3, (12, 0), id="blocks for the first prompt"),
        pytest.param(1, (4, 0), id="blocks for a part of it"),
        pytest.param(0, (0, 0), id="no blocks"),
    ],
)
def test_the_reserved_tokens_that_find_blocks_take_their_time(free: int | None, tokens: tuple[int, int]):
    engine = Engine()
    engine.cost = EXPERTS
    prompts = [engine.prefilling(OFFLINE, tokens=20, done=8), engine.prefilling(OFFLINE, tokens=12)]
    step = StepDraft(engine.snapshot())
    step.time.num_tokens = 5

    seconds = Reserved(16, prompts).seconds(step, free)

    first, second = tokens
    assert seconds == pytest.approx(EXPERTS.prefill(8, first, 5) + EXPERTS.prefill(0, second, 5 + first))


@pytest.mark.parametrize(
    ("sizes", "fields", "granted", "held_blocks"),
    [
        pytest.param([20, 1], {}, [16, 1], 0, id="a single token needs no prefill tokens"),
        pytest.param([1, 20], {}, [1, 16], 0, id="nor does it take any"),
        pytest.param([2, 20], {}, [2, 14], 0, id="a prompt leaves the rest of them"),
        pytest.param([20, 20], {}, [16], 0, id="none are left"),
        pytest.param([1, 1, 1], {}, [1, 1], 0, id="two slots are reserved"),
        pytest.param([24, 1], {"free_blocks": 6}, [16], 1, id="promised blocks are not free: one is held"),
        pytest.param([24, 1], {"free_blocks": 7}, [16, 1], 0, id="just enough blocks are free"),
    ],
)
def test_offline_starts_in_its_reserved_slots_with_its_reserved_tokens(sizes, fields, granted, held_blocks):
    engine = Engine()
    engine.extra |= fields
    for size in sizes:
        engine.add(OFFLINE, size)
    step = StepDraft(engine.snapshot())

    reserved = fill_reservation(step)

    tokens = {**dict.fromkeys(step.draft.decodes, 1), **step.draft.prefill_grants}
    assert [tokens[request] for request in step.draft.admit] == granted
    assert reserved.held_blocks == held_blocks


def test_a_prompt_that_goes_on_keeps_its_reserved_tokens():
    engine = Engine()
    begun, newcomer = engine.prefilling(OFFLINE, tokens=10), engine.add(OFFLINE, 20)
    step = StepDraft(engine.snapshot())

    assert fill_reservation(step) == Reserved(10, [begun])
    assert step.draft.prefill_grants == {newcomer: 6}


def test_what_starts_fits_into_the_reserved_blocks_beside_what_is_there():
    engine = Engine(slots=16, num_blocks=40, chunk_tokens=256)
    engine.decoding(OFFLINE, tokens=16, phase=PARKED, priority=-1)
    first, _ = (engine.add(OFFLINE, 16) for _ in range(2))
    step = StepDraft(engine.snapshot())
    fill_reservation(step)

    assert step.draft.admit == [first], "4 of 10 blocks are in use, and 8 with the first"


def test_a_parked_request_that_needs_no_block_starts_behind_one_that_finds_too_few():
    engine = Engine()
    parked = engine.decoding(OFFLINE, phase=PARKED)
    engine.add(OFFLINE, 8, priority=1)
    engine.extra["free_blocks"] = 1
    step = StepDraft(engine.snapshot())

    assert fill_reservation(step).held_blocks == 2
    assert step.draft.resume == [parked]


def test_a_request_that_computes_its_answer_again_needs_the_blocks_of_the_rest():
    engine = Engine(slots=16, num_blocks=40, tail_tokens=1000)
    engine.decoding(OFFLINE, tokens=17)
    again = engine.add(OFFLINE, 16, max_output=10, num_output=4)
    step = StepDraft(engine.snapshot())
    fill_reservation(step)

    assert step.draft.admit == [again], "4 of 10 blocks are in use, it takes 4, and its last 6 tokens take 2"


@pytest.mark.parametrize(
    ("left", "sizes"),
    [
        pytest.param(2, (50, 12), id="a waiting prompt without a slot counts once"),
        pytest.param(1, (64, 100), id="single tokens take none of the chunk"),
    ],
)
def test_offline_keeps_to_its_reserved_slots_if_the_next_online_prompt_fits_beside_it(left: int, sizes):
    engine = Engine(is_encoder=True, offline_share=0.5)
    for _ in range(4):
        engine.prefilling(OFFLINE, tokens=100, done=100 - left)
    for request_class, size in zip((ONLINE, OFFLINE), sizes, strict=True):
        engine.add(request_class, size)
    step = StepDraft(engine.snapshot())
    fill_reservation(step)

    assert (step.coverage.slots, step.draft.admit) == (4, [])


def test_a_tenant_at_its_cap_gets_no_reserved_slot():
    engine = Engine(tenants={"capped": TenantShare(max_slots=1)})
    engine.decoding(OFFLINE, tenant="capped")
    _, other = engine.add(OFFLINE, 4, tenant="capped"), engine.add(OFFLINE, 4)
    step = StepDraft(engine.snapshot())
    fill_reservation(step)

    assert step.draft.admit == [other]


def test_parked_requests_have_work_for_reserved_slots_and_one_that_is_parked_now_has_lost_its_own():
    engine = Engine()
    offline = [engine.decoding(OFFLINE, phase=PARKED) for _ in range(2)]
    assert StepDraft(engine.snapshot()).coverage.slots == 2

    offline += [engine.decoding(OFFLINE) for _ in range(3)]
    step = StepDraft(engine.snapshot())
    assert step.coverage.running == offline[2:]
    step.park(offline[3:4], Reason.STEP_BUDGET)
    assert step.coverage.running == [offline[2], offline[4]]


def test_an_encoder_computes_a_prompt_of_a_chunk_in_one_step():
    step = StepDraft(Engine(is_encoder=True).snapshot())

    assert [step.is_whole(tokens) for tokens in (64, 65)] == [True, False]
