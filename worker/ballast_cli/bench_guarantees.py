"""The output of `ballast bench guarantees`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ballast_cli.console import say
from ballast_sim.comparison.guarantee_runs import GuaranteeResult


def print_result(result: GuaranteeResult) -> None:
    """Print whether a guarantee was kept."""
    sys.stdout.write(f"{result.name:16} {'kept' if result.is_kept else 'BROKEN'}: {result.sentence}\n")
    sys.stdout.flush()


def write_results(results: list[GuaranteeResult], path: Path) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")
    say(f"Figures: {path}")
