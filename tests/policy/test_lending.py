"""The phases that serve online and lend to offline, by themselves."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from engine_snapshot import Engine, why
from laws import lawful
from workloads import EXACT

from ballast_policy.learning.cost import attended
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, PARKED, Request, RequestClass
from ballast_policy.snapshot import TenantShare
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.lending import lend
from ballast_policy.step.online import online_parts, online_step, serve_online
from ballast_policy.step.reserved import Reserved

EXPERTS = replace(EXACT, k5=0.03, missed=0.9)


def make_engine(**config) -> Engine:
    engine = Engine(**{"offline_share": 0.0, **config})
    engine.cost = EXPERTS
    return engine


def lent(engine: Engine, seconds: float = inf, reserved: Reserved | None = None, beside: int = 0) -> StepDraft:
    """Lend some seconds of a step with `beside` tokens of others."""
    step = StepDraft(engine.snapshot())
    step.time.num_tokens = beside
    budget = step.time.seconds + seconds + 1e-9
    lend(step, reserved or Reserved(), growth_blocks=0, budget=budget, expects_online=False)
    return step


def reasons(step: StepDraft) -> list[tuple[Request, Reason]]:
    return [tuple(because) for because in step.draft.because]


def test_decodes_that_do_not_fit_the_budget_are_parked_and_the_experts_of_a_step_are_paid_once():
    engine = make_engine()
    decodes = [engine.decoding(OFFLINE) for _ in range(4)]

    two = sum(EXPERTS.decode(10, beside) for beside in (5, 6))
    assert lent(engine, two, beside=5).draft.park == decodes[2:]
    assert lent(engine, two - 1e-6, beside=5).draft.park == decodes[1:]
    prompt = engine.prefilling(OFFLINE, tokens=20, done=4)
    reserved = Reserved(16, [prompt])
    seconds = EXPERTS.prefill(4, 16) + EXPERTS.decode(10)
    assert [request for request in lent(engine, seconds, reserved).draft.park if request is not prompt] == decodes[1:]


def test_a_prompt_with_two_tokens_left_takes_no_time_of_the_decodes():
    engine = make_engine()
    engine.cost = EXACT
    prompt = engine.prefilling(OFFLINE, tokens=10, done=8)
    decodes = [engine.decoding(OFFLINE) for _ in range(2)]

    assert lent(engine, EXACT.decode(10)).draft.park == [decodes[1], prompt]


def test_a_longer_parked_decode_that_does_not_fit_is_not_overtaken():
    engine = make_engine()
    for tokens in (100, 10):
        engine.decoding(OFFLINE, tokens=tokens, phase=PARKED)

    assert not lent(engine, EXPERTS.decode(10)).draft.resume


@pytest.mark.parametrize(
    ("sizes", "chunk"), [pytest.param([8], 1, id="a token of the chunk is left"), pytest.param([8, 1], 8, id="none")]
)
def test_without_time_the_budget_stops_a_newcomer_not_the_chunk(sizes: list[int], chunk: int):
    engine = make_engine(chunk_tokens=chunk)
    engine.cost = EXACT
    newcomers = [engine.add(OFFLINE, size) for size in sizes]

    step = lent(engine, EXACT.prefill(0, 8) if sizes[1:] else 0.0)

    assert (step.draft.admit, reasons(step)[-1]) == (newcomers[:-1], (newcomers[-1], Reason.STEP_BUDGET))


@pytest.mark.parametrize(("more", "is_resumed"), [(0.0, True), (-1e-6, False)])
def test_a_parked_decode_is_resumed_if_its_time_beside_the_others_is_left(more: float, is_resumed: bool):
    engine = make_engine()
    engine.decoding(OFFLINE, phase=PARKED)

    assert bool(lent(engine, EXPERTS.decode(10, 5) + more, beside=5).draft.resume) is is_resumed


def test_prefill_that_gets_no_tokens_is_parked_for_what_is_missing():
    engine = make_engine()
    first, second = (engine.prefilling(OFFLINE, tokens=100, done=4) for _ in range(2))

    assert reasons(lent(engine, 0.0)) == [(first, Reason.STEP_BUDGET), (second, Reason.STEP_BUDGET)]
    assert reasons(lent(engine)) == [(second, Reason.CHUNK_SPENT)]
    engine.extra["free_blocks"] = 0
    assert reasons(lent(engine)) == [(first, Reason.NO_KV), (second, Reason.NO_KV)]
    engine.extra["free_blocks"] = 0
    covered = lent(engine, reserved=Reserved(16, [first]))
    assert (reasons(covered), covered.draft.park) == ([(first, Reason.NO_KV), (second, Reason.NO_KV)], [second])
    first.num_tokens = 36  # as many tokens are lent as are reserved
    engine.extra["free_blocks"] = 0
    assert reasons(lent(engine, reserved=Reserved(16, [first])))[0] == (first, Reason.NO_KV)


def test_lent_tokens_pay_for_the_context_of_the_reserved_ones():
    engine = make_engine()
    engine.cost = replace(EXACT, k2=1e-5)
    prompt = engine.prefilling(OFFLINE, tokens=100)

    assert lent(engine, engine.cost.prefill(0, 24), Reserved(16, [prompt])).draft.prefill_grants == {prompt: 24}


def test_reserved_tokens_keep_their_time_until_they_are_granted():
    engine = make_engine()
    engine.cost = replace(EXACT, k2=1e-6)
    first, last = engine.prefilling(OFFLINE, tokens=10), engine.prefilling(OFFLINE, tokens=1016, done=1000)
    first.priority, newcomer = 1, engine.add(OFFLINE, 100, priority=1)
    seconds = sum(engine.cost.prefill(*chunk) for chunk in ((0, 10), (0, 8), (1000, 16)))

    step = lent(engine, seconds, Reserved(26, [first, last]))

    assert step.draft.prefill_grants == {first: 10, newcomer: 8, last: 16}


def test_reserved_tokens_without_blocks_keep_no_time():
    engine = make_engine()
    first, last = engine.prefilling(OFFLINE, tokens=8, done=5), engine.prefilling(OFFLINE, tokens=20, done=4)
    first.priority = 1
    engine.extra["free_blocks"] = 0

    assert lent(engine, engine.cost.prefill(5, 3), Reserved(16, [last])).draft.prefill_grants == {first: 3}


def test_reserved_tokens_are_not_lent():
    engine = make_engine()
    first, second = engine.prefilling(OFFLINE, tokens=20, done=4), engine.prefilling(OFFLINE, tokens=100)

    assert lent(engine, reserved=Reserved(16, [first])).draft.prefill_grants == {first: 16, second: 48}


@pytest.mark.parametrize(("size", "left"), [(1, 64), (2, 62)])
def test_only_prompts_take_lent_prefill_tokens(size: int, left: int):
    engine = make_engine()
    first, second = engine.add(OFFLINE, size), engine.add(OFFLINE, 100)

    assert dict(engine.plan().grants) == {first: size, second: left}


@pytest.mark.parametrize("request_class", [ONLINE, OFFLINE])
@pytest.mark.parametrize(("free", "is_resumed"), [(2, True), (1, False)])
def test_a_parked_prompt_is_resumed_with_all_its_blocks(free: int, is_resumed: bool, request_class: RequestClass):
    engine = make_engine()
    engine.prefilling(request_class, tokens=12, done=4, phase=PARKED)
    engine.extra["free_blocks"] = free

    step = StepDraft(engine.snapshot())
    reserved = Reserved(held_blocks=1)  # only newcomers leave them
    serve_online(step, reserved)
    lend(step, reserved, growth_blocks=0, budget=inf, expects_online=False)

    assert bool(step.draft.resume) is is_resumed


@pytest.mark.parametrize(("num_leaving", "is_admitted"), [(0, True), (1, False)])
def test_only_a_request_alone_is_admitted_without_the_blocks_of_its_answer(num_leaving: int, is_admitted: bool):
    engine = make_engine(tail_tokens=1000)
    engine.add(OFFLINE, 8)
    engine.extra |= {"free_blocks": 5, "num_leaving": num_leaving}

    assert bool(engine.plan().admit) is is_admitted


def test_a_lowered_cap_frees_the_slots_and_the_kv_of_all_above_it_and_of_no_other_tenant():
    """Parked requests above the cap held nearly all KV for minutes, and other tenants waited for it."""
    engine = make_engine(tenants={"capped": TenantShare(max_slots=1), "below": TenantShare(max_slots=1)})
    capped = [engine.decoding(OFFLINE, tenant="capped") for _ in range(3)]
    capped.append(engine.decoding(OFFLINE, tenant="capped", phase=PARKED))
    engine.decoding(OFFLINE)
    engine.decoding(OFFLINE, tenant="below")
    engine.decoding(OFFLINE, tenant="below", phase=PARKED)

    decided = lawful(engine.snapshot())

    assert set(decided.preempt) == set(capped[1:])
    assert not decided.park
    assert {why(decided, request) for request in decided.preempt} == {Reason.TENANT_CAP}


def online_and_offline() -> tuple[Engine, StepDraft, Request]:
    """Two online decodes and twelve tokens of a prompt, beside three offline decodes, two of them in reserved slots."""
    engine = make_engine(offline_share=0.25)
    for _ in range(2):
        engine.decoding(ONLINE)
    for tokens in (10, 10, 11):
        engine.decoding(OFFLINE, tokens=tokens)
    prompt, other = engine.prefilling(ONLINE, tokens=30, done=8), engine.prefilling(OFFLINE, tokens=20)
    step = StepDraft(engine.snapshot())
    step.count_decodes(step.online)
    step.grant(prompt, 12)
    step.grant(other, 0)
    return engine, step, prompt


def test_the_parts_of_online_are_those_of_a_step_without_offline():
    _, step, _ = online_and_offline()
    alone, parts = online_parts(step)

    linear = EXPERTS.k1 * 12 + EXPERTS.k2 * attended(8, 12)
    assert parts.decodes == pytest.approx(2 * EXPERTS.k3 + 20 * EXPERTS.k4 + EXPERTS.experts(2))
    assert parts.prefill == pytest.approx(linear + EXPERTS.experts(12, 2))
    assert alone == pytest.approx(EXPERTS.k0 + parts.decodes + parts.prefill)


def test_the_part_that_no_budget_limits_has_the_decodes_in_reserved_slots():
    _, step, _ = online_and_offline()
    part = online_step(step, Reserved())

    assert part.fixed == pytest.approx(step.time.fixed_seconds + EXPERTS.decode(10, 2, 2), rel=1e-9)
    assert part.seconds == pytest.approx(step.time.seconds + EXPERTS.decode(10, 14, 2), rel=1e-9)
    assert part.experts == pytest.approx(EXPERTS.k5 * 0.9**14)


def test_the_prompts_that_bound_a_step_are_those_that_go_on_are_resumed_or_wait():
    engine = make_engine()
    begun, parked = engine.prefilling(ONLINE, tokens=30), engine.prefilling(ONLINE, tokens=30, phase=PARKED)
    admitted, waiting = engine.add(ONLINE, 9), engine.add(ONLINE, 9)
    step = StepDraft(engine.snapshot())
    for request in (parked, admitted):
        step.start(request, 4, Reason.ONLINE_FIRST)

    assert list(online_step(step, Reserved()).pending) == [begun, parked, admitted, waiting]
    assert list(online_step(step, Reserved(), {waiting}).pending) == [begun, parked, admitted]


@pytest.mark.parametrize(
    ("free", "granted", "chunk"), [(9, 32, 64), (8, 32, 64), (3, 12, 64), (0, 0, 64), (1, 1, 1), (0, 0, 1)]
)
def test_an_online_prompt_goes_on_as_far_as_it_finds_blocks(free: int, granted: int, chunk: int):
    engine = make_engine(chunk_tokens=chunk)
    prompt = engine.prefilling(ONLINE, tokens=40, done=8)
    engine.extra["free_blocks"] = free

    decided = engine.plan()

    assert dict(decided.grants).get(prompt, 0) == granted
    assert decided.because == (() if granted else ((prompt, Reason.NO_KV),))


def test_a_decode_that_is_resumed_takes_one_token_and_no_block_beyond_it():
    engine = make_engine()
    parked = engine.decoding(ONLINE, tokens=12, phase=PARKED, priority=1)
    long, last = engine.prefilling(ONLINE, tokens=16, done=8), engine.prefilling(ONLINE, tokens=500)
    engine.extra["free_blocks"] = 2 + 14

    assert dict(engine.plan().grants) == {parked: 1, long: 8, last: 56}

    parked.priority = 0
    assert dict(engine.plan().grants) == {long: 8, last: 56, parked: 1}, "it needs nothing of the chunk"


def test_too_many_residents_give_up_offline_before_online_and_the_last_first():
    engine = make_engine(slots=1, most_residents=3)
    engine.decoding(ONLINE, priority=1)
    engine.decoding(ONLINE, phase=PARKED)
    _, last = (engine.decoding(OFFLINE, phase=PARKED) for _ in range(2))

    decided = engine.plan()

    assert decided.preempt == (last,)
    assert why(decided, last) is Reason.NO_SLOT


@pytest.mark.parametrize(
    ("free", "has_decode", "yields"),
    [
        pytest.param(0, False, True, id="no request computes: the last one yields"),
        pytest.param(3, False, False, id="the first prompt goes on"),
        pytest.param(0, True, False, id="a decode goes on"),
    ],
)
def test_the_last_of_two_prompts_without_blocks_yields_only_if_no_request_computes(free, has_decode, yields):
    engine = make_engine()
    _, last = (engine.prefilling(ONLINE, tokens=40, done=8) for _ in range(2))
    if has_decode:
        engine.decoding(ONLINE)
    engine.extra["free_blocks"] = free

    decided = engine.plan()

    assert decided.preempt == ((last,) if yields else ())
    assert {reason for request, reason in decided.because if request is last} == {Reason.NO_KV}


@pytest.mark.parametrize(("free", "held", "is_admitted"), [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, True)])
def test_a_newcomer_is_admitted_into_the_blocks_that_are_free_and_not_held(free: int, held: int, is_admitted: bool):
    engine = make_engine()
    engine.decoding(OFFLINE)
    engine.add(OFFLINE, 8)
    engine.extra["free_blocks"] = free

    assert bool(lent(engine, reserved=Reserved(held_blocks=held)).draft.admit) is is_admitted
