"""Run the demo several times, pool the requests, and judge whether online keeps its SLO attainment with offline work.

    python benchmarks/demo_pooled.py                     # three runs, about 12 minutes on two cores
    python benchmarks/demo_pooled.py --keep DIR          # keep each run's figures and picture in DIR
    python benchmarks/demo_pooled.py --figures A B C     # pool the figures.json files of earlier runs

The exit code is 1 if online lost more attainment than the demo allows, of TTFT or of TPOT. Each run has another seed,
and therefore another slice of the trace. Each request is judged by the SLO of its run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ballast_cli.demo.figures import Attainment, attainment, percentiles, ratio_of_percentiles, verdict
from ballast_cli.demo.report import COLUMNS, MOST_LOST, aligned, met

SIDES = ("online_only", "mixed")


def run(seed: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """Run the demo once."""
    command = [sys.executable, "-m", "ballast_cli", "demo", "--seed", str(seed), "--out", str(out), *extra]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read(out / "figures.json")


def read(path: Path) -> dict[str, Any]:
    """Read one run's figures."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def latencies(runs: list[dict[str, Any]], name: str) -> list[list[list[float]]]:
    """Return for each side the latencies of all runs by segment. Segments of different runs stay apart."""
    column = COLUMNS[name]
    sides = []
    for side in SIDES:
        found: dict[tuple[int, int], list[float]] = {}
        for i, one in enumerate(runs):
            for row in one["requests"][side]:
                values = found.setdefault((i, row[0]), [])
                if row[column] is not None:
                    values.append(row[column])
        sides.append(found)
    return aligned(sides)


def attained(runs: list[dict[str, Any]], name: str) -> Attainment:
    """Compare the attainment of all runs' requests."""
    sides = [
        {
            (i, key): values
            for i, one in enumerate(runs)
            for key, values in met(one["requests"][side], name, one["slo"]).items()
        }
        for side in SIDES
    ]
    return attainment(*aligned(sides), rounds=5000)


def lost(one: dict[str, Any], name: str) -> str:
    """Return the points that one run lost, as text."""
    return f"{attained([one], name).lost:.2f}"


def report(runs: list[dict[str, Any]]) -> bool:
    """Print each run and the pool; return whether online kept its attainment."""
    print(
        f"{'run':>4}{'requests':>18}{'TTFT p99 alone':>16}{'mixed':>10}{'ratio':>8}{'TTFT, TPOT points lost':>24}"
        f"{'harvest':>9}{'offline tok/s':>15}"
    )
    for i, one in enumerate(runs):
        alone, mixed, offline = one["online_only"], one["mixed"], one["offline"]
        points = ", ".join(lost(one, name) for name in COLUMNS)
        print(
            f"{i:>4}{alone['requests']:>9}{mixed['requests']:>9}{alone['ttft_ms']['p99']:>16.2f}"
            f"{mixed['ttft_ms']['p99']:>10.2f}{one['ratios']['ttft_p99']['ratio']:>8.3f}{points:>24}"
            f"{offline['harvest']:>9.1%}{offline['tokens_per_second']:>15,.0f}"
        )
    print(f"\npooled over {len(runs)} runs:")
    found = {name: attained(runs, name) for name in COLUMNS}
    for name, one in found.items():
        print(
            f"  {name.upper()} within the SLO  online-only {one.alone:8.2f} %  mixed {one.mixed:8.2f} %  "
            f"points lost {one.lost:.2f} (95 % interval {one.low:.2f} to {one.high:.2f})"
        )
    for name in COLUMNS:
        base, other = latencies(runs, name)
        shown = [percentiles([value for segment in side for value in segment]) for side in (base, other)]
        for q in (50, 95, 99):
            ratio = ratio_of_percentiles(base, other, q=q, rounds=5000)
            print(
                f"  {name.upper()} p{q}, ms  online-only {shown[0][f'p{q}']:9.2f}  mixed {shown[1][f'p{q}']:9.2f}  "
                f"ratio {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
            )
    failed = {side: sum(one[side]["failed"] for one in runs) for side in SIDES}
    idle = sum(one["work_conservation"]["of_those_without_offline_tokens"] for one in runs)
    print(f"  failed: {failed['online_only']} online-only, {failed['mixed']} mixed")
    print(f"  seconds with free slots and backlog but no offline token: {idle}")
    print(f"\n{verdict(*found.values(), most_lost=MOST_LOST)}")
    return all(one.lost <= MOST_LOST for one in found.values())


def main() -> int:
    """Run the demo and pool the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the output of each run")
    parser.add_argument("--figures", type=Path, nargs="+", help="figures.json files of earlier runs")
    options, extra = parser.parse_known_args()
    if options.figures:
        return int(not report([read(path) for path in options.figures]))
    place: AbstractContextManager[str | Path] = nullcontext(options.keep) if options.keep else TemporaryDirectory()
    with place as directory:
        runs = [run(seed, Path(directory) / f"run-{seed}", extra) for seed in range(options.runs)]
        return int(not report(runs))


if __name__ == "__main__":
    sys.exit(main())
