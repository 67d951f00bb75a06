"""What offline work costs online, measured by a clock of delay; and what is allowed it for that."""

from __future__ import annotations

from math import exp, inf
from random import Random
from statistics import fmean
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from workloads import EXACT, Arrival

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel, StepWork
from ballast_policy.learning.interference import Allowance, Interference
from ballast_policy.plan import StepParts, StepPlan
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import PolicyConfig

CROWDED = CostModel(k0=0.005, k1=5e-5, k3=5e-4, is_trusted=True)
ALONE, STEP = 0.02, 0.03
"""A step takes half as long again as online alone would need."""


def make_request(seq: int, arrival: float, *, ttft: float = inf, tpot: float = inf) -> Request:
    return Request(seq, RequestClass.ONLINE, arrival, num_prompt=8, max_output=8, ttft=ttft, tpot=tpot)


class Traffic:
    """Online requests one after the other, each with a step of prefill and ten of decoding."""

    def __init__(self, cap: float | None = None, objective: float = 0.0) -> None:
        self.state = Interference()
        self.state.configure(cap, objective)
        self.now = 0.0
        self.num_served = 0

    @property
    def allowance(self) -> Allowance:
        return self.state.allowance

    def serve(self, number: int, *, alone: float = ALONE, gap: float = 0.0, num_output: int = 11, **slo: float) -> None:
        for _ in range(number):
            self.num_served += 1
            request = make_request(self.num_served, self.now, **slo)
            self.state.arrived(request, self.now)
            for index in range(num_output):
                self.step(alone)
                request.num_output = index + 1
                if index == 0:
                    request.first_token = self.now
                    self.state.answered(request, self.now)
            self.state.finished(request, self.now)
            self.now += gap

    def step(self, alone: float) -> None:
        self.state.began(StepPlan(predicted_seconds=STEP, parts=StepParts(offline=STEP - alone)), self.now)
        self.now += STEP
        self.state.ended(self.now)


def test_the_clock_of_delay_knows_what_online_alone_would_have_taken():
    traffic = Traffic(cap=0.1)

    traffic.serve(40)

    assert traffic.state.inflation == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("parts", "own", "alone"),
    [
        pytest.param((0.01, 0.005, 0.005), {}, 0.015, id="five tokens in steps of 15 ms, or ten in steps of 30 ms"),
        pytest.param((0.01, 0.005, 0.005), {"own": 1.0}, 0.02, id="all work is its own"),
        pytest.param((0.0, 0.03, 0.0), {}, 0.03, id="online fills the step"),
    ],
)
def test_an_answer_that_ends_sooner_meets_a_smaller_share_of_the_work_of_others(parts, own, alone):
    state, request = Interference(), make_request(0, 0.0)
    state.arrived(request, 0.0)
    request.first_token = 0.0
    state.answered(request, 0.0)
    state.began(StepPlan(predicted_seconds=0.03, parts=StepParts(*parts)), 0.0)
    request.num_output = 101
    state.finished(request, 3.0, **own)

    [(_, tpot)] = state.tpot
    assert tpot.measured == pytest.approx(0.03)
    assert tpot.alone == pytest.approx(alone)


@pytest.mark.parametrize(
    ("others", "own", "alone"),
    [
        pytest.param([], {}, 0.7, id="no other answers: only offline delays it"),
        pytest.param([0.0, 0.5], {}, 1 - 0.3 - 2 / 3 * (0.4 + 0.2), id="others would be done in a third of the time"),
        pytest.param([0.0, 0.5], {"own": 0.05}, 1 - 0.3 - 2 / 3 * (0.4 + 0.15), id="part of the prefill is its own"),
    ],
)
def test_without_offline_a_first_token_waits_for_a_smaller_share_of_other_answers(others, own, alone):
    state, request, ended = Interference(), make_request(0, 0.0), make_request(9, 0.0)
    state.arrived(request, 0.0)
    for now, parts in ((0.0, (0.3, 0.1, 0.05)), (0.5, (0.0, 0.3, 0.15))):
        state.began(StepPlan(predicted_seconds=0.5, parts=StepParts(*parts)), now)
        if now in others:
            state.arrived(other := make_request(1 + others.index(now), now), now)
            state.answered(other, now)
        if not now:
            state.arrived(ended, now)
            state.answered(ended, now)
            state.finished(ended, 0.4)
    state.answered(request, 1.0, **own)

    _, ttft = state.ttft[-1]
    assert (ttft.measured, ttft.alone) == (1.0, pytest.approx(alone))


