"""The chart as Helm renders it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART

KUBERNETES = "1.35.0"
"""Without a cluster, an older Helm assumes a version that is too old for the chart."""


class Helm:
    """The helm program with its own settings folder, so that the settings of the user have no effect."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        homes = {name: str(folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
        self.environment = os.environ | homes

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, check=False, env=self.environment
        )
        if check and done.returncode:
            pytest.fail(f"helm {' '.join(arguments)}: {done.stderr}")
        return done

    def values(self, values: dict[str, Any], name: str) -> str:
        """Write the values to a file, and return its path."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(values))
        return str(path)

    def template(
        self, values: dict[str, Any], *, namespace: str = "system", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Render a release `ballast`. Helm would generate another password each time."""
        pinned = self.values({"valkey": {"password": "pinned"}}, "pinned.yaml")
        given = self.values(values, "values.yaml")
        where = ("-n", namespace, "--kube-version", KUBERNETES)
        return self.run("template", "ballast", str(CHART), *where, "-f", pinned, "-f", given, check=check)

    def objects(self, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the rendered objects by `Kind/name`."""
        rendered = [each for each in yaml.safe_load_all(self.template(values).stdout) if each]
        return {f"{each['kind']}/{each['metadata']['name']}": each for each in rendered}


@pytest.fixture(scope="session")
def helm_program() -> str:
    found = os.environ.get("HELM") or shutil.which("helm")
    if not found:
        pytest.skip("helm is neither on the PATH nor named by HELM: see `make chart`")
    return found


@pytest.fixture
def helm(helm_program: str, tmp_path: Path) -> Helm:
    return Helm(helm_program, tmp_path)
