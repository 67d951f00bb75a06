"""`ballast bench guarantees`: check what a table of latencies does not show."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ballast_cli.bench_options import BenchEngineOptions
from ballast_sim.comparison.guarantee_runs import GuaranteeRuns
from ballast_sim.replay.traffic import read, read_lengths


def check_guarantees(
    options: BenchEngineOptions, online: Path, offline: Path, tenants: Path, *, seconds: float, seed: int
) -> list[dict[str, Any]]:
    """Run the checks, print the result of each, and return the results as data.

    Raises:
        BadInput: an option is unknown or out of range.
        Impossible: the model does not fit, or the SLO is below the fastest step.
    """
    trace, lengths = read(online), read_lengths(offline)
    engine = options.build(trace, lengths)
    runs = GuaranteeRuns(engine.config, engine.model, trace, read(tenants), lengths, seconds, seed)
    found = []
    for run in runs.all():
        result = run()
        found.append(asdict(result))
        sys.stdout.write(f"{result.name:16} {'kept' if result.is_kept else 'BROKEN'}: {result.sentence}\n")
        sys.stdout.flush()
    return found
