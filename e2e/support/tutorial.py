"""The commands of docs/tutorial/kubernetes.md: the page is what is run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from cluster import Cluster
from programs import ROOT, run

PAGE = ROOT / "docs" / "tutorial" / "kubernetes.md"
STEP = re.compile(r"<!-- step: (\w+) -->\n```sh\n(.*?)```", re.DOTALL)
INSTALLED = "pip install .\n"
"""Of the job's step: `ballast` is there already, from the environment that the tests run in."""


def steps() -> dict[str, str]:
    """The page's commands by the name of their step."""
    return dict(STEP.findall(PAGE.read_text()))


def run_steps(cluster: Cluster, *names: str, folder: Path, seconds: float) -> str:
    """Run steps of the page in one shell, as a reader does; gives what they print. Fails at the first that fails.

    The reader's directory is `folder`, where the repository's own folders are seen.
    """
    for name in ("docs", "helm"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    text = "\n".join(steps()[name] for name in names).replace(INSTALLED, "")
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}"
    programs = {str(Path(cluster.provider.program(name)).parent) for name in ("kubectl", "helm")}
    path = os.pathsep.join([str(Path(sys.executable).parent), *sorted(programs), os.environ["PATH"]])
    homes = {name: str(cluster.folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
    env = {**homes, "PATH": path, "KUBECONFIG": str(cluster.provider.kubeconfig)}
    done = run("bash", "-c", script, seconds=seconds, env=env, folder=folder)
    return done.stdout
