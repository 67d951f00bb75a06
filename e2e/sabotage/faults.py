"""The faults that are put into the product from outside, and the tests in e2e/ that must detect them.

A fault of a program is a layer over its image: a module, and a `.pth` file with which Python imports it at every start.
If the tests are in tests/, the module is imported by all Python processes of the run instead, and no cluster is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import until
from images import OPERATOR, WORKER, Image
from programs import ROOT
from release import NAME, NAMESPACE, Release

HERE = Path(__file__).parent
PACKAGES = "/opt/ballast/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Fault:
    """One sabotage.

    Attributes:
        what: The fault in words, for the table in the documentation.
        tests: The files or tests to run, in e2e/ or in tests/.
        module: The module to put into the image that its folder names, or in `local/` for tests in tests/. Empty: the
            images stay as they were built.
        act: The action after the chart is installed, before the first test.
        setup: Words in the message of a fixture that fails because of the fault. Other failures of fixtures do not
            count as detected.
    """

    what: str
    tests: tuple[str, ...]
    module: str = ""
    act: Callable[[Release], None] = lambda _: None
    setup: str = ""

    @property
    def is_local(self) -> bool:
        """Return whether the tests need no cluster."""
        return self.module.startswith("local/")

    @property
    def image(self) -> Image:
        """Return the image that gets the module."""
        return {"worker": WORKER, "operator": OPERATOR}[self.module.partition("/")[0]]

    def layer(self) -> dict[str, str]:
        """Return the files of the layer over that image."""
        text = (HERE / self.module).read_text()
        return {f"{PACKAGES}/sabotage.py": text, f"{PACKAGES}/sabotage.pth": "import sabotage\n"}


def without_operator(release: Release) -> None:
    """Scale the operator to zero, so that no resource is reconciled."""
    release.cluster.kubectl("scale", "deployment/ballast-operator", "-n", NAMESPACE, "--replicas=0")
    release.cluster.kubectl(
        "wait", "pod", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--for=delete", "--timeout=60s"
    )


def without_fencing(release: Release) -> None:
    """Replace the queue's functions by functions that accept any token.

    Their revision is newer than that of the workers, so that no worker replaces them.
    """
    text = (ROOT / "worker" / "ballast_queue" / "ballast.lua").read_text()
    for check in ("elseif held ~= token then", "if parse_live(live[i]) ~= argv[2 * i + 1] then"):
        assert text.count(check) == 1, f"ballast.lua has changed: {check}"
        text = text.replace(check, check.split(" ", 1)[0] + " false then")
    text = re.sub(r"local REVISION = \d+", "local REVISION = 1000000", text)
    # The Service may refuse connections for a moment after the installation.
    until(lambda: release.valkey("ping", check=False) == "PONG", seconds=60, said="Valkey answers")
    release.valkey("-x", "function", "load", "replace", stdin=text)


def without_volume(release: Release) -> None:
    """Install the chart without a volume for Valkey."""
    release.cluster.helm("uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "2m")
    release.cluster.kubectl("delete", "pvc", "--all", "-n", NAMESPACE)
    values = ("--set=valkey.persistence.enabled=false", "--wait", "--timeout", "3m")
    release.cluster.helm("install", NAME, release.package, "-n", NAMESPACE, *values)


def without_right_to_events(release: Release) -> None:
    """Remove only the permission to write events from the operator's role."""
    role = release.cluster.get("clusterrole", f"{NAME}-operator-{NAMESPACE}")
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["events"]]
    release.cluster.kubectl("replace", "-f", "-", stdin=json.dumps(role))


def without_storage_of_heads(release: Release) -> None:
    """Take the Redis of Ray's heads away from the operator."""
    values = ("--reuse-values", "--set=ray.gcsRedis.enabled=false", "--wait", "--timeout", "3m")
    release.cluster.helm("upgrade", NAME, release.package, "-n", NAMESPACE, *values)


FAULTS = {
    "operator-away": Fault(
        "both operators scaled to zero after the installation",
        ("test_serve.py",),
        act=without_operator,
        setup="timed out waiting for the condition on inferencedeployments/laptop",
    ),
    "fencing-off": Fault(
        "the functions in Valkey replaced by functions that accept results and heartbeats with any token",
        ("test_fence.py",),
        act=without_fencing,
    ),
    "reservation-ignored": Fault(
        "the planner in the worker's image reserves no slot, block or prefill token for offline",
        ("test_backfill.py",),
        module="worker/greedy.py",
    ),
    "canned-text": Fault(
        "the worker's image answers every request with the same word, once for each requested token",
        ("test_serve.py", "test_batch.py"),
        module="worker/canned.py",
    ),
    "metrics-frozen": Fault(
        "`/metrics` in the worker's image repeats its first answer",
        ("test_serve.py", "test_alerts.py"),
        module="worker/frozen.py",
    ),
    "no-volume": Fault(
        "the chart installed with `valkey.persistence.enabled=false`",
        ("test_break_parts.py::test_valkey_dies_and_comes_back_with_its_volume",),
        act=without_volume,
    ),
    "hasty-rollout": Fault(
        "the operator's image makes Deployments with `maxSurge: 0, maxUnavailable: 1` for every resource",
        (
            "test_change.py::test_a_hot_patch_of_the_reservation_reaches_the_same_pods",
            "test_change.py::test_a_cold_change_rolls_the_pods_and_no_request_fails",
        ),
        module="operator/hasty.py",
    ),
    "abrupt-end": Fault(
        "the worker's image ends at SIGTERM immediately, as at SIGKILL",
        ("test_break.py",),
        module="worker/abrupt.py",
    ),
    "right-missing": Fault(
        "the right to write events taken from the operator's role",
        ("test_serve.py",),
        act=without_right_to_events,
        setup='cannot create resource "events"',
    ),
    "forgetful-head": Fault(
        "the chart installed with `ray.gcsRedis.enabled=false`",
        ("test_ray.py::test_a_part_of_ray_that_dies_stops_no_request_and_no_item",),
        act=without_storage_of_heads,
    ),
    "unhooked": Fault(
        "the operator's image ends pods on Ray without the `preStop` hook that drains their replicas",
        ("test_ray.py::test_deletion_leaves_nothing_behind",),
        module="operator/unhooked.py",
    ),
    "leak": Fault(
        "errors of Redis quote what the server answered",
        ("queue/test_secrecy.py",),
        module="local/leak.py",
    ),
    "takeover": Fault(
        "the operator applies children over the objects of other owners",
        ("operator/test_other_owners.py",),
        module="local/takeover.py",
    ),
    "blindness": Fault(
        "the operator's audit compares nothing",
        ("operator/test_faults.py", "operator/test_crd_comes_and_goes.py"),
        module="local/blindness.py",
    ),
    "flood": Fault(
        "a worker receives any number of large bodies at once",
        ("worker/test_hostile_clients.py",),
        module="local/flood.py",
    ),
    "poison": Fault(
        "`ballast fetch` accepts each file, whatever its checksum is",
        ("fetch/test_hostile.py",),
        module="local/poison.py",
    ),
}
