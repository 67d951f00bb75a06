"""`docs/generate.py --check`, which `make check` runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_edited_file_is_kept_and_reported_with_its_source(tmp_path: Path):
    edited = [
        tmp_path / "docs" / "reference" / "chart.md",
        tmp_path / "helm" / "ballast" / "dashboards" / "ballast.json",
    ]
    for folder in ("docs", "helm"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.png", "__pycache__"))
    for path in edited:
        path.write_text(f"{path.read_text()}an edit\n")

    command = [sys.executable, tmp_path / "docs" / "generate.py", "--check", "chart.md", "dashboards"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stderr
    assert f"{edited[0]} differs from what docs/generate.py makes. Run `make generate`" in done.stderr
    assert f"{edited[1]} differs from what docs/dashboard.py makes. Run `make generate`" in done.stderr
    assert done.stderr.endswith("If you edited one, edit the source instead.\n")
    assert all(path.read_text().endswith("an edit\n") for path in edited)
