"""`ballast bench guarantees`: reservation, fairness and deadlines, each in a run that would break it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ballast_cli.console import say
from ballast_sim.comparison.guarantee_runs import GuaranteeResult


def print_case(case: GuaranteeResult) -> None:
    """Say what became of one promise."""
    sys.stdout.write(f"{case.name:16} {'kept' if case.is_kept else 'BROKEN'}: {case.sentence}\n")
    sys.stdout.flush()


def write_cases(cases: list[GuaranteeResult], path: Path) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps([asdict(case) for case in cases], indent=2) + "\n", encoding="utf-8")
    say(f"Figures: {path}")