def test_the_typical_step_is_known_after_some_steps_and_each_32nd_computes_online_alone():
    traffic, alone = Traffic(cap=0.1), []
    for number in range(1, 101):
        traffic.step(ALONE)
        assert traffic.allowance.typical == pytest.approx(ALONE, rel=1.01 / (1 + number))
        alone += [number] if traffic.allowance.is_alone else []

    assert alone == [32, 64, 96]


@pytest.mark.parametrize(("before", "inflation"), [(2, 0.0), (3, 0.5)])
def test_four_requests_tell_the_inflation(before: int, inflation: float):
    traffic = Traffic(cap=0.1)
    traffic.serve(before)
    traffic.now += 4
    traffic.serve(1)

    assert traffic.state.inflation == pytest.approx(inflation)


@pytest.mark.parametrize(("delayed", "inflation"), [(9, 0.0), (11, 0.5)])
def test_the_inflation_is_that_of_the_median(delayed: int, inflation: float):
    traffic = Traffic(cap=0.1)
    traffic.serve(delayed)
    traffic.serve(19 - delayed, alone=STEP)
    traffic.now += 4
    traffic.serve(1, alone=STEP)

    assert traffic.state.inflation == pytest.approx(inflation)


def test_latencies_of_no_time_alone_are_inflated_without_bound_unless_they_take_none():
    traffic, at_once = Traffic(cap=0.1), Traffic(cap=0.1)
    traffic.serve(20, alone=0.0)
    for seq in range(20):
        request = make_request(seq, now := 5.0 + seq)
        at_once.state.arrived(request, now)
        request.first_token, request.num_output = now, 1
        at_once.state.answered(request, now)
        at_once.state.finished(request, now)

    assert (traffic.state.inflation, at_once.state.inflation) == (inf, 0.0)


def test_the_latencies_that_are_kept_are_bounded():
    state = Interference()
    for seq in range(3000):
        request = make_request(seq, 0.0)
        state.arrived(request, 0.0)
        state.answered(request, 0.1)
        request.first_token, request.num_output = 0.1, 2
        state.finished(request, 0.2)

    assert len(state.ttft) == len(state.tpot) == 2048


@pytest.mark.parametrize("can_suspend", [True, False])
@pytest.mark.parametrize("cost", [EXACT, CROWDED], ids=["cheap decodes", "expensive decodes"])
@pytest.mark.parametrize("prompt", [8, 200])
@pytest.mark.parametrize("length", ["alike", "varied"])
def test_the_latency_of_online_alone_is_that_of_a_run_without_offline(
    length: str, prompt: int, cost: CostModel, can_suspend: bool
):
    """Later answers meet more prefill and more decodes of others. Suspension shortens the TTFT."""
    rng, at, arrivals = Random(1), 0.0, []
    while at < 10:
        at += rng.expovariate(20)
        output = 50 if length == "alike" else 2 + int(rng.expovariate(1 / 49))
        arrivals.append(Arrival(at, RequestClass.ONLINE, prompt, output))
    config = PolicyConfig(slots=64, num_blocks=10_000, ttft=1.0, tpot=0.03, can_suspend=can_suspend)

    tpot_of_a_run, ttft_of_a_run = replayed(config, cost, arrivals)
    tpot, ttft = replayed(config, cost, arrivals + [Arrival(0.0, RequestClass.OFFLINE, 64, 20_000)] * 60)

    assert tpot.measured > 1.8 * tpot_of_a_run.measured
    for found, of_a_run in ((tpot, tpot_of_a_run), (ttft, ttft_of_a_run)):
        assert of_a_run.alone == pytest.approx(of_a_run.measured, rel=1e-6)
        if found is tpot or not can_suspend:
            assert found.alone == pytest.approx(of_a_run.measured, abs=0.25 * (found.measured - of_a_run.measured))
        assert found.alone <= found.measured
    assert tpot.alone == pytest.approx(tpot_of_a_run.measured, abs=0.12 * (tpot.measured - tpot_of_a_run.measured))


