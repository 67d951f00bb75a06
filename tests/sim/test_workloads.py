"""Settings with requests at times of their own, and what Ballast is held to in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pooled import rotated

from ballast_cli.bench.json_rows import as_json
from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.comparison.bench import Bench, knob
from ballast_sim.comparison.table import run_table
from ballast_sim.comparison.workloads import WORKLOADS, bursts_from_silence, long_prompts, sparse
from ballast_sim.errors import BadInput
from ballast_sim.replay.arrivals import lognormal_answers
from ballast_sim.replay.traffic import Arrival

MODEL = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(30)]
ONLINE = [Arrival(0.5 * turn, 50, 10) for turn in range(20)]
BUDGETS = ("static-budget=11x128", "static-budget=14x128", "static-budget=30x128")


@pytest.fixture
def make_bench():
    def make(**fields) -> Bench:
        config = PolicyConfig(slots=16, num_blocks=600, chunk_tokens=128, ttft=0.06, tpot=0.016)
        usual = {"trace": ONLINE, "offline": POOL, "config": config, "model": MODEL, "seconds": 10.0}
        return Bench(**{**usual, "warmup_seconds": 2.0, "maximum_seconds": 5.0, "is_paced": True, **fields})

    return make


def test_goodput_and_slots_of_a_split_are_those_of_a_gpu_on_average(make_bench):
    bench = make_bench(is_paced=False)
    (row,) = bench.rows("static-split", 0.2, (0.0,))
    parts = int(row.note.removesuffix(" of 10 GPUs online"))
    alone, full = bench.alone(0.2 * 10 / parts).result, bench.maximum("full").result

    assert row.result.goodput == pytest.approx(parts / 10 * alone.goodput)
    assert row.result.online_slots == pytest.approx(parts / 10 * alone.online_slots)
    assert row.result.offline_slots == pytest.approx((10 - parts) / 10 * full.offline_slots)


def test_requests_come_evenly_and_the_first_one_at_once():
    (point,) = sparse(seconds=5.0, every=(2.0,)).points

    assert [arrival.seconds for arrival in point.online] == [0.0, 2.0, 4.0]


def test_drawn_answers_have_the_mean_that_was_asked_for_and_none_is_longer_than_the_most():
    found = [
        arrival.num_output
        for arrival in lognormal_answers(512, mean=500, deviation=400, most=2048, number=4000, seed=1)
    ]

    assert sum(found) / len(found) == pytest.approx(490, rel=0.05)  # some of the longest are cut off
    assert (min(found) >= 1, max(found)) == (True, 2048)


def test_a_rotated_trace_has_the_same_requests_and_the_same_gaps():
    trace = [Arrival(0.0, 1, 1), Arrival(1.0, 2, 1), Arrival(3.0, 3, 1), Arrival(6.0, 4, 1)]

    found = rotated(trace, 0.5)

    assert [(arrival.seconds, arrival.num_prompt) for arrival in found] == [(0.0, 3), (3.0, 4), (5.0, 1), (6.0, 2)]
    assert rotated(trace, 0.0) == trace


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_setting_is_the_same_each_time_and_other_seeds_are_other_work(name):
    make = WORKLOADS[name]

    assert make(seconds=240.0) == make(seconds=240.0)
    assert make(seconds=240.0) != make(seconds=240.0, seed=1)
    for point in make(seconds=240.0).points:
        times = [arrival.seconds for arrival in point.online]
        assert times == sorted(times)
        assert times[-1] < 240.0


def test_the_settings_are_what_their_names_say():
    spacings = [point.online[1].seconds for point in sparse(every=(0.5, 10.0)).points]
    lengths = {arrival.num_prompt for arrival in long_prompts(seconds=300.0).points[0].online}
    silent = [arrival for arrival in bursts_from_silence(seconds=240.0).points[0].online if arrival.seconds < 100.0]

    assert spacings == [0.5, 10.0]
    assert lengths == {400, 8000}
    assert silent == []


def test_another_slo_makes_one_table_of_points_that_differ_in_theirs_alone():
    workload = long_prompts(seconds=120.0)

    found = workload.judged_by(ttft=2.0)

    assert [point.ttft for point in workload.points] == [1.5, 1.0]
    assert [(point.ttft, point.tpot) for point in found.points] == [(2.0, 0.05)]


def test_a_paced_bench_keeps_the_times_of_its_requests_and_takes_no_load(make_bench):
    table = run_table(make_bench(), policies=("online-only", "ballast"), reservations=(0.0,), has_best_budget=False)

    assert table.bench.online(0.7) == ONLINE
    assert {row.load for row in table.rows} == {table.bench.own_load}
    assert table.rate != table.rate  # nan: no load was looked for
    with pytest.raises(BadInput, match="static-split divides a load among GPUs"):
        run_table(make_bench(), policies=("static-split",), reservations=(0.0,), has_best_budget=False)


def test_the_ceiling_can_be_held_to_another_tpot_than_the_slo(make_bench):
    tight, loose = make_bench(), make_bench(bound_tpot=0.05)

    assert loose.bound > tight.bound


def test_fitted_ballast_learns_the_step_times_and_the_cap_brings_its_own_slo(make_bench):
    bench = make_bench(capped_slo=(10.0, 10.0), seconds=20.0)
    known, fitted = (bench.rows(policy, bench.own_load, (0.0,))[0] for policy in ("ballast", "ballast-fitted"))
    capped, bound = (
        each.rows("ballast=400", each.own_load, (0.0,))[0] for each in (bench, replace(bench, capped_slo=None))
    )

    assert fitted.offline_tokens != known.offline_tokens
    assert capped.result.tpot.p99 > bound.result.tpot.p99


def test_the_goal_is_the_static_budget_with_the_most_offline_tokens_that_keeps_the_same(make_bench):
    policies = ("online-only", *BUDGETS, "ballast", "ballast=500")
    table = run_table(make_bench(), policies=policies, reservations=(0.0,), has_best_budget=False)
    bench, by_name = table.bench, {row.policy: row for row in table.rows}
    kept = [policy for policy in BUDGETS if bench.keeps(by_name[policy])]

    by_slo = bench.best_static(table.rows, by_name["ballast"])
    by_cap = bench.best_static(table.rows, by_name["ballast=500"])
    nothing = bench.best_static(table.rows, replace(by_name["ballast"], policy="ballast=0.001"))

    assert 0 < len(kept) < len(BUDGETS)
    assert by_slo.policy == max(kept, key=lambda policy: by_name[policy].offline_tokens)
    assert by_cap.policy == "static-budget=30x128"
    assert nothing is None
    assert bench.keeps_its_own(by_name["ballast=500"])
    assert not bench.keeps_its_own(replace(by_name["ballast=500"], policy="ballast=0.001"))


def test_a_prompt_that_takes_most_of_its_ttft_suspends_a_long_step_without_online_requests(make_bench):
    rare = [Arrival(2.0 * turn + 0.37 * turn % 1, 50, 10) for turn in range(10)]
    config = PolicyConfig(slots=16, num_blocks=600, chunk_tokens=128, ttft=0.0165, tpot=0.016)
    bench = make_bench(trace=rare, config=config, seconds=20.0)  # a prompt takes 15 ms

    (row,) = bench.rows("ballast", bench.own_load, (0.0,))

    assert row.result.ttft_attainment == 1.0


def test_rows_state_attainment_by_prompt_length(make_bench):
    table = run_table(make_bench(), policies=("online-only", "ballast"), reservations=(0.0,), has_best_budget=False)

    alone, _ = (as_json(row, table.bench) for row in table.rows)

    assert alone["worst_third_lost"] == {"ttft": 0.0, "tpot": 0.0}
    assert [(third["shortest"], third["longest"]) for third in alone["prompt_thirds"]] == [(50, 50)]


@pytest.mark.parametrize("policy", ["static-budget=30x", "static-budget=30x0", "static-budget=x512", "ballast=30x512"])
def test_a_chunk_that_cannot_be_is_refused(policy):
    with pytest.raises(BadInput, match="expected a number above 0"):
        knob(policy)


def test_a_trace_of_one_request_cannot_be_scaled_to_a_load():
    one = [Arrival(0.0, 100, 10)]

    with pytest.raises(BadInput, match=r"a rate needs two requests at different times, found 1 request"):
        Bench(one, one, PolicyConfig(slots=8, num_blocks=400), MODEL, 300.0)
