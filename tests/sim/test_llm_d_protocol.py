"""The replay of llm-d's benchmark: traffic in cycles, its schedulers, and its table with few requests."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from llm_d import protocol
from llm_d.first_come import FirstCome
from llm_d.protocol import SCENARIOS, Case, Outcome, Protocol, kv_tokens, run, scenario
from llm_d.published import deciled
from llm_d.table import missed

from ballast_policy.plan import StepPlan
from ballast_policy.snapshot import EngineSnapshot
from ballast_sim.replay.policies import Fill
from ballast_sim.replay.simulation import simulate
from ballast_sim.replay.traffic import Arrival

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def make_case(scenario: str, **fields):
    protocol = Protocol(phase_seconds=4.0, cycles=2, warmup_cycles=1, items=10, burst_rate=8.0)
    return Case(scenario, 1, protocol, **fields)


def test_traffic_is_idle_for_a_phase_and_then_bursts():
    traffic = Protocol().traffic(2)
    by_phase = [sum(1 for arrival in traffic if arrival.seconds // 90 == phase) for phase in range(4)]

    assert by_phase == [90, 1350, 90, 1350]
    assert {(arrival.num_prompt, arrival.num_output) for arrival in traffic} == {(512, 128)}


def test_poisson_traffic_has_the_same_rates_and_more_cycles_continue_it():
    protocol = Protocol(is_poisson=True)
    traffic = protocol.traffic(4)
    in_bursts = sum(1 for arrival in traffic if protocol.is_burst(arrival.seconds))

    assert in_bursts == pytest.approx(4 * 1350, rel=0.05)
    assert traffic[: len(protocol.traffic(3))] == protocol.traffic(3)


def test_jobs_have_the_published_windows_and_lengths():
    jobs = Protocol().jobs()
    items = [item for job in jobs for item in job.items]
    answers = [item.num_output for item in items]

    assert [job.deadline for job in jobs] == [1800, 7200, 86400]
    assert len(items) == 3000
    assert sum(answers) / 3000 == pytest.approx(490, rel=0.05)  # the longest answers are cut
    assert max(answers) == 2048
    assert len({item.prefix_key for item in items}) == 5


def test_percentiles_are_interpolated_between_the_90th_and_the_largest_as_published():
    assert deciled([*range(100), 200]) == (50, 90 + 0.5 * 110, 90 + 0.9 * 110)


def test_a_first_come_queue_serves_batch_requests_that_came_before_online_ones(make_scenario):
    def num_before(policy) -> int:
        offline = [Arrival(0.0, 100, 5) for _ in range(20)]
        found = simulate(make_scenario(online=[Arrival(0.05, 100, 5)], offline=offline, policy=policy))
        return sum(1 for item in found.offline if item.first_token < found.online[0].first_token)

    first_come, by_priority = (
        num_before(lambda: FirstCome(chunk_tokens=100)),
        num_before(lambda: Fill(chunk_tokens=100)),
    )

    assert by_priority < first_come < 20


@pytest.mark.parametrize(("limits", "most"), [({}, 8), ({"concurrency": 3}, 3)])
def test_a_gateway_keeps_a_fixed_number_of_batch_requests_in_flight(make_scenario, limits, most):
    offline = [Arrival(0.0, 100, 20) for _ in range(20)]
    found = simulate(make_scenario(offline=offline, policy=lambda: FirstCome(**limits)))

    assert max(step.offline_slots for step in found.replicas[0].steps) == most
    assert all(item.last_token < inf for item in found.offline)


def test_batch_requests_come_at_the_rate_of_their_client(make_scenario):
    offline = [Arrival(0.0, 20, 2) for _ in range(20)]
    found = simulate(make_scenario(offline=offline, policy=lambda: FirstCome(rate=2.0)))

    admitted = sorted(item.request.admitted for item in found.offline)

    assert admitted == pytest.approx([(number + 1) / 2 for number in range(20)], abs=0.05)


def test_the_request_that_came_last_is_preempted_if_kv_is_short(make_scenario):
    class Watched(FirstCome):
        def plan(self, snapshot: EngineSnapshot):
            plan = super().plan(snapshot)
            for victim in plan.preempt:
                kept = [r for r in snapshot.residents if r not in plan.preempt]
                assert victim.seq > max(r.seq for r in kept)
                preempted.append(victim)
            return plan

    preempted: list[object] = []
    offline = [Arrival(0.0, 100, 60) for _ in range(6)]
    found = simulate(make_scenario(offline=offline, policy=Watched, config={"num_blocks": 50}))

    assert preempted
    assert all(item.last_token < inf for item in found.offline)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_scenario_answers_all_requests_and_finishes_its_jobs(scenario):
    outcome = run(make_case(scenario, ttft=0.2, tpot=0.06, concurrency=8))

    assert not outcome.failure
    assert len(outcome.ttft) == len(outcome.itl) == 32  # one burst of two is measured
    assert min(outcome.ttft) > 0.03
    assert outcome.done < inf
    has_jobs = scenario not in {"S0", "ballast-alone"}
    assert (sum(outcome.offline_tokens) > 0) == has_jobs
    assert outcome.num_in_window == (3 if has_jobs else 0)


def test_a_run_goes_on_in_more_cycles_until_the_jobs_are_done():
    case = make_case("S6", concurrency=2)
    short = run(replace(case, protocol=replace(case.protocol, most_cycles=2)))
    whole = run(replace(case, protocol=replace(case.protocol, most_cycles=30)))

    assert short.done == inf
    assert 3 * 8.0 < whole.done < 31 * 8.0
    assert whole.ttft[0] == short.ttft[0]


def test_a_goal_is_missed_by_the_bursts_beside_batch_work_too():
    def outcome(scenario: str, itl: float, itl_beside: float, done: float = 60.0) -> Outcome:
        base = run(make_case("S0"))
        return replace(
            base, case=replace(base.case, scenario=scenario), itl=[itl], itl_beside=[itl_beside], finished=(done,)
        )

    s0 = outcome("S0", 0.01, 0.01)

    assert missed(outcome("ballast", 0.012, 0.012), s0) == ()
    assert missed(outcome("ballast", 0.013, 0.012), s0) == ("ITL",)
    assert missed(outcome("ballast", 0.012, 0.013), s0) == ("ITL",)
    assert missed(outcome("ballast", 0.012, 0.012, 721.0), s0) == ("jobs",)


def test_a_plan_that_cannot_be_carried_out_is_a_failed_row(monkeypatch):
    class Idle:
        def plan(self, snapshot: EngineSnapshot):
            return StepPlan()

    monkeypatch.setattr(protocol, "policy", lambda case: Idle)
    row = protocol.run(make_case("ballast"))

    assert "PolicyDefect" in row.failure
    assert missed(row, row) == ("failed",)


def test_ballast_is_told_the_slo_and_nobody_else():
    told = {name: scenario(make_case(name, ttft=0.1, tpot=0.03), 1).config for name in ("S1", "priorities", "ballast")}

    assert (told["ballast"].ttft, told["ballast"].tpot) == (0.1, 0.03)
    assert {(told[name].ttft, told[name].tpot) for name in ("S1", "priorities")} == {(inf, inf)}


def test_unsuspended_steps_run_to_their_end():
    def num_suspended(name: str) -> int:
        case = make_case(name, ttft=0.2, tpot=0.06)
        return sum(replica.num_suspended for replica in simulate(scenario(case, 2)).replicas)

    assert num_suspended("ballast-unsuspended") == 0
    assert num_suspended("ballast") > 0


@pytest.mark.parametrize(("replicas", "itl"), [(1, 24.0), (2, 12.0)])
def test_inter_token_latencies_of_interactive_traffic_alone_are_near_the_published_ones(replicas, itl):
    protocol = Protocol(phase_seconds=15.0, cycles=1, warmup_cycles=0)
    found = sorted(run(Case("S0", replicas, protocol)).itl)

    assert 1e3 * found[len(found) // 2] == pytest.approx(itl, rel=0.3)


def test_kv_is_what_is_left_beside_the_weights_if_half_of_the_layers_keep_their_window():
    left = 80 * 2**30 * 0.9 - 2e9 - 65.2e9
    of_a_layer = 2 * 8 * 64 * 2

    assert kv_tokens() == pytest.approx(left / (of_a_layer * (18 + 18 * 128 / 762)), rel=0.01)


def test_the_program_prints_a_table_and_writes_figures_and_a_picture(tmp_path):
    command = [
        *(sys.executable, str(BENCHMARKS / "llm_d_protocol.py"), "--cycles", "2", "--warmup", "1", "--phase", "4"),
        *("--items", "5", "--replicas", "1", "--arrivals", "constant", "--scenario", "S6,ballast", "--no-check"),
        *("--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "cycles.png")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode in {0, 1}, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["scenario"] for row in rows] == ["S0", "S6", "ballast"]
    assert rows[2]["slo_ms"][0] == pytest.approx(1.25 * rows[0]["ttft_ms"][2])
    assert done.returncode == bool(rows[2]["missed"])
    assert "published 2026-07-15" in done.stdout
    assert (tmp_path / "cycles.png").read_bytes().startswith(b"\x89PNG")