@pytest.mark.parametrize("cost", [EXACT, CROWDED, CostModel(k0=0.002, k3=0.001), CostModel(k3=0.002)])
def test_a_request_meets_its_own_work_in_any_case(cost: CostModel):
    arrivals = [Arrival(0.5 * i, RequestClass.ONLINE, 8, 20) for i in range(20)]
    config = PolicyConfig(slots=64, num_blocks=10_000, can_suspend=False)
    tpot, _ = replayed(config, cost, arrivals + [Arrival(0.0, RequestClass.OFFLINE, 64, 20_000)] * 8)

    assert tpot.measured > 1.2 * cost.predict(StepWork(num_decode=1, decode_context=20))
    assert tpot.alone == pytest.approx(cost.predict(StepWork(num_decode=1, decode_context=20)), rel=0.03)


def test_decodes_that_cost_nothing_are_no_delay():
    arrivals = [Arrival(0.05 * i, RequestClass.ONLINE, 8, 20) for i in range(100)]
    config = PolicyConfig(slots=64, num_blocks=10_000, max_interference=0.1)
    tpot, _ = replayed(config, CostModel(k0=0.01, k1=1e-4, is_trusted=True), arrivals)

    assert tpot.alone == pytest.approx(tpot.measured, rel=1e-6)


