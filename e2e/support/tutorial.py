"""Run the commands of docs/tutorial/kubernetes.md, as the page has them."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from programs import ROOT, run

PAGE = ROOT / "docs" / "tutorial" / "kubernetes.md"
STEP = re.compile(r"<!-- step: (\w+) -->\n```sh\n(.*?)```", re.DOTALL)
INSTALLED = "pip install .\n"
"""Of the job's step: `ballast` is there already, from the environment that the tests run in."""


END = "\x1e"
"""Stands behind what a step printed, before the seconds since the first began."""


@dataclass(frozen=True)
class Step:
    """One step of the page, with its output."""

    commands: str
    said: str
    at: str
    """Seconds since the first step of the run began."""


def steps() -> dict[str, str]:
    """Return the commands of the page by the name of their step."""
    return dict(STEP.findall(PAGE.read_text()))


def run_steps(cluster: Cluster, *names: str, folder: Path, seconds: float) -> dict[str, Step]:
    """Run steps of the page in one shell, as a reader does. Fail at the first command that fails.

    The shell runs in `folder`, which has links to the folders of the repository.
    """
    for name in ("docs", "helm"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    page = steps()
    ended = f"\nprintf '{END}%s\\n' $SECONDS\n"
    text = "".join(page[name] + ended for name in names).replace(INSTALLED, "")
    script = f"set -euo pipefail\nexec 2>&1\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}"
    programs = {str(Path(cluster.provider.program(name)).parent) for name in ("kubectl", "helm")}
    path = os.pathsep.join([str(Path(sys.executable).parent), *sorted(programs), os.environ["PATH"]])
    homes = {name: str(cluster.folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
    env = {**homes, "PATH": path, "KUBECONFIG": str(cluster.provider.kubeconfig)}
    said = run("bash", "-c", script, seconds=seconds, env=env, folder=folder).stdout
    parts = re.findall(rf"(.*?){END}(\d+)\n", said, re.DOTALL)
    return {name: Step(page[name], *part) for name, part in zip(names, parts, strict=True)}
