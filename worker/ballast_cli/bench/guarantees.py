"""`ballast bench guarantees`: check what a table of latencies does not show."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ballast_cli.bench.options import BenchEngineOptions
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_sim.comparison.guarantee_runs import GuaranteeRuns
from ballast_sim.replay.traffic import read, read_lengths


def check_guarantees(
    options: BenchEngineOptions, online: Path | None, offline: Path | None, tenants: Path, *, seconds: float, seed: int
) -> list[dict[str, Any]]:
    """Run the checks, print the result of each, and return the results as data."""
    trace, lengths = read(online or ONLINE_TRACE), read_lengths(offline or OFFLINE_TRACE)
    engine = options.build(trace, lengths)
    runs = GuaranteeRuns(engine.config, engine.model, trace, read(tenants), lengths, seconds, seed)
    found = []
    for run in runs.all():
        result = run()
        found.append(asdict(result))
        sys.stdout.write(f"{result.name:16} {'kept' if result.is_kept else 'BROKEN'}: {result.sentence}\n")
        sys.stdout.flush()
    return found
