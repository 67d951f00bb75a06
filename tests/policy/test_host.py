"""The policy host: what it tells the planner, how it carries plans out, and what it learns from every event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from fake_engine import FakeEngine
from laws import lawful
from workloads import EXACT, Arrival, CountedKv, make_snapshot

from ballast_policy.host import MOST_KEPT, PER_PLACE, REFIT_STEPS, Host, IllegalPlan
from ballast_policy.learning.cost import CostModel, StepWork, attended
from ballast_policy.plan import StepParts, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, WAITING, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig, TenantShare
from ballast_policy.step.planner import plan


def make_host(**fields) -> Host:
    config = {"slots": 4, "num_blocks": 64, "block_tokens": 4, "chunk_tokens": 64, "tail_tokens": 0, **fields}
    return Host(PolicyConfig(**config), cost=EXACT)


def make_request(seq: int, request_class: RequestClass = OFFLINE, **fields) -> Request:
    return Request(**{"seq": seq, "request_class": request_class, "arrival": 0.0, **SIZE, **fields})


SIZE = {"num_prompt": 8, "max_output": 8, "num_tokens": 8}


def enter(host: Host, *requests: Request, now: float = 0.0) -> None:
    for request in requests:
        host.enter(request, now)


# What it tells the planner


def test_offline_requests_with_one_prefix_key_share_the_place_of_the_first_up_to_a_limit():
    host, keys = make_host(), [7, None, 3, *[7] * 2 * PER_PLACE]
    enter(host, *(made := [make_request(seq, prefix_key=key) for seq, key in enumerate(keys)]))

    second, third = PER_PLACE + 2, 2 * PER_PLACE + 2
    assert [r.prefix_seq for r in made] == [0, 1, 2, *[0] * (PER_PLACE - 1), *[second] * PER_PLACE, third]


def test_online_requests_with_one_prefix_key_keep_the_order_of_their_arrival():
    enter(make_host(), *(made := [make_request(seq, ONLINE, prefix_key=7) for seq in range(3)]))

    assert [request.prefix_seq for request in made] == [0, 1, 2]


def test_a_key_among_many_is_forgotten_and_begins_at_its_own_place():
    host, last = make_host(), MOST_KEPT + 1
    enter(host, *(make_request(seq, prefix_key=seq) for seq in range(last)))
    enter(host, late := make_request(last, prefix_key=0), again := make_request(last + 1, prefix_key=last - 1))

    assert (late.prefix_seq, again.prefix_seq) == (last, last - 1)


def test_a_request_in_time_is_listed_before_any_number_of_overdue_ones():
    host = make_host()
    overdue = [make_request(seq, ONLINE, ttft=1.0, num_tokens=60) for seq in range(50)]
    in_time = make_request(50, ONLINE, arrival=9.5, ttft=1.0)

    snapshot = make_snapshot(host, [*overdue, in_time], now=10.0, free_blocks=64)

    assert snapshot.waiting[0] is in_time


def test_the_prefix_cache_is_asked_for_the_first_requests_of_each_class_only():
    asked: list[int] = []

    class Asked(CountedKv):
        def hint(self, request: Request) -> None:
            asked.append(request.seq)

    host = make_host(slots=100)
    enter(host, *(make_request(seq, ONLINE if seq < 40 else OFFLINE, num_tokens=1) for seq in range(80)))

    host.snapshot(Asked(64), now=0.0)

    assert asked == [*range(32), *range(40, 72)]


def test_requests_of_a_tenant_at_its_cap_do_not_fill_the_list():
    host = make_host(tenants={"capped": TenantShare(max_slots=1)})
    waiting = [make_request(seq, tenant="capped") for seq in range(1, 60)]
    holder = make_request(0, tenant="capped", phase=RUNNING)
    other = make_request(99, tenant="other")

    snapshot = make_snapshot(host, [holder, *waiting, other], now=0.0, free_blocks=64)

    assert list(snapshot.waiting) == [waiting[0], other]


def test_the_waiting_requests_are_listed_in_order_and_one_more_than_there_are_slots():
    host = make_host(tenants={"reserved": TenantShare(reserved=0.5)})
    holder = make_request(0, tenant="reserved", phase=RUNNING)
    names = ["served", "new", "reserved"]
    served, new, reserved = ([make_request(3 * i + j, tenant=names[i - 1]) for j in range(3)] for i in (1, 2, 3))
    make_snapshot(host, [holder, *served, *new, *reserved], now=0.0, free_blocks=64)
    host.ledgers[OFFLINE].services = {"served": 50.0, "new": 0.0, "reserved": 100.0}

    assert list(host.snapshot(CountedKv(64), 0.0).waiting) == [new[0], reserved[0], new[1], reserved[1]]
    host.leave(holder, 0.0, is_complete=False)
    assert list(host.snapshot(CountedKv(64), 0.0).waiting) == [reserved[0], new[0], reserved[1], new[1], reserved[2]]


def test_a_snapshot_states_what_is_learned():
    host = make_host()
    host.expectations.typical_prompt = 33.7
    snapshot = host.snapshot(CountedKv(64), 0.0)

    assert (snapshot.typical_prompt, snapshot.expectation) == (33, host.expectations.expectation)
    assert host.expectations.expectation != EngineSnapshot.__dataclass_fields__["expectation"].default


# How it carries plans out


@pytest.mark.parametrize(
    ("phase", "move"),
    [
        pytest.param(RUNNING, Host.admit, id="admit what runs"),
        pytest.param(PARKED, Host.admit, id="admit what is parked"),
        pytest.param(WAITING, Host.resume, id="resume what waits"),
        pytest.param(RUNNING, Host.resume, id="resume what runs"),
        pytest.param(WAITING, Host.park, id="park what waits"),
        pytest.param(PARKED, Host.park, id="park what is parked"),
        pytest.param(WAITING, Host.preempt, id="preempt what waits"),
    ],
)
def test_a_request_only_moves_between_phases_that_an_engine_knows(phase, move: Callable[[Host, Request], None]):
    host = make_host()
    request = make_request(0, phase=phase)
    make_snapshot(host, [request], now=0.0, free_blocks=64)

    with pytest.raises(IllegalPlan, match=f"it is {phase.name}"):
        move(host, request)

    assert request.phase is phase
    assert not host.imbalance()


@pytest.mark.parametrize(
    "grants",
    [
        pytest.param(lambda resident, _: [(resident, 0)], id="no token"),
        pytest.param(lambda resident, _: [(resident, 9)], id="more tokens than are left"),
        pytest.param(lambda _, waiting: [(waiting, 1)], id="a token without a slot"),
    ],
)
def test_a_grant_that_no_engine_could_compute_is_refused(grants):
    resident, waiting = make_request(0, phase=RUNNING), make_request(1)
    host = make_host()
    snapshot = make_snapshot(host, [resident, waiting], now=0.0, free_blocks=64)

    with pytest.raises(IllegalPlan, match="tokens granted to"):
        host.dispatch(snapshot, StepPlan(grants=tuple(grants(resident, waiting))), CountedKv(64))


class Short(CountedKv):
    """KV without a free block, though it promised some."""

    def admit(self, request: Request) -> None:
        request.num_blocks = 1

    def extend(self, request: Request, num_tokens: int) -> bool:
        return False

    def release(self, request: Request) -> None:
        request.num_blocks = request.num_computed = 0


def test_an_admitted_request_that_finds_no_block_waits_again():
    host, newcomer = make_host(), make_request(0)
    snapshot = make_snapshot(host, [newcomer], now=0.0, free_blocks=64)

    dispatch = host.dispatch(snapshot, plan(snapshot), Short(64))

    assert (dispatch.num_deferred, dispatch.grants, dispatch.admissions) == (1, [], [])
    assert (newcomer.phase, newcomer.num_blocks) == (WAITING, 0)
    assert not host.imbalance()


def test_a_resident_that_finds_no_block_keeps_its_slot():
    host, residents = make_host(), [make_request(seq, phase=RUNNING) for seq in range(2)]
    snapshot = make_snapshot(host, residents, now=0.0, free_blocks=64)

    dispatch = host.dispatch(snapshot, plan(snapshot), Short(64))

    assert dispatch.num_deferred == 2
    assert {resident.phase for resident in residents} == {RUNNING}


def test_an_admitted_request_records_its_wait_and_its_cached_tokens():
    second, third = (Arrival(at, ONLINE, 8, 2, prefix_key=1, shared=8) for at in (0.001, 9.0))
    engine = FakeEngine(make_host(slots=1), [Arrival(0.0, ONLINE, 8, 12), second, third])
    begun, admissions = [], []
    while engine.has_work:
        dispatch = engine.begin()
        admissions += [(r.admitted - r.arrival, r.steps_waited, r.num_computed) for r in dispatch.admissions]
        begun += [engine.now for _ in dispatch.admissions]
        engine.compute(dispatch)

    queued, waited, cached = zip(*admissions, strict=True)
    assert queued == pytest.approx((0.0, begun[1] - 0.001, 0.0))
    assert (waited, cached) == ((0, 11, 0), (0, 0, 4))


def test_a_batch_window_is_no_step_that_a_request_waits():
    host, request = make_host(batch_window=0.1), make_request(0)
    snapshot = make_snapshot(host, [request], now=0.0, free_blocks=64)

    host.dispatch(snapshot, plan(snapshot), CountedKv(64))

    assert request.steps_waited == 0


def test_a_request_is_admitted_for_the_first_time_once():
    engine = FakeEngine(
        make_host(num_blocks=10, offline_share=0.0), [Arrival(0.0, OFFLINE, 8, 20), Arrival(0.03, ONLINE, 20, 9)]
    )
    admitted, num_preempted = [], 0
    while engine.has_work:
        dispatch = engine.begin()
        admitted += [request.seq for request in dispatch.admissions]
        num_preempted += len(dispatch.plan.preempt)
        engine.compute(dispatch)

    assert num_preempted > 0
    assert admitted == [0, 1]


def test_a_nested_step_says_that_it_is_one():
    host, newcomer = make_host(), make_request(0, ONLINE)
    enter(host, newcomer)
    engine = FakeEngine(host, [])
    engine.kv.arrivals[newcomer] = Arrival(0.0, ONLINE, 8, 8)

    dispatch = host.nest(engine.kv, 3.0, (), inf)

    assert dispatch.is_nested
    assert dispatch.grants == [(newcomer, 8)]
    assert newcomer.admitted == 3.0


# What it charges


def charges(host: Host) -> dict[str, float]:
    return {tenant: cost for _, bills in host.settle() for tenant, cost in bills.items()}


@pytest.mark.parametrize(
    ("end", "before", "found", "paid"),
    [
        pytest.param(5, 4, (1, 0), 1.0, id="a chunk of one prompt token"),
        pytest.param(8, 7, (1, 0), 3.0, id="the last prompt token, and the first of the answer"),
        pytest.param(10, 11, (0, 1), 0.0, id="one token of the answer again"),
        pytest.param(10, 9, (0, 0), 2.0, id="a new token"),
        pytest.param(10, 10, (0, 1), 0.0, id="the last token again"),
    ],
)
def test_a_step_of_one_token_is_charged_for_what_it_is(end, before, found, paid):
    host, request = make_host(), make_request(0)
    make_snapshot(host, [request], now=0.0, free_blocks=64)
    host.admit(request)
    request.num_tokens, request.num_computed, request.most_computed = max(end, before, 8), end, before

    assert host.computed(request, 1, 1.0) == found
    assert sum(charges(host).values()) == paid


def test_a_tenant_pays_for_its_prompt_once_and_for_each_new_token_twice():
    host, request = make_host(), make_request(0)
    make_snapshot(host, [request], now=0.0, free_blocks=64)
    host.admit(request)

    request.num_computed = 6
    assert host.computed(request, 6, 1.0) == (6, 0)
    assert charges(host) == {"default": 6}
    request.num_computed = 8
    assert host.computed(request, 2, 2.0) == (2, 0)
    assert charges(host) == {"default": 2 + 2}, "the last of its prompt, and its first token"
    request.num_tokens, request.num_output, request.steps_waited = 9, 1, 5
    host.preempt(request)
    assert request.steps_waited == 0
    host.admit(request)
    request.num_computed = 7
    assert host.computed(request, 7, 3.0) == (0, 7), "what is computed again is not charged again"
    request.num_computed = 9
    assert host.computed(request, 2, 3.0) == (0, 1)
    request.num_computed = request.num_tokens = 10
    assert host.computed(request, 1, 3.0) == (0, 0)
    assert charges(host) == {"default": 2 + 2}, "two new tokens in one step"
    assert charges(host) == {}
    assert host.ledgers[OFFLINE].service("default") == 14
    assert request.first_token == 2.0


def test_a_tenant_that_returns_is_lifted_and_one_that_stayed_is_not():
    host = make_host()
    stays, away = make_request(0, tenant="stays"), make_request(1, tenant="away")
    enter(host, stays, away)
    host.leave(away, 1.0, is_complete=False)
    host.ledgers[OFFLINE].charge("stays", 100)
    service = host.ledgers[OFFLINE].service

    enter(host, make_request(2, tenant="away"))
    assert (service("stays"), service("away")) == (100, 100)
    host.ledgers[OFFLINE].charge("stays", 100)
    enter(host, make_request(3, tenant="away"), make_request(4, tenant="stays"))
    assert (service("stays"), service("away")) == (200, 100)


def observe(host: Host, steps: int) -> None:
    for index in range(steps):
        work = StepWork(64 + index % 5, 2000.0) if index % 2 else StepWork(0, 0.0, 4, 400 + index)
        host.observed(work, EXACT.predict(work))


def test_idle_tenants_are_dropped_where_there_are_many_and_present_ones_are_kept():
    host = make_host()
    enter(host, make_request(0, tenant="here"))
    for index in range(MOST_KEPT):
        host.ledgers[OFFLINE].charge(f"gone {index}", 1)
    host.ledgers[OFFLINE].charge("here", 10)
    host.ledgers[ONLINE].charge("few", 1)

    observe(host, REFIT_STEPS - 1)
    assert len(host.ledgers[OFFLINE].services) == MOST_KEPT + 1
    observe(host, 1)

    assert dict(host.ledgers[OFFLINE].services) == {"here": 10}
    assert dict(host.ledgers[ONLINE].services) == {"few": 1}


# What it learns


def test_the_cost_model_is_fitted_on_the_way_and_the_ceiling_follows():
    host = Host(PolicyConfig(slots=512, num_blocks=64, tpot=0.02, offline_share=0.5))
    assert (host.ceiling, host.cost.is_trusted) == (None, False)
    assert host.reservation.slots == 256

    observe(host, 2 * REFIT_STEPS)

    assert host.cost.is_trusted
    assert host.cost.predict(StepWork(100, 5050.0)) == pytest.approx(EXACT.predict(StepWork(100, 5050.0)), rel=0.02)
    assert host.ceiling == pytest.approx((0.02 - 0.005) / EXACT.decode(105), abs=2)
    assert host.reservation.slots == -(-host.ceiling // 2)


def test_the_ceiling_follows_the_mean_context_slowly():
    host = Host(PolicyConfig(slots=512, num_blocks=64, tpot=0.02), cost=EXACT)
    for context in [1000] * (REFIT_STEPS - 1) + [9000]:
        host.observed(StepWork(num_decode=1, decode_context=context), 0.01)

    assert host.ceiling == EXACT.batch_ceiling(slots=512, mean_context=1000 + 0.05 * 8000, tpot=0.02)


def test_latencies_from_before_the_cost_model_is_trusted_do_not_count():
    host = Host(PolicyConfig(slots=8, num_blocks=64, max_interference=0.1))
    for seq in range(10):
        request = make_request(seq, ONLINE, arrival=float(seq))
        enter(host, request, now=float(seq))
        host.began(StepPlan(predicted_seconds=1.0, parts=StepParts(offline=0.5)), float(seq))
        host.admit(request)
        request.num_computed = 8
        host.computed(request, 8, seq + 1.0)
        host.ended(seq + 1.0)
        request.num_tokens, request.num_output = 10, 2
        host.leave(request, seq + 1.5, is_complete=True)
    assert host.interference.inflation > 0.5

    observe(host, 2 * REFIT_STEPS)

    assert host.cost.is_trusted
    assert host.interference.inflation == 0


@pytest.mark.parametrize(("cap", "share"), [(0.5, 1 / 32), (None, 0.0)], ids=["under a cap", "without a cap"])
def test_under_a_cap_online_computes_one_of_32_steps_alone(cap, share):
    engine = FakeEngine(
        make_host(num_blocks=2000, offline_share=0.0, max_interference=cap),
        [Arrival(0.0, ONLINE, 8, 640), *(Arrival(0.0, OFFLINE, 8, 640) for _ in range(8))],
    )
    classes = []
    while engine.has_work:
        dispatch = engine.begin()
        classes.append({request.request_class for request, _ in dispatch.grants})
        engine.compute(dispatch)

    steps = [found for found in classes if ONLINE in found]
    assert steps.count({ONLINE}) / len(steps) == pytest.approx(share, abs=0.005)


def test_the_clock_of_delay_knows_the_decodes_of_a_request():
    host, request = make_host(), make_request(0, ONLINE, num_output=5)
    host.cost = EXACT
    enter(host, request)
    seen = []
    host.interference.finished = lambda *given: seen.append(given)

    host.leave(request, 3.0, is_complete=True)

    assert seen == [(request, 3.0, 4 * (EXACT.k3 + EXACT.k4 * request.num_tokens))]


def test_the_clock_of_delay_knows_the_step_of_a_prompt():
    host, request = make_host(), make_request(0, ONLINE, num_prompt_cached=4, num_computed=8)
    seen = []
    host.interference.answered = lambda *given: seen.append(given)

    host.computed(request, 4, 3.0)

    assert seen == [(request, 3.0, EXACT.k0 + EXACT.prefill(4, 4))]


def test_a_refit_and_requests_that_leave_do_not_change_whether_the_reservation_is_met():
    host = make_host()
    leaving = [make_request(0), make_request(1, ONLINE, phase=PARKED)]
    make_snapshot(host, [*leaving, make_request(2)], now=0.0, free_blocks=64)
    host.reservation = replace(host.reservation, in_use=1, is_met=False)
    host.configure(host.config)
    for request in leaving:
        host.leave(request, 0.0, is_complete=False)

    assert (host.reservation.in_use, host.reservation.is_met) == (1, False)


def test_an_unknown_model_is_fitted_four_times_as_often_and_only_its_first_trusted_fit_forgets_latencies():
    host = Host(PolicyConfig(slots=8, num_blocks=64))
    host.interference.inflation = 0.5
    observe(host, REFIT_STEPS // 4)
    assert (host.cost, host.interference.inflation) == (CostModel(), 0.5), "too few steps"
    observe(host, REFIT_STEPS // 4)
    assert host.cost != CostModel()
    observe(host, 2 * REFIT_STEPS)
    assert (host.cost.is_trusted, host.interference.inflation) == (True, 0)
    host.interference.inflation = 0.5
    observe(host, REFIT_STEPS)
    assert host.interference.inflation == 0.5


def test_full_steps_of_a_backlog_do_not_keep_the_cost_model_unknown():
    """A worker starts into a backlog of long prompts: every step beside their answers would be full."""
    coming = [Arrival(0.0, ONLINE, 900, 200, ttft=5.0) for _ in range(40)]
    host = Host(PolicyConfig(slots=64, num_blocks=20_000, chunk_tokens=64, ttft=5.0, tpot=0.1), planner=lawful)
    engine = FakeEngine(host, coming)
    while not host.cost.is_trusted:
        engine.step()

    assert engine.num_steps <= 5 * REFIT_STEPS


def test_only_a_trusted_model_of_decodes_is_fitted_seldom():
    """The model is trusted with prompts alone. It does not know what the first decodes take."""
    host = Host(PolicyConfig(slots=8, num_blocks=64))
    for index in range(2 * REFIT_STEPS):
        work = StepWork(size := 64 + 32 * (index % 5), attended(0, size))
        host.observed(work, EXACT.predict(work))
    assert (host.cost.is_trusted, host.cost.k3) == (True, 0.0)
    for index in range(REFIT_STEPS // 4):
        work = StepWork(0, 0.0, 10 + index, 4000)
        host.observed(work, EXACT.predict(work))

    assert host.cost.k3 == pytest.approx(EXACT.k3, rel=0.5)


def test_the_ceiling_keeps_the_ttft_of_the_usual_prompt():
    host = Host(PolicyConfig(slots=512, num_blocks=64, ttft=0.2), cost=EXACT)
    host.expectations.typical_prompt = 300.0
    host.configure(host.config)

    assert host.ceiling == EXACT.batch_ceiling(slots=512, mean_context=0, ttft=0.2, prompt=300) < 512


def test_the_fit_knows_an_encoder_and_the_experts_of_the_model():
    encoder = Host(PolicyConfig(slots=8, num_blocks=64, is_encoder=True))
    for _ in range(2 * REFIT_STEPS):
        encoder.observed(StepWork(64, 2080.0), 0.01)
    experts, cost = Host(PolicyConfig(slots=8, num_blocks=64, expert_share=0.1)), replace(EXACT, k5=0.03, missed=0.9)
    for index in range(2 * REFIT_STEPS):
        work = StepWork(1 + index % 9, 200.0) if index % 2 else StepWork(0, 0.0, 1 + index % 7, 400 + index)
        experts.observed(work, cost.predict(work))

    assert encoder.cost.is_trusted
    assert experts.cost.k5 == pytest.approx(0.03, rel=0.1)


def test_only_complete_answers_count_for_the_lengths_of_answers():
    host = make_host()
    for seq in range(64):
        request = make_request(seq, num_output=3 if seq % 2 else 1)
        enter(host, request)
        host.leave(request, 0.0, is_complete=bool(seq % 2))

    assert host.expectations.expectation.outputs == {OFFLINE: (3,) * 32}


def test_the_usual_prompt_is_what_online_has_to_compute_behind_the_cache():
    arrivals = [Arrival(float(index), ONLINE, 20, 1, prefix_key=1, shared=16) for index in range(60)]
    engine = FakeEngine(make_host(), arrivals)

    engine.run()

    assert engine.host.expectations.typical_prompt == pytest.approx(4, abs=0.5)
    assert engine.host.expectations.expectation.online_until == pytest.approx(59.0 + 10.0, rel=0.1)


def test_a_host_that_forgets_keeps_its_cost_model_and_its_configuration():
    host = Host(PolicyConfig(slots=8, num_blocks=64, max_interference=0.1, tenants={"a": TenantShare(reserved=0.5)}))
    enter(host, request := make_request(0, ONLINE, tenant="a"))
    host.leave(request, 1.0, is_complete=True)
    host.ledgers[ONLINE].charge("a", 10)
    observe(host, 2 * REFIT_STEPS)
    fresh = Host(host.config, cost=host.cost)

    host.forget()

    assert host.cost.is_trusted
    assert host.ledgers[ONLINE].service("a") == 0
    assert host.ledgers[OFFLINE].reserved == {"a": 0.5}
    assert host.expectations.expectation == fresh.expectations.expectation
    assert host.interference.allowance == fresh.interference.allowance


# What it is told


def test_another_configuration_holds_from_the_next_step_on():
    host = make_host(slots=8, offline_share=0.5)
    enter(host, *(make_request(seq, tenant="ab"[seq % 2]) for seq in range(16)))
    tenants = {"a": TenantShare(weight=4.0, max_slots=1, reserved=0.25)}
    seen: list[EngineSnapshot] = []

    def planner(snapshot: EngineSnapshot) -> StepPlan:
        seen.append(snapshot)
        return StepPlan()

    host.planner = planner
    slo = {"ttft": 1.0, "tpot": 0.05, "objective": 0.9}
    host.configure(replace(host.config, slots=4, tenants=tenants, max_interference=0.5, **slo))
    host.schedule(CountedKv(64), 0.0)
    host.ledgers[OFFLINE].charge("a", 100)

    assert seen[0].config.slots == 4
    assert seen[0].reservation.slots == 2
    assert seen[0].allowance.share == pytest.approx(0.46)
    assert (host.interference.cap, host.interference.may_lose) == (0.5, pytest.approx(0.05))
    assert host.interference.slo == (1.0, 0.05)
    assert host.ledgers[OFFLINE].reserved == {"a": 0.25}
    assert host.ledgers[OFFLINE].service("a") == 25
    assert [r.tenant for r in seen[0].waiting].count("a") <= 2


# Integrity


def test_counts_that_disagree_are_returned():
    host = make_host()
    waiting, resident = make_request(0), make_request(1, phase=RUNNING)
    make_snapshot(host, [waiting, resident], now=0.0, free_blocks=64)
    assert host.imbalance() == ""

    resident.phase = PARKED
    assert "residents by phase" in host.imbalance()
    resident.phase = RUNNING
    host.backlog.remove(waiting)
    assert "requests present" in host.imbalance()
    host.backlog.add(waiting)
    host.residents[0] = waiting
    assert "waiting requests: 1 counted, 0 found" in host.imbalance()