def replayed(config: PolicyConfig, cost: CostModel, arrivals: list[Arrival]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the means of TPOT and TTFT."""
    host = Host(config, cost=cost)
    engine = FakeEngine(host, arrivals, cost=cost)
    while engine.coming:
        engine.step()
    tpot, ttft = (
        SimpleNamespace(
            measured=fmean(latency.measured for _, latency in found), alone=fmean(latency.alone for _, latency in found)
        )
        for found in (host.interference.tpot, host.interference.ttft)
    )
    return tpot, ttft


def test_a_request_that_arrived_under_another_slo_is_not_lost():
    """Of 40 ms to the first token, online alone would have needed 20. The SLO becomes 30 ms while the request waits."""
    kept, changed = Interference(), Interference()
    for state, slo in ((kept, 0.03), (changed, 1.0)):
        state.configure(None, 0.99, (slo, inf))
        request = make_request(0, 0.0, ttft=0.03)
        state.arrived(request, 0.0)
        state.configure(None, 0.99, (0.03, inf))
        state.began(StepPlan(predicted_seconds=0.04, parts=StepParts(offline=0.02)), 0.0)
        request.num_output, request.first_token = 1, 0.04
        state.answered(request, 0.04)
        state.finished(request, 0.04)

    assert kept.allowance.lending_ratio < 1
    assert changed.allowance.lending_ratio == 1


@pytest.mark.parametrize("is_known_at_once", [True, False])
def test_a_request_that_arrives_during_an_offline_step_waits_for_its_rest(is_known_at_once: bool):
    """Of 45 ms to the first token, online alone would have needed 20."""
    state = Interference()
    state.configure(0.1, 0.0)
    for seq in range(10):
        now = float(seq)
        state.began(StepPlan(predicted_seconds=0.1, parts=StepParts(offline=0.1)), now)
        request = make_request(seq, now + 0.075)
        if is_known_at_once:
            state.arrived(request, now + 0.075)
        state.began(StepPlan(predicted_seconds=0.02), now + 0.1)
        if not is_known_at_once:
            state.arrived(request, now + 0.1)
        request.num_output, request.first_token = 1, now + 0.12
        state.answered(request, now + 0.12)
        request.num_output = 2
        state.finished(request, now + 0.14)
        state.ended(now + 0.14)

    assert state.inflation == pytest.approx(0.045 / 0.02 - 1)


def test_the_allowance_shrinks_above_the_cap_and_grows_below_it():
    above, below = Traffic(cap=0.1), Traffic(cap=0.1)
    for traffic, alone in ((above, 0.02), (below, 0.0299)):
        begun = traffic.allowance.share
        traffic.serve(64, alone=alone)
        assert begun is not None
        assert traffic.allowance.share is not None
        assert (traffic.allowance.share < begun) is (traffic is above)


@pytest.mark.parametrize("gap", [0.0, 5.0, 30.0], ids=["back to back", "each 5 s", "each 30 s"])
def test_the_allowance_recovers_within_a_minute_at_any_rate(gap: float):
    traffic = Traffic(cap=0.1)
    begun = traffic.allowance.share
    traffic.serve(400)
    assert traffic.allowance.share == 0.0
    disturbed = traffic.now

    while traffic.now < disturbed + 60:
        traffic.serve(1, alone=STEP, gap=gap)

    assert begun is not None
    assert traffic.allowance.share >= 0.6 * begun


def test_the_allowance_moves_to_the_target_in_half_a_minute():
    traffic = Traffic(cap=0.1)
    begun = traffic.allowance.share
    traffic.serve(16, alone=STEP)  # offline takes no time; the only adjustment is 4 s after the begin
    grown = traffic.allowance.share

    assert begun is not None
    assert grown is not None
    assert begun * (1 + 4 / 30) == pytest.approx(grown, rel=0.02)
    late = make_request(99, traffic.now)
    traffic.state.arrived(late, traffic.now)
    late.first_token, late.num_output = traffic.now, 1
    traffic.state.answered(late, traffic.now)
    traffic.state.finished(late, traffic.now + 50)  # all latencies are older than half a minute
    assert traffic.allowance.share == pytest.approx(begun)


def test_an_allowance_that_is_not_used_grows_to_four_caps():
    traffic = Traffic(cap=0.1)
    traffic.serve(40, alone=STEP, gap=5.0)

    assert traffic.allowance.share == pytest.approx(0.4)


def test_another_cap_starts_again_and_no_cap_has_no_share():
    state = Interference()
    state.configure(0.1, 0.0)
    first = state.allowance.share
    state.configure(0.2, 0.0)

    assert first == pytest.approx(0.092)
    assert state.allowance.share == pytest.approx(0.184)
    state.configure(None, 0.0)
    assert state.allowance.share is None


def test_a_lost_request_takes_five_percent_of_the_lending_ratio_and_two_hundred_others_return_it():
    traffic = Traffic(objective=0.99)
    traffic.serve(10, tpot=0.025)
    backed_off = traffic.allowance.lending_ratio
    begun = traffic.now
    traffic.serve(400, tpot=0.05)

    assert backed_off == pytest.approx(exp(-0.05 * 9.95), rel=0.01)
    by_time = (traffic.now - begun) / 3600
    assert traffic.allowance.lending_ratio == pytest.approx(backed_off * exp(0.05 * 2) + by_time, rel=0.03)


def test_answers_that_offline_did_not_delay_leave_the_lending_ratio():
    traffic = Traffic(objective=0.99)
    traffic.serve(20, tpot=0.025)
    backed_off = traffic.allowance.lending_ratio
    begun = traffic.now
    traffic.serve(400, alone=STEP, tpot=0.05)

    assert traffic.allowance.lending_ratio == pytest.approx(backed_off + (traffic.now - begun) / 3600, rel=0.01)


def test_the_lending_ratio_is_level_while_half_of_what_the_objective_leaves_is_lost():
    traffic = Traffic(objective=0.99)
    traffic.serve(20, tpot=0.025)
    backed_off = traffic.allowance.lending_ratio

    for _ in range(10):
        traffic.serve(199, tpot=0.05, num_output=2)
        traffic.serve(1, tpot=0.025, num_output=2)

    assert traffic.allowance.lending_ratio == pytest.approx(backed_off, abs=0.06)
    assert backed_off < 0.4


@pytest.mark.parametrize("gap", [0.0, 5.0, 30.0], ids=["back to back", "each 5 s", "each 30 s"])
@pytest.mark.parametrize(("objective", "seconds"), [(0.99, 3600), (0.999, 36_000)])
def test_the_lending_ratio_recovers_at_any_rate(gap: float, objective: float, seconds: float):
    traffic = Traffic(objective=objective)
    traffic.serve(200, tpot=0.025)
    disturbed = traffic.now

    while traffic.now < disturbed + seconds / 10:
        traffic.serve(1, tpot=0.05, gap=gap)
    assert 0.1 < traffic.allowance.lending_ratio < 0.5
    while traffic.now < disturbed + seconds:
        traffic.serve(1, tpot=0.05, gap=gap)
    assert traffic.allowance.lending_ratio == 1


@pytest.mark.parametrize(
    ("number", "served", "ratio"),
    [
        pytest.param(200, {"tpot": 0.025}, 0.1, id="lending never ends"),
        pytest.param(80, {"tpot": 0.015}, 1, id="an SLO that online alone would miss, too"),
        pytest.param(20, {"num_output": 1, "ttft": 0.025}, exp(-0.05 * 0.995 * 20), id="answers of one token"),
        pytest.param(20, {"ttft": 0.025}, exp(-0.05 * 0.995 * 20), id="a late first token, the others in time"),
    ],
)
def test_the_lending_ratio_follows_the_slo_that_offline_makes_requests_miss(number, served, ratio):
    traffic = Traffic(objective=0.99)

    traffic.serve(number, **served)

    assert traffic.allowance.lending_ratio == pytest.approx(ratio, rel=0.01)


def test_a_request_that_leaves_without_an_answer_costs_nothing():
    traffic = Traffic(objective=0.99)
    for seq in range(1000, 1300):
        request = make_request(seq, traffic.now, ttft=0.01)
        traffic.state.arrived(request, traffic.now)
        traffic.step(ALONE)
        traffic.state.finished(request, traffic.now)
        traffic.state.finished(request, traffic.now)
    traffic.serve(20, ttft=1.0)

    assert traffic.allowance.lending_ratio == 1


def test_the_typical_step_of_online_is_the_median_of_its_steps():
    traffic = Traffic(cap=0.1)
    for index in range(4000):
        traffic.step(0.03 if index % 5 == 0 else 0.02)  # every fifth prefills
        traffic.step(0.0)
    traffic.serve(40)

    assert traffic.allowance.typical == pytest.approx(0.02, rel=0.05)


def test_another_cap_is_judged_by_what_came_under_it():
    traffic = Traffic(cap=0.6)
    traffic.serve(40)
    assert traffic.state.inflation == pytest.approx(0.5)
    traffic.state.configure(0.1, 0.0)
    begun = traffic.allowance.share

    traffic.serve(64, alone=STEP)

    assert traffic.state.inflation == pytest.approx(0.0)
    assert begun is not None
    assert traffic.allowance.share is not None
    assert traffic.allowance.share > begun


def test_no_step_is_of_online_alone_after_the_cap_is_removed():
    traffic = Traffic(cap=0.1)
    while not traffic.allowance.is_alone:
        traffic.step(ALONE)

    traffic.state.configure(None, 0.0)

    assert not traffic.allowance.is_alone


def test_what_ran_under_other_conditions_is_not_counted():
    traffic = Traffic(cap=0.1)
    running = make_request(0, 0.0)
    traffic.state.arrived(running, 0.0)
    traffic.serve(40)
    assert traffic.state.inflation == pytest.approx(0.5)

    traffic.state.restart()
    running.first_token, running.num_output = traffic.now, 1
    traffic.state.answered(running, traffic.now)
    traffic.state.finished(running, traffic.now)

    assert traffic.state.inflation == 0
    traffic.serve(40, alone=STEP)
    assert traffic.state.inflation == pytest.approx(0.0)


def test_the_typical_step_follows_a_load_that_falls():
    traffic = Traffic(cap=0.1)
    for index in range(32_000):
        traffic.step(0.028 if index < 20_000 else 0.02)
    traffic.serve(40)

    assert traffic.allowance.typical == pytest.approx(0.02, rel=0.01)
