"""A replica does what a plan says, takes the time the model says, and refuses what an engine could not do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laws import lawful
from llm_d.prefix_cache import CachedKv

from ballast_policy import host
from ballast_policy.learning.cost import CostModel
from ballast_policy.plan import StepPlan
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.comparison.baselines import PEERS, QpsCap
from ballast_sim.errors import BadInput, PolicyDefect
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.traffic import Arrival

COST = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)


def test_one_request_takes_the_time_of_its_steps(run):
    result = run(online=[Arrival(0.0, 100, 3)])
    (item,) = result.online

    prefill = 0.010 + 100 * 1e-4 + 1e-8 * 100 * 50.5
    decodes = [0.010 + 2e-4 + 1e-7 * context for context in (101, 102)]
    assert item.first_token == pytest.approx(prefill)
    assert item.last_token == pytest.approx(prefill + sum(decodes))
    figures = report(result)
    assert figures.ttft.p50 == pytest.approx(prefill)
    assert figures.tpot.p50 == pytest.approx(sum(decodes) / 2)
    assert (figures.ttft_attainment, figures.tpot_attainment, figures.envelope_attainment) == (1.0, 1.0, 1.0)


TRAFFIC = [Arrival(0.05 * i, 40 + 13 * i % 200, 5 + 7 * i % 40) for i in range(40)]
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(30)]


def timeline(result):
    return [(item.request.seq, item.first_token, item.last_token) for item in (*result.online, *result.offline)]


def test_equal_scenarios_give_equal_runs_and_seeds_differ(make_scenario):
    scenario = make_scenario(online=TRAFFIC, offline=POOL, noise=0.1)

    again = timeline(simulate(scenario))

    assert timeline(simulate(scenario)) == again
    assert timeline(simulate(replace(scenario, seed=1))) != again


class Lawful(Ballast):
    """Ballast, with each plan held against every law."""

    def plan(self, snapshot):
        return lawful(snapshot)


SLO = PolicyConfig(slots=8, num_blocks=400, tpot=0.05, chunk_tokens=128)
POLICIES = {
    "ballast": Lawful,
    "qps-cap": lambda: QpsCap(rate=5.0),
    **{name: partial(make, SLO) for name, make in PEERS.items()},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_blocks", [400, 40])
def test_every_policy_finishes_everything_and_leaves_nothing_behind(run, name, num_blocks):
    result = run(
        online=TRAFFIC,
        offline=POOL,
        policy=POLICIES[name],
        config={"num_blocks": num_blocks},
    )

    (replica,) = result.replicas
    assert all(item.request.num_output == item.num_output for item in (*result.online, *result.offline))
    assert len(result.offline) == len(POOL)
    assert replica.kv.num_free == num_blocks
    assert not replica.items
    assert not replica.host.residents
    assert not any(replica.host.count(request_class) for request_class in RequestClass)
    assert result.jobs[0].finished_at == max(item.last_token for item in result.offline)


def test_the_tokens_of_all_steps_are_the_tokens_of_all_requests(run):
    result = run(online=TRAFFIC, offline=POOL, config={"num_blocks": 40})

    steps = result.replicas[0].steps
    computed = sum(s.online_prefill + s.offline_prefill + s.online_decode + s.offline_decode for s in steps)
    items = (*result.online, *result.offline)
    assert computed == sum(item.request.num_prompt + item.num_output - 1 + item.num_recomputed for item in items)


lengths = st.builds(Arrival, st.just(0.0), st.integers(1, 300), st.integers(1, 40))
arrivals = st.lists(st.tuples(st.floats(0, 1), lengths), max_size=25).map(
    lambda drawn: sorted((replace(a, seconds=s) for s, a in drawn), key=lambda a: a.seconds)
)


@given(
    online=arrivals,
    offline=st.lists(lengths, max_size=25),
    slots=st.integers(4, 12),
    num_blocks=st.integers(24, 120),
    share=st.sampled_from([0.0, 0.1, 0.3]),
    chunk=st.sampled_from([16, 64, 512]),
    is_fitted=st.booleans(),
)
@example(  # online takes the KV of a request in a reserved slot, and the request behind it is a prompt
    online=[Arrival(0.031, 192, 2), Arrival(0.047, 176, 2), Arrival(0.063, 1, 2)]
    + [Arrival(0.125, prompt, 2) for prompt in (48, 64, 80, 256, 272)]
    + [Arrival(0.188, 33, 1), Arrival(0.188, 1, 1)],
    offline=[Arrival(0.0, 112, 2), Arrival(0.0, 240, 2), Arrival(0.0, 162, 2)],
    slots=11,
    num_blocks=110,
    share=0.1,
    chunk=512,
    is_fitted=False,
)
@example(  # the same, and that prompt computes nothing if it keeps its slot
    online=[Arrival(0.0, 188, 1), Arrival(0.188, 225, 5)],
    offline=[Arrival(0.0, 154, 7), Arrival(0.0, 96, 1)],
    slots=4,
    num_blocks=24,
    share=0.1,
    chunk=64,
    is_fitted=True,
)
@settings(max_examples=60)
def test_the_real_policy_keeps_its_contract_and_laws_on_any_traffic(
    *, online, offline, slots, num_blocks, share, chunk, is_fitted
):
    config = PolicyConfig(
        slots=slots, num_blocks=num_blocks, chunk_tokens=chunk, offline_share=share, ttft=0.2, tpot=0.03
    )
    scenario = Scenario(
        config,
        COST,
        Lawful,
        online=online,
        offline=lambda: [SimulatedJob.of("job", offline)] if offline else [],
        cost=None if is_fitted else COST,
        noise=0.05,
    )

    result = simulate(scenario)

    assert all(item.request.num_output == item.num_output for item in result.online)
    assert result.replicas[0].kv.num_free == num_blocks
    assert [item.num_output for item in result.offline] == [item.request.num_output for item in result.offline]


class Broken:
    """Changes the first plan of the real policy that has something to change."""

    def __init__(self, change):
        self.change = change

    def plan(self, snapshot):
        plan = Ballast().plan(snapshot)
        return replace(plan, **self.change(plan, snapshot))


BREAKS = {
    "tokens granted to": lambda plan, _: {"grants": plan.grants + plan.grants[:1]},
    "99999 tokens granted to": lambda plan, _: {"grants": tuple((r, 99999) for r, _ in plan.grants)},
    "0 tokens granted to": lambda plan, _: {"grants": tuple((r, 0) for r, _ in plan.grants)},
    "cannot become RUNNING: it is RUNNING": lambda plan, _: {"admit": plan.admit * 2},
    "hold a slot, there are 2": lambda plan, snapshot: {
        "admit": tuple(snapshot.waiting),
        "grants": plan.grants[:1],
    },
    "no plan runs any of them": lambda plan, snapshot: {"grants": (), "admit": ()},
}


@pytest.mark.parametrize("found", BREAKS)
def test_a_plan_that_an_engine_could_not_carry_out_is_refused(run, found):
    burst = [Arrival(0.0, 100, 10)] * 6

    with pytest.raises(ValueError, match=found) as refused:
        run(online=burst, policy=lambda: Broken(BREAKS[found]), config={"slots": 2})

    assert refused.type in (PolicyDefect, host.IllegalPlan)


def test_a_plan_beyond_the_kv_that_is_free_is_refused(run):
    def everyone(_, snapshot):
        return {"grants": tuple((r, r.remaining) for r in snapshot.waiting), "admit": tuple(snapshot.waiting)}

    with pytest.raises(PolicyDefect, match="KV blocks are free"):
        run(
            online=[Arrival(0.0, 100, 10)] * 6,
            policy=lambda: Broken(everyone),
            config={"num_blocks": 8},
        )


def test_a_request_larger_than_the_cache_is_refused(run):
    with pytest.raises(BadInput, match="has 700 tokens, the KV cache holds 640"):
        run(online=[Arrival(0.0, 600, 100)], config={"num_blocks": 40})


def test_the_router_spreads_a_burst_over_the_replicas(run):
    result = run(online=[Arrival(0.0, 100, 20)] * 8, replicas=4)

    assert [len(replica.steps) > 0 for replica in result.replicas] == [True] * 4
    assert max(item.first_token for item in result.online) < 0.1


def test_with_a_shared_prefix_the_cache_saves_its_tokens(run):
    shared = [Arrival(0.3 * i, 200, 4, prefix_key=1, prefix_tokens=160) for i in range(6)]

    result = run(online=shared, kv=CachedKv)

    assert [item.request.num_prompt_cached for item in result.online] == [0, 160, 160, 160, 160, 160]
    assert report(result).online.prefill * result.seconds == pytest.approx(200 + 5 * 40)
    assert result.replicas[0].kv.num_free == 400


def test_tokens_count_when_they_are_computed_and_an_answer_that_does_not_end_keeps_no_tpot(run):
    found = run(online=[Arrival(0.5, 200, 5000)], seconds=2.0, warmup_seconds=1.0)
    result = report(found)

    assert result.online.prefill == 0  # computed before the measured part
    assert result.online.decode == sum(step.online_decode for step in found.replicas[0].steps if step.start >= 1.0)
    assert report(run(online=[Arrival(0.0, 200, 5000)], seconds=2.0)).num_unfinished == 1
    assert not report(run(online=[Arrival(0.0, 200, 5000)], seconds=2.0)).keeps(0.99, 0.99)
    assert report(run(online=[Arrival(0.0, 200, 1)], seconds=2.0)).keeps(0.99, 0.99)


def test_a_cache_that_is_too_small_evicts_and_still_balances(run):
    many = [Arrival(0.2 * i, 150, 30, prefix_key=1 + i % 5, prefix_tokens=96) for i in range(60)]

    result = run(online=many, offline=POOL, kv=CachedKv, config={"num_blocks": 48})

    replica = result.replicas[0]
    assert not replica.items
    assert replica.kv.num_free == 48
    assert sum(item.request.num_prompt_cached for item in result.online) > 0


def test_a_deadline_met_or_missed_is_reported(make_scenario):
    jobs = [("soon", 0.01), ("late", 1e6)]
    scenario = replace(
        make_scenario(), offline=lambda: [SimulatedJob.of(name, POOL, deadline=deadline) for name, deadline in jobs]
    )

    assert report(simulate(scenario)).deadline_hits == 0.5


def test_slots_that_nobody_held_for_waiting_offline_work_are_a_shortfall(make_scenario):
    class Late(Ballast):
        def plan(self, snapshot):
            if snapshot.now < 1.0 and any(r.request_class is RequestClass.ONLINE for r in snapshot.residents):
                online = [r for r in snapshot.residents if r.request_class is RequestClass.ONLINE]
                return StepPlan(grants=tuple((r, 1) for r in online))
            return super().plan(snapshot)

    scenario = make_scenario(online=[Arrival(0.0, 1, 100)], offline=POOL, config={"offline_share": 0.5}, policy=Late)
    held = replace(scenario, policy=Ballast)

    assert report(simulate(scenario)).reservation_shortfall > 0.05
    assert report(simulate(held)).reservation_shortfall < 0.01


def test_a_reservation_above_the_slot_cap_of_the_only_tenant_is_not_short(make_scenario):
    capped = {"offline_share": 0.5, "tenants": {"default": TenantShare(max_slots=1)}}
    long_answers = [Arrival(0.0, 1, 400)] * 20
    scenario = make_scenario(online=[Arrival(0.0, 1, 4000)], offline=long_answers, config=capped)

    result = simulate(scenario)

    assert len(result.replicas[0].steps) > 1500, "more steps than a reservation may be short"
    assert report(result).reservation_shortfall == 0
