"""The benchmark of a change of the policy: what it runs, and by what it judges."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ballast_sim.errors import PolicyDefect
from ballast_sim.replay.simulation import simulate

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "policy_change.py"


@pytest.fixture(scope="module")
def change():
    spec = importlib.util.spec_from_file_location("policy_change", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["policy_change"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["policy_change"]


@pytest.fixture
def make_row(change):
    def make(**fields):
        usual = dict.fromkeys(change.Row.__dataclass_fields__, 0.0)
        usual |= {"workload": "azure-60", "variant": "no reservation", "seeds": 3, "requests": 1000, "failure": ""}
        return change.Row(**{**usual, "ttft_attainment": 0.99, "tpot_attainment": 0.98, "total": 0.95, **fields})

    return make


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ({}, []),
        ({"ttft_attainment": 0.9875, "total": 0.9405}, []),
        ({"ttft_attainment": 0.986}, ["TTFT loses 0.40"]),
        ({"tpot_attainment": 0.97, "total": 0.93}, ["TPOT loses 1.00", "total loses 2.0"]),
        ({"ttft_attainment": 0.980, "requests": 100}, []),
        ({"ttft_attainment": 0.970, "requests": 100}, ["TTFT loses 2.00"]),
        ({"ttft_attainment": 0.995, "total": 0.9}, ["total loses 5.0", "TTFT gains 0.50"]),
        ({"ttft_attainment": 0.995}, []),
        ({"failure": "1 of 3 seeds: G1"}, ["failed: 1 of 3 seeds: G1"]),
    ],
    ids=["the same", "within", "TTFT", "TPOT and total", "one request", "two requests", "traded", "gained", "failed"],
)
def test_a_row_is_broken_by_more_than_the_bound_and_more_than_one_request(change, make_row, after, found):
    assert change.broken(make_row(), make_row(**after)) == found


def test_what_failed_before_can_only_get_better(change, make_row):
    before = make_row(failure="3 of 3 seeds: G1")

    assert change.broken(before, make_row()) == []
    assert change.broken(before, before) == []


def test_both_sides_are_printed_and_only_rows_of_both_are_judged(change, make_row, capsys):
    before, after = make_row(), make_row(total=0.90)

    is_kept = change.print_change({before.key: before}, [after, make_row(variant="new")])

    out = capsys.readouterr().out
    assert not is_kept
    assert "95.0 %  90.0 %" in out
    assert "azure-60, new: not measured before" in out
    assert "0 of 1 rows" in out


def test_rows_are_read_back_from_what_was_written_the_same_way_alone(change, make_row, tmp_path):
    path = tmp_path / "before.json"
    change.write_rows(path, [make_row()], is_quick=True)

    assert change.read_rows(path, is_quick=True) == {make_row().key: make_row()}
    with pytest.raises(SystemExit, match="with --quick: run it the same way"):
        change.read_rows(path, is_quick=False)


def test_rows_stand_in_the_order_of_the_workloads(change, make_row):
    names = ["caps-azure-40", "azure-60"]

    found = change.in_order({name: [make_row(workload=name)] for name in names})

    assert [row.workload for row in found] == names[::-1]


def test_a_resumed_run_keeps_the_workloads_that_are_done(change, make_row, tmp_path):
    path, earlier = tmp_path / "rows.json", tmp_path / "before.json"
    done = make_row(workload="sparse-2s-arxiv", variant="SLO, fitted", total=0.5)
    change.write_rows(path, [done], is_quick=True)
    change.write_rows(earlier, [replace(done, total=0.6)], is_quick=True)
    options = ["--quick", "--only", "sparse-2s-arxiv", "--json", path, "--resume"]

    alone, against = (
        subprocess.run([sys.executable, PROGRAM, *options, *more], capture_output=True, text=True, check=False)
        for more in ([], ["--against", earlier])
    )

    assert alone.returncode == 0, alone.stderr
    assert "sparse-2s-arxiv  SLO, fitted" in alone.stdout
    assert against.returncode == 1
    assert "total loses 10.0" in against.stdout
    assert change.read_rows(path, is_quick=True) == {done.key: done}


def test_a_workload_is_run_alone_and_in_every_variant_and_seeds_are_pooled(change):
    name, seconds = "sparse-2s", 40.0
    workload = replace(change.workloads()[name], minutes=seconds / 60, variants=change.SPARSE[:1])
    of_seeds = []
    for seed in (0, 1):
        bench, load = workload.make(seed, seconds)
        outcomes = tuple(change.run(bench, bench.online(load), each) for each in (change.ALONE, *workload.variants))
        of_seeds.append(change.SeedRuns(name, seed, bench.config, 5000.0, outcomes))

    alone, mixed = change.rows(of_seeds)

    assert (alone.variant, mixed.variant) == ("online alone", "SLO")
    assert alone.requests == 2 * of_seeds[0].outcomes[0].result.num_online
    assert (alone.offline, alone.ttft_lost, alone.tpot_lost) == (0.0, 0.0, 0.0)
    assert mixed.offline > 0


def test_a_simulation_that_fails_is_a_row_without_figures(change):
    bench, load = change.workloads()["sparse-2s"].make(0, 40.0)
    online = bench.online(load)
    alone = change.run(bench, online, change.ALONE)

    class Lost:
        def plan(self, snapshot):
            raise PolicyDefect("no plan runs any of them")

    failed = change.run(bench, online, change.SPARSE[0], Lost)
    _, row = change.rows([change.SeedRuns("sparse-2s", 0, bench.config, 5000.0, (alone, failed))])

    assert row.failure == "1 of 1 seeds: no plan runs any of them"
    assert row.total is None
    assert change.cells(row)[3] == "failed"


def test_without_suspension_no_step_stands_still(change):
    bench, load = change.workloads()["bursts-from-silence"].make(0, 130.0)
    online = bench.online(load)

    runs = [simulate(change.scenario_of(bench, online, variant)) for variant in change.FOUR[:2]]

    suspended = [run.replicas[0].num_suspended for run in runs]
    assert suspended[0] > 0
    assert suspended[1] == 0
