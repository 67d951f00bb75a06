"""What is done to the product, from outside of it, and the files of e2e/ that have to notice.

A worker is sabotaged by a layer over its image: a module, and a `.pth` file by which Python imports it at every start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT
from release import NAMESPACE, Release

HERE = Path(__file__).parent
PACKAGES = "/opt/ballast/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Fault:
    """One sabotage.

    Attributes:
        what: What is done, for the table in the documentation.
        files: The files of e2e/ that are run.
        worker: The module that is put into the worker's image; none where it stays as it was built.
        act: What is done once the chart is installed, before the first test.
    """

    what: str
    files: tuple[str, ...]
    worker: str = ""
    act: Callable[[Release], None] = lambda _: None

    def layer(self) -> dict[str, str]:
        """The files that are put over the worker's image."""
        text = (HERE / "worker" / f"{self.worker}.py").read_text()
        return {f"{PACKAGES}/sabotage.py": text, f"{PACKAGES}/sabotage.pth": "import sabotage\n"}


def without_operator(release: Release) -> None:
    """Nobody reconciles."""
    release.cluster.kubectl("scale", "deployment/ballast-operator", "-n", NAMESPACE, "--replicas=0")
    release.cluster.kubectl(
        "wait", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--for=delete", "--timeout=60s"
    )


def without_fencing(release: Release) -> None:
    """The queue's functions take results and heartbeats under any token; a later revision is left alone by workers."""
    text = (ROOT / "worker" / "ballast_queue" / "ballast.lua").read_text()
    for guard in ("elseif held ~= token then", "if parse_live(live[i]) ~= argv[2 * i + 1] then"):
        assert text.count(guard) == 1, f"ballast.lua has changed: {guard}"
        text = text.replace(guard, guard.split(" ", 1)[0] + " false then")
    text = re.sub(r"local REVISION = \d+", "local REVISION = 1000000", text)
    release.valkey("-x", "function", "load", "replace", stdin=text)


FAULTS = {
    "operator-away": Fault(
        "both operators scaled to zero after the installation", ("test_serve.py",), act=without_operator
    ),
    "fencing-off": Fault(
        "the functions in Valkey replaced by ones that take results and heartbeats under any token",
        ("test_fence.py",),
        act=without_fencing,
    ),
    "reservation-ignored": Fault(
        "the planner in the worker's image reserves no slot, block or prefill token for offline",
        ("test_backfill.py",),
        worker="greedy",
    ),
    "canned-text": Fault(
        "the worker's image answers every request with the same word, as often as tokens were asked for",
        ("test_serve.py", "test_batch.py"),
        worker="canned",
    ),
    "metrics-frozen": Fault(
        "`/metrics` in the worker's image repeats what it said first",
        ("test_serve.py", "test_alerts.py"),
        worker="frozen",
    ),
}
