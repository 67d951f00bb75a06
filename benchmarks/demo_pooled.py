"""Run the demo several times and pool the requests: is online TTFT p99 with backfill at most 1.25x online alone?

    python benchmarks/demo_pooled.py                     # three runs, about 12 minutes on two cores
    python benchmarks/demo_pooled.py --keep DIR          # leaves each run's figures and picture there
    python benchmarks/demo_pooled.py --figures A B C     # pools figures.json files of earlier runs

Exit code 1 where the pooled ratio is above the limit. Each run takes its own slice of the trace (its seed).
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

from ballast_cli.demo.figures import Ratio, percentiles, ratio_of_percentiles, verdict
from ballast_cli.demo.report import LIMIT

SIDES = ("online_only", "mixed")
Pool = dict[str, list[list[float]]]
"""Per side the values of each segment of the trace; a segment has one place in both sides."""


def run(seed: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """Run the demo once."""
    command = [sys.executable, "-m", "ballast_cli", "demo", "--seed", str(seed), "--out", str(out), *extra]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read(out / "figures.json")


def read(path: Path) -> dict[str, Any]:
    """Read one run's figures."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def pool(runs: list[dict[str, Any]], column: int) -> Pool:
    """Put the requests of all runs together; segments of different runs stay apart."""
    keys = sorted({(i, row[0]) for i, one in enumerate(runs) for side in SIDES for row in one["requests"][side]})
    pooled: Pool = {}
    for side in SIDES:
        by_key: dict[tuple[int, int], list[float]] = {key: [] for key in keys}
        for i, one in enumerate(runs):
            for row in one["requests"][side]:
                if row[column] is not None:
                    by_key[i, row[0]].append(row[column])
        pooled[side] = [by_key[key] for key in keys]
    return pooled


def report(runs: list[dict[str, Any]]) -> Ratio:
    """Print each run and the pool; give the pooled TTFT p99 ratio."""
    print(
        f"{'run':>4}{'requests':>18}{'TTFT p99 alone':>16}{'mixed':>10}{'ratio':>8}{'harvest':>9}{'offline tok/s':>15}"
    )
    for i, one in enumerate(runs):
        alone, mixed, offline = one["online_only"], one["mixed"], one["offline"]
        print(
            f"{i:>4}{alone['requests']:>9}{mixed['requests']:>9}{alone['ttft_ms']['p99']:>16.2f}"
            f"{mixed['ttft_ms']['p99']:>10.2f}{one['ratios']['ttft_p99']['ratio']:>8.3f}{offline['harvest']:>9.1%}"
            f"{offline['tokens_per_second']:>15,.0f}"
        )
    print(f"\npooled over {len(runs)} runs, ms:")
    decisive: Ratio | None = None
    for column, name in ((1, "TTFT"), (2, "TPOT")):
        pooled = pool(runs, column)
        shown = [percentiles([value for segment in pooled[side] for value in segment]) for side in SIDES]
        for q in (50, 95, 99):
            ratio = ratio_of_percentiles(pooled["online_only"], pooled["mixed"], q=q, rounds=5000)
            print(
                f"  {name} p{q}  online-only {shown[0][f'p{q}']:9.2f}  mixed {shown[1][f'p{q}']:9.2f}  "
                f"ratio {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
            )
            if (name, q) == ("TTFT", 99):
                decisive = ratio
    failed = {side: sum(one[side]["failed"] for one in runs) for side in SIDES}
    idle = sum(one["work_conservation"]["of_those_without_offline_tokens"] for one in runs)
    print(f"  failed: {failed['online_only']} online-only, {failed['mixed']} mixed")
    print(f"  seconds with free slots and backlog but no offline token: {idle}")
    assert decisive is not None
    print(f"\n{verdict(decisive, LIMIT)}")
    return decisive


def main() -> int:
    """Run and pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="directory for the runs' own output")
    parser.add_argument("--figures", type=Path, nargs="+", help="figures.json files of earlier runs")
    options, extra = parser.parse_known_args()
    if options.figures:
        return int(report([read(path) for path in options.figures]).value > LIMIT)
    place: AbstractContextManager[str | Path] = nullcontext(options.keep) if options.keep else TemporaryDirectory()
    with place as directory:
        runs = [run(seed, Path(directory) / f"run-{seed}", extra) for seed in range(options.runs)]
        return int(report(runs).value > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
