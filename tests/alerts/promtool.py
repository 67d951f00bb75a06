"""Runs promtool over rules and series."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def check_rules(promtool: str, folder: Path, groups: Sequence[Any]) -> None:
    """Let promtool check the syntax of rules."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    _run(promtool, folder, "check", "rules", "rules.yaml")


def asks(query: str, at: str, samples: Mapping[str, float] = {}) -> dict[str, Any]:
    """Return a test that a query finds these samples, by their labels, at a point of time."""
    expected = [{"labels": labels, "value": value} for labels, value in samples.items()]
    return {"expr": query, "eval_time": at, "exp_samples": expected}


def run_promtool(
    promtool: str,
    folder: Path,
    series: Mapping[str, str],
    groups: Sequence[Any] = (),
    every: str = "1m",
    **tests: Any,
) -> None:
    """Let promtool evaluate rules over series with a sample a minute, and run the tests."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": list(groups)}))
    given = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "1m", "input_series": given} | tests
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": [case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(whole))
    _run(promtool, folder, "test", "rules", "test.yaml")


def _run(promtool: str, folder: Path, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, "SUCCESS" in done.stdout) == (0, True), done.stdout + done.stderr
