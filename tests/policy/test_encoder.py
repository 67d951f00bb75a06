"""An encoder: a request ends with its prefill, which takes one step, and has one latency as its SLO."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import laws
import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from laws import lawful
from workloads import EXACT, Arrival, make_snapshot

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel, Fit, StepWork, attended
from ballast_policy.learning.expectation import Expectation
from ballast_policy.learning.interference import Allowance, Interference
from ballast_policy.plan import Because, Reason, StepParts, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request, RequestClass
from ballast_policy.reservation import Reservation
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan

COST = CostModel(0.002, 1e-5, 1e-8, is_trusted=True)
ONE_BLOCK = {"num_blocks": 1, "num_private_blocks": 1}
CONFIG = PolicyConfig(
    slots=64,
    num_blocks=10_000,
    chunk_tokens=4096,
    offline_share=0.0,
    ttft=0.030,
    can_suspend=False,
    is_encoder=True,
)


def requests(online: list[int], offline: list[int], *, age: float = 0.0) -> list[Request]:
    sizes = [(ONLINE, size) for size in online] + [(OFFLINE, size) for size in offline]
    return [
        Request(seq, kind, 10.0 - age, size, 1, num_tokens=size, ttft=CONFIG.ttft if kind is ONLINE else inf)
        for seq, (kind, size) in enumerate(sizes)
    ]


def snapshot(
    waiting: list[Request], *, config: PolicyConfig = CONFIG, cost: CostModel = COST, rate: float = 0.0, prompt: int = 0
) -> EngineSnapshot:
    return EngineSnapshot(
        now=10.0,
        residents=(),
        waiting=waiting,
        free_blocks=config.num_blocks,
        config=config,
        cost=cost,
        reservation=config.reservation(),
        typical_prompt=prompt,
        expectation=Expectation(online_rate=rate, online_until=11.0 if rate else -inf),
    )


def tokens_of(decided: StepPlan, kind: RequestClass) -> int:
    return sum(tokens for request, tokens in decided.grants if request.request_class is kind)


@given(
    online=st.lists(st.integers(2, 512), max_size=40),
    offline=st.lists(st.integers(2, 512), max_size=40),
    age=st.floats(0, 0.1),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    cost=st.sampled_from([COST, replace(COST, is_trusted=False)]),
)
def test_each_prompt_is_computed_in_one_step(online, offline, age, share, cost):
    config = replace(CONFIG, offline_share=share)
    found = snapshot(requests(online, offline, age=age), config=config, cost=cost, rate=1000.0, prompt=100)
    decided = plan(found)

    assert all(tokens == request.num_tokens for request, tokens in decided.grants)
    for law in (
        laws.the_plan_is_well_formed,
        laws.slots_and_chunk_are_never_exceeded,
        laws.g3_no_engine_idles_while_work_waits,
        laws.g4_the_prediction_is_that_of_the_grants,
        laws.everything_has_its_because,
    ):
        law(found, decided)
    if cost.is_trusted and not share and tokens_of(decided, OFFLINE):
        assert decided.predicted_seconds <= decided.budget_seconds + 1e-12


def test_online_takes_at_most_half_of_its_latency_in_a_step():
    decided = plan(snapshot(requests([100] * 60, [])))

    assert 0.013 < decided.predicted_seconds <= CONFIG.ttft / 2


def test_a_first_prompt_longer_than_half_of_the_latency_starts():
    decided = plan(snapshot(requests([2000, 2000], [])))

    assert [tokens for _, tokens in decided.grants] == [2000]


def test_offline_fills_what_online_leaves_until_the_next_request_would_be_late():
    alone = plan(snapshot(requests([], [100] * 64)))
    quiet = plan(snapshot(requests([100], [100] * 64), prompt=100))
    busy = plan(snapshot(requests([100], [100] * 64), prompt=100, rate=900.0))

    assert tokens_of(alone, OFFLINE) >= tokens_of(quiet, OFFLINE) > tokens_of(busy, OFFLINE) > 0
    for decided, rate in ((quiet, 0.0), (busy, 900.0)):
        step = decided.predicted_seconds
        crowd = COST.k0 + (1 + rate * step) * COST.prefill(0, 100)
        assert step + crowd <= CONFIG.ttft + 1e-9, "a request that arrives as the step starts, and all after it"


def test_a_prompt_that_no_step_has_time_for_does_not_stop_shorter_ones():
    decided = plan(snapshot(requests([100], [3000, 100, 100]), prompt=100, rate=100.0))

    assert [request.num_tokens for request, _ in decided.grants] == [100, 100, 100]


def test_a_request_that_waited_leaves_offline_less():
    young, old = (plan(snapshot(requests([100], [100] * 64, age=age), prompt=100)) for age in (0.0, 0.020))

    assert tokens_of(young, OFFLINE) > tokens_of(old, OFFLINE)
    assert 10.0 + old.predicted_seconds <= 10.0 - 0.020 + CONFIG.ttft


def test_requests_that_were_lost_to_offline_shorten_its_steps_with_and_without_online():
    for waiting in (requests([], [100] * 64), requests([100], [100] * 64)):
        usual = snapshot(waiting, prompt=100, rate=100.0)
        lost = replace(usual, allowance=Allowance(lending_ratio=0.3))

        assert 0 < tokens_of(plan(lost), OFFLINE) < 0.6 * tokens_of(plan(usual), OFFLINE)


def test_when_online_is_late_in_any_case_nothing_is_lent():
    decided = plan(snapshot(requests([100] * 64, [100] * 64), prompt=100, rate=2500.0))

    assert tokens_of(decided, OFFLINE) == 0
    assert Reason.STEP_BUDGET in {because.reason for because in decided.because}


def test_a_lent_prompt_that_does_not_fit_waits_and_an_idle_engine_takes_it():
    (long,) = requests([], [4000])
    beside = plan(snapshot([*requests([100] * 10, []), replace(long, seq=99)], prompt=100, rate=1000.0))
    alone = plan(snapshot([long], prompt=100, rate=1000.0))

    assert tokens_of(beside, OFFLINE) == 0
    assert alone.grants == ((long, 4000),)


def test_the_reservation_runs_a_whole_prompt_in_every_step():
    config = replace(CONFIG, offline_share=0.02)
    decided = plan(snapshot(requests([100] * 64, [300] * 8), config=config, prompt=100, rate=2500.0))

    assert tokens_of(decided, OFFLINE) == 300, "a fiftieth of a step is less than a prompt"


def test_steps_without_decodes_make_the_cost_model_of_an_encoder_trusted():
    rng = np.random.default_rng(5)
    encoder = Fit(is_encoder=True)
    for _ in range(64):
        sizes = rng.integers(20, 400, size=int(rng.integers(1, 30)))
        work = StepWork(int(sizes.sum()), sum(attended(0, int(size)) for size in sizes))
        encoder.add(work, COST.predict(work))
    found = encoder.refit()

    assert found.is_trusted
    assert (found.k0, found.k1, found.k2) == pytest.approx((COST.k0, COST.k1, COST.k2), rel=1e-3)


def test_in_steps_of_one_size_all_time_counts_as_that_of_tokens():
    fit = Fit(is_encoder=True)
    work = StepWork(1000, attended(0, 1000))
    for _ in range(32):
        fit.add(work, 0.010)
    found = fit.refit()

    assert found.is_trusted
    assert found.k0 == 0
    assert found.predict(work) == pytest.approx(0.010)


def test_the_ceiling_is_the_largest_batch_of_prompts_whose_wait_and_step_fit():
    for prompt in (20, 100, 400):
        ceiling = COST.batch_ceiling(slots=1000, mean_context=0, ttft=0.030, prompt=prompt)
        step, larger = (COST.k0 + size * COST.prefill(0, prompt) for size in (ceiling, ceiling + 1))

        assert 2 * step <= 0.030 < 2 * larger


def test_an_embedding_is_charged_for_its_prompt_alone():
    host = Host(CONFIG, cost=COST)
    (request,) = requests([100], [])
    host.enter(request, 10.0)
    host.admit(request)
    request.num_computed = 100
    host.computed(request, 100, 10.01)

    assert dict(host.settle()) == {ONLINE: {"default": 100.0}}


def test_a_cap_on_interference_needs_no_tokens():
    interference = Interference()
    interference.configure(0.1, 0.0)
    for seq in range(20):
        now = float(seq)
        request = Request(seq, ONLINE, now, 100, 1, num_tokens=100)
        interference.arrived(request, now)
        interference.began(StepPlan(predicted_seconds=0.2, parts=StepParts(offline=0.1)), now)
        interference.ended(now + 0.2)
        interference.answered(request, now + 0.2)
        interference.finished(request, now + 0.2)

    assert interference.inflation == pytest.approx(1.0)
    assert interference.allowance.share == 0.0


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_reservation_of_an_encoder_leaves_online_prompts_their_part_of_the_time(is_trusted: bool):
    config = replace(
        CONFIG, slots=32, num_blocks=20_000, block_tokens=16, chunk_tokens=8192, offline_share=0.1, ttft=2.0
    )
    online = [Arrival(0.01 + 0.05 * i, ONLINE, 100, 1, ttft=2.0) for i in range(20)]
    offline = [Arrival(0.0, OFFLINE, 8192, 1) for _ in range(30)]
    engine = FakeEngine(Host(config, cost=replace(EXACT, is_trusted=is_trusted), planner=lawful), [*online, *offline])
    engine.run()

    answered = max(end for arrival, end in engine.ended.values() if arrival.request_class is ONLINE)
    done = max(end for arrival, end in engine.ended.values() if arrival.request_class is OFFLINE)
    assert answered < done / 4, "online waits until little offline work is left"


def test_a_whole_prompt_of_the_reservation_fits_into_the_step():
    config = replace(CONFIG, chunk_tokens=16, offline_share=1.0, slots=4)
    engine = FakeEngine(Host(config, cost=EXACT, planner=lawful), [Arrival(0.0, OFFLINE, size, 1) for size in (15, 2)])

    assert [tokens for _, tokens in engine.begin().grants] in ([15], [2]), "the other one does not fit beside it"


def test_an_offline_prompt_longer_than_a_quarter_of_a_step_starts_while_step_times_are_unknown():
    config = replace(CONFIG, chunk_tokens=64, offline_share=0.0, slots=8)
    cost = replace(EXACT, is_trusted=False)
    arrivals = [Arrival(0.0, ONLINE, 1, 1), Arrival(0.0, OFFLINE, 17, 1)]
    engine = FakeEngine(Host(config, cost=cost, planner=lawful), arrivals)
    engine.run(max_steps=10)


def test_a_whole_prompt_of_the_reservation_leaves_the_tokens_of_a_longer_one():
    config = replace(CONFIG, chunk_tokens=16, offline_share=1.0, slots=4)
    long, whole = Arrival(0.0, OFFLINE, 18, 1), Arrival(0.001, OFFLINE, 15, 1)
    engine = FakeEngine(Host(config, cost=EXACT, planner=lawful), [long, whole])
    engine.step()

    assert [tokens for _, tokens in engine.begin().grants] == [2]


FLOOD = [Arrival(0.0, ONLINE, 100, 1)] * 100 + [Arrival(0.0, OFFLINE, 100, 1)] * 20


def reservation_in(engine: FakeEngine, num_steps: int) -> list[Reservation]:
    """Step while online waits, and return the reservation of each step."""
    found = []
    for _ in range(num_steps):
        engine.compute(engine.begin())
        found.append(engine.host.reservation)
    assert engine.host.count(ONLINE)
    return found


def test_the_reservation_of_an_encoder_is_met_by_its_tokens_although_slots_are_free():
    config = replace(CONFIG, chunk_tokens=512, offline_share=0.1)
    engine = FakeEngine(Host(config, cost=COST), FLOOD, cost=COST)

    found = reservation_in(engine, 10)

    assert all(each.is_met for each in found)
    assert any(each.in_use < each.slots for each in found)
    assert sum(arrival.request_class is OFFLINE for arrival, _ in engine.ended.values()) == 6, "520 tokens in advance"


def test_the_reservation_of_an_encoder_without_its_tokens_is_not_met():
    config = replace(CONFIG, chunk_tokens=512, offline_share=0.1)
    ignored = Host(config, cost=COST, planner=lambda found: plan(replace(found, reservation=Reservation())))

    found = reservation_in(FakeEngine(ignored, FLOOD, cost=COST), 10)

    assert not any(each.is_met for each in found)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("offline", [50, 300, 512, 5000])
def test_an_online_prompt_that_does_not_fit_beside_the_reservation_takes_turns_with_it(offline: int, share: float):
    """A step has 512 tokens. Online needs 500 of them, and offline work never runs out."""
    config = replace(CONFIG, chunk_tokens=512, offline_share=share, offline_max_share=share, max_interference=0.0)
    flood = [Arrival(0.0, OFFLINE, offline, 1)] * (60_000 // offline) + [Arrival(0.0, ONLINE, 500, 1)] * 110
    engine = FakeEngine(Host(config, cost=COST, planner=lawful), flood, cost=COST)
    seen, computed = [], 0
    for _ in range(100):
        dispatch = engine.begin()
        computed += sum(tokens for request, tokens in dispatch.grants if request.request_class is OFFLINE)
        seen.append({request.request_class for request, _ in dispatch.grants})
        assert engine.host.reservation.is_met
        engine.compute(dispatch)

    turns = [step for step, classes in enumerate(seen) if OFFLINE in classes]
    assert sum(ONLINE in classes for classes in seen) >= 100 * (1 - share) - 1
    assert max(after - before for before, after in pairwise(turns)) <= 1 / share + 1
    if offline >= config.chunk_tokens:  # all slots that offline may hold take fewer tokens of shorter prompts
        assert computed >= 0.9 * share * 512 * 100


@pytest.mark.parametrize("slots", [8, 64])
def test_offline_takes_all_slots_but_one_in_its_turn(slots: int):
    """The TTFT leaves no time to lend. Prompts in the reserved slots alone would leave most of the step empty."""
    config = replace(CONFIG, chunk_tokens=512, offline_share=0.1, slots=slots, ttft=0.012)
    flood = [Arrival(0.0, OFFLINE, 60, 1)] * 1000 + [Arrival(0.0, ONLINE, 500, 1, ttft=0.012)] * 110
    engine = FakeEngine(Host(config, cost=COST, planner=lawful), flood, cost=COST)
    turns = []
    for _ in range(100):
        dispatch = engine.begin()
        turns.append(sum(tokens for request, tokens in dispatch.grants if request.request_class is OFFLINE))
        engine.compute(dispatch)

    assert min(tokens for tokens in turns if tokens) == min(slots - 1, 512 // 60) * 60
    assert sum(turns) >= 0.75 * 0.1 * 512 * 100


@pytest.mark.parametrize(("small", "large", "offline", "slots"), [(10, 480, 50, 8), (1, 490, 10, 40)])
def test_an_online_prompt_is_not_stopped_by_offline_and_smaller_online_prompts_together(small, large, offline, slots):
    """Each step has a small online prompt of a higher priority, and without offline room for a large one."""
    config = replace(CONFIG, slots=slots, chunk_tokens=512, offline_share=0.1, offline_max_share=0.1, ttft=inf)
    engine = FakeEngine(Host(config, cost=COST, planner=lawful), [Arrival(0.0, OFFLINE, offline, 1)] * 2000, cost=COST)
    engine.coming += [Arrival(0.0, ONLINE, large, 1)] * 40
    for _ in range(150):
        engine.coming.append(Arrival(engine.now, ONLINE, small, 1, priority=1))
        engine.step()

    assert sum(arrival.prompt == large for arrival, _ in engine.ended.values()) == 40


@pytest.mark.parametrize(
    ("config", "steps", "chunks"),
    [
        pytest.param({}, [(0, 64, False), (0, 0, False), (0, 0, False)], [0, 0, 0], id="at most a whole step ahead"),
        pytest.param({}, [(20, 30, True)] * 2 + [(44, 0, False)] * 2, [2, 0, 0, 6], id="as much as online leaves"),
        pytest.param({}, [(60, 4, False)], [16], id="less than is reserved"),
        pytest.param({}, [(60, 16, False)], [16], id="as much as is reserved"),
        pytest.param({"is_encoder": False}, [(0, 64, False)], [16], id="a model that generates"),
    ],
)
def test_offline_tokens_of_an_encoder_beyond_the_reservation_are_left_out_of_later_steps(config, steps, chunks):
    """A step has 64 tokens, 16 of them reserved. `steps`: tokens of online and offline, and if a prompt is stopped."""
    host = Host(replace(CONFIG, **{"slots": 4, "chunk_tokens": 64, "offline_share": 0.25} | config), cost=COST)
    waiting = requests([100, 64], [100])
    for request in waiting:
        host.enter(request, 10.0)
    found = []
    for online, offline, is_stopped in steps:
        because = (Because(waiting[1], Reason.CHUNK_SPENT),) if is_stopped else ()
        host.dispatched(StepPlan(((waiting[0], online), (waiting[2], offline)), because=because), waiting, 10.0)
        found.append(make_snapshot(host, [], now=10.0, free_blocks=100).reservation.chunk)

    assert found == chunks


def test_without_online_no_offline_tokens_of_an_encoder_count():
    host = Host(replace(CONFIG, chunk_tokens=64, offline_share=0.25), cost=COST)
    (item,) = requests([], [100])
    host.enter(item, 10.0)
    host.dispatched(StepPlan(((item, 64),)), [item], 10.0)

    assert make_snapshot(host, [], now=10.0, free_blocks=100).reservation.chunk == 16


def test_offline_takes_no_whole_step_if_its_prompts_leave_room_for_online():
    """The first online prompt fits beside the prompts in reserved slots, although not beside the reserved tokens."""
    config = replace(CONFIG, slots=8, chunk_tokens=512, offline_share=0.1, ttft=inf)

    found = plan(snapshot(requests([470, *[5] * 20], [2] * 20), config=config))

    assert [request.num_tokens for request in found.admit if request.request_class is OFFLINE] == [2]
    assert [request.num_tokens for request in found.admit if request.request_class is ONLINE] == [470, *[5] * 6]


def test_offline_takes_no_whole_step_if_the_rest_of_its_prompts_leaves_room_for_online():
    """A prompt larger than a step has 5 tokens left, and one reserved slot is free."""
    config = replace(CONFIG, slots=4, chunk_tokens=64, offline_share=0.5, ttft=inf)
    blocks = {"num_blocks": 7, "num_private_blocks": 7}
    begun = Request(9, OFFLINE, 9.9, 100, 1, phase=Phase.RUNNING, num_tokens=100, num_computed=95, **blocks)
    waiting = requests([50], [4, 20, 20])

    found = plan(replace(snapshot(waiting, config=config), residents=[begun]))

    assert dict(found.grants) == {begun: 5, waiting[0]: 50, waiting[1]: 4}


def test_a_whole_prompt_takes_more_than_the_only_reserved_token():
    """A prompt larger than a step is computed in parts, and leaves the reserved token only."""
    config = replace(CONFIG, slots=4, chunk_tokens=4, offline_share=0.1, ttft=inf)
    begun = Request(9, ONLINE, 9.9, 12, 1, phase=Phase.RUNNING, num_tokens=12, num_computed=4, **ONE_BLOCK)
    (item,) = requests([], [3])

    found = plan(replace(snapshot([item], config=config), residents=[begun]))

    assert dict(found.grants) == {item: 3, begun: 1}


def test_the_step_of_an_idle_encoder_is_long_enough_for_its_longest_prompt():
    cost = CostModel(0.002, 1e-5, 1e-4, is_trusted=True)
    config = replace(CONFIG, ttft=0.003)
    found = plan(snapshot(requests([], [100]), config=config, cost=cost))

    assert found.budget_seconds == pytest.approx(0.002 + cost.prefill(0, 100), rel=1e-6)


def test_online_prompts_that_are_late_in_any_case_do_not_shorten_the_steps_of_an_idle_encoder():
    """The step alone of a usual prompt takes longer than the latency. With 1,500 tokens, it is just in time."""
    bounds = [plan(snapshot(requests([], [100] * 40), prompt=prompt)).budget_seconds for prompt in (1000, 1500, 6000)]

    assert bounds[1] < bounds[0] < bounds[2] == CONFIG.ttft / 2


def test_an_online_prompt_of_one_token_takes_no_reserved_tokens_of_an_encoder():
    config = replace(CONFIG, slots=3, chunk_tokens=4, offline_share=1.0, ttft=inf)
    coming = [Arrival(0.0, OFFLINE, 2, 1), Arrival(0.0, OFFLINE, 12, 1), Arrival(0.0, ONLINE, 2, 1)]
    engine = FakeEngine(Host(config, cost=COST, planner=lawful), coming, cost=COST)
    engine.step()
    engine.coming.append(Arrival(engine.now, ONLINE, 1, 1))

    dispatch = engine.begin()

    taken = sum(tokens for request, tokens in dispatch.grants if request.request_class is OFFLINE)
    assert taken == 2, "three are reserved, and the first step computed one in advance"
    assert len(dispatch.grants) == 3
    laws.the_reservation_is_what_residents_and_backlog_say(engine.host, dispatch)
    assert engine.host.reservation.is_met


@pytest.mark.parametrize("sizes", [[5, 2], [5, 5]])
def test_online_prompts_take_the_time_of_an_offline_request_that_no_reserved_slot_covers(sizes: list[int]):
    """A prompt has the only reserved slot. The request beside it, with one token left, takes longer than the SLO."""
    config = replace(CONFIG, slots=3, num_blocks=32, block_tokens=1, chunk_tokens=4, offline_share=0.1, ttft=0.05)
    cost = CostModel(k0=1e-9, k2=1e-3, k4=1.0, is_trusted=True)
    begun = [
        Request(seq, OFFLINE, 9.9, size, 1, phase=Phase.RUNNING, num_tokens=size, num_computed=1, **ONE_BLOCK)
        for seq, size in enumerate([3, 2], start=5)
    ]
    waiting = requests(sizes, [1, 1], age=0.1)
    host = Host(config, cost=cost)

    found = lawful(make_snapshot(host, [*begun, *waiting], now=10.0, free_blocks=30))

    assert dict(found.grants) == {waiting[0]: 3, begun[0]: 1}
    assert begun[1] in found.park
