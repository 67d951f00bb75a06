"""The options of the frontier: which rows they make, and that a row pools as many runs as seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "frontier.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def rows(out: str) -> list[str]:
    """Names in the first column of the table of policies."""
    lines = out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("policy"))
    return [line.split()[0] for line in lines[first + 1 :] if line.startswith(("ballast", "greedy"))]


def num_requests(out: str) -> int:
    (line,) = (line for line in out.splitlines() if line.startswith("bursts: "))
    return int(line.rpartition(", ")[2].split()[0].replace(",", ""))


@pytest.mark.slow
def test_a_row_pools_the_runs_of_all_seeds():
    options = ("--trace", "bursts", "--minutes", "1.1", "--load", "60", "--policy", "ballast,greedy", "--caps", "10,25")
    more = ("--slots", "32", "--ttft-ms", "500", "--tpot-ms", "40", "--reservation", "10", "--suspension", "off")

    one = run(*options, *more, "--fitted", "--jobs", "1")
    two = run(*options, *more, "--fitted", "--jobs", "1", "--seeds", "2")

    assert "Traceback" not in one.stderr + two.stderr
    assert rows(one.stdout) == rows(two.stdout) == ["ballast=10", "ballast=25", "ballast", "greedy"]
    assert num_requests(two.stdout) > num_requests(one.stdout)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--policy", "magic"], "unknown policy 'magic'; known are ballast, static-budget"),
        (["--caps", "0"], "expected percentages above 0, such as 2,10,25, or none"),
        (["--seeds", "0"], "expected at least one seed, at least one slot"),
        (["--reservation", "101"], "a reservation from 0 to 100 percent"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, found):
    done = run(*options)

    assert done.returncode == 2
    assert found in done.stderr
