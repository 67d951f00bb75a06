"""The table of the benchmark: what each row is run with, and that processes do not change it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ballast_cli.bench.json_rows import as_json
from ballast_cli.bench.processes import in_processes
from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.comparison.bench import POLICIES, STATIC_BUDGET, Bench
from ballast_sim.comparison.table import run_table
from ballast_sim.errors import BadInput
from ballast_sim.replay.traffic import Arrival

MODEL = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)
TRACE = [Arrival(0.4 * i, 40 + 37 * i % 200, 10 + 7 * i % 40, tenant="ab"[i % 2]) for i in range(400)]
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(30)]
CONFIG = PolicyConfig(slots=16, num_blocks=600, chunk_tokens=128, ttft=0.3, tpot=0.016)


@pytest.fixture(scope="module")
def make_bench():
    def make(**fields) -> Bench:
        usual = {"trace": TRACE, "offline": POOL, "config": CONFIG, "model": MODEL, "seconds": 5.0}
        return Bench(**{**usual, "warmup_seconds": 1.0, "maximum_seconds": 5.0, **fields})

    return make


@pytest.fixture(scope="module")
def table(make_bench):
    return run_table(make_bench(), policies=(*POLICIES, STATIC_BUDGET), loads=(0.2, 0.4), reservations=(0.0, 0.25))


KEYS = {
    *("policy", "load_percent", "reservation_percent", "ttft_ms", "tpot_ms", "ttft_attainment", "tpot_attainment"),
    *("total_tokens_per_s", "offline_tokens_per_s", "slo_bound_tokens_per_s", "unbounded_tokens_per_s"),
    *("wasted_tokens", "jain", "reservation_shortfall"),
}


def test_the_table_has_a_row_for_each_policy_load_and_reservation_and_is_plain_json(table):
    rows = [as_json(row, table.bench) for row in table.rows]

    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert [(row["load_percent"], row["reservation_percent"], row["policy"]) for row in rows] == [
        (load, reservation, policy)
        for load in (20.0, 40.0)
        for reservation in (0.0, 25.0)
        for policy in (*POLICIES, STATIC_BUDGET)
    ]
    assert all(row.keys() >= KEYS for row in rows)
    assert all(set(row["ttft_ms"]) == set(row["tpot_ms"]) == {"p50", "p95", "p99"} for row in rows)


def test_several_processes_give_the_rows_that_one_gives(make_bench):
    asked = {"policies": ("online-only", "ballast"), "loads": (0.4,), "reservations": (0.0, 0.25)}
    calls: list[tuple[int, int]] = []

    one = run_table(make_bench(noise=0.1), **asked)
    two = run_table(
        make_bench(noise=0.1), **asked, mapped=in_processes(2), progress=lambda done, of, _: calls.append((done, of))
    )

    assert [as_json(row, two.bench) for row in two.rows] == [as_json(row, one.bench) for row in one.rows]
    assert [row.series for row in two.rows] == [row.series for row in one.rows]
    assert two.rate == one.rate
    assert calls[-1] == (4, 4)


def test_the_load_is_a_share_of_the_bound_and_the_ceilings_bound_what_offline_does_alone(table):
    bench = table.bench
    alone = table.of(0.4, 0.0)[0]

    assert bench.bound < bench.unbounded
    assert alone.result.online.total == pytest.approx(0.4 * bench.bound, rel=0.25)
    assert table.of(0.4, 0.0)[1].offline_tokens == bench.unbounded
    assert 0.2 * bench.bound < table.rate
    assert table.budgets[0.2].total_tokens >= table.of(0.2, 0.0)[0].total_tokens


def test_only_ballast_keeps_the_reservation(table):
    short = {row.policy: row.result.reservation_shortfall for row in table.of(0.4, 0.25)}

    assert short["ballast"] < 0.05
    assert short["greedy"] > 2 * short["ballast"]


def test_a_knob_turned_by_hand_is_the_policy_at_that_value(make_bench):
    bench = make_bench()
    budgets = [bench.rows(f"static-budget={ms}", 0.4, (0.0,))[0].result.tpot.p50 for ms in (11, 13, 15)]
    rates = [bench.rows(f"qps-cap={rate}", 0.4, (0.0,))[0].offline_tokens for rate in (0.5, 5)]
    caps = [bench.rows(f"ballast={percent}", 0.4, (0.0,))[0].offline_tokens for percent in (1, 200)]

    assert budgets == sorted(budgets)
    assert rates[0] < rates[1]
    assert caps[0] < caps[1]


def test_the_best_static_budget_is_one_that_keeps_the_attainment_or_online_alone(make_bench, table):
    for row in table.budgets.values():
        assert table.bench.keeps(row)
        assert row.offline_tokens > 0
    strict = make_bench(config=replace(CONFIG, ttft=0.06, tpot=0.1), seconds=10.0)

    (row,) = strict.rows(STATIC_BUDGET, 0.2, (0.0,))

    assert row.note == "no static budget keeps the attainment"
    assert row.result == strict.alone(0.2).result


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"policies": ("ballast", "magic")}, "unknown policy 'magic'; known are all, online-only"),
        ({"policies": ("ballast", "ballast")}, "a policy is given twice"),
        ({"policies": ()}, "no policy given"),
        ({"policies": ("greedy=3",)}, "policy 'greedy=3': expected a number above 0 for one of static-budget"),
        ({"policies": ("qps-cap=-1",)}, "policy 'qps-cap=-1': expected a number above 0"),
        ({"loads": (0.0,)}, "a load of 0 % was given; expected 0.1 to 2000 %"),
        ({"loads": (float("nan"),)}, "a load of nan % was given"),
        ({"loads": ()}, "no load given"),
        ({"reservations": (-0.1,)}, "a reservation of -10 % was given; expected 0 to 100 %"),
        ({"reservations": (0.1, 0.1)}, "a reservation is given twice"),
    ],
)
def test_a_table_that_cannot_be_is_refused_before_anything_runs(make_bench, asked, found):
    usual = {"policies": ("ballast",), "loads": (0.4,), "reservations": (0.0,)}

    with pytest.raises(BadInput, match=found):
        run_table(make_bench(), **{**usual, **asked})


def test_ctrl_c_ends_all_processes_of_a_table():
    command = [sys.executable, "-m", "ballast_cli", "bench", "mixed", "--jobs", "2", "--minutes", "10000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as bench:
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        try:
            while bench.poll() is None and len(started := children.read_text().split()) < 3:  # two, and a tracker
                time.sleep(0.1)
            bench.send_signal(signal.SIGINT)
            code = bench.wait(timeout=120)
        finally:
            bench.kill()

    assert code == 130
    while any(lives(pid) for pid in started):  # the tracker of their resources ends after them
        time.sleep(0.1)


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
