"""Network faults between operator and Redis, through toxiproxy: the operator goes on, and polls again at their end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import network
import pytest
from operated import Cluster, Operator, report, until

from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.envtest

CUTS = {fault.name for fault in network.FAULTS} - {"latency", "slow reader", "slow writer"}
"""Faults in which no poll succeeds."""
FAULTS = {fault.name: fault for fault in network.FAULTS}


@pytest.fixture(scope="module")
def link() -> Iterator[network.Link]:
    program = network.program()
    if program is None:
        pytest.skip(network.MISSING)
    with network.toxiproxy(program) as api:
        yield network.Link(api, "operator")


def connections(operator: Operator) -> int:
    """Return the number of sockets of the operator."""
    assert operator.process is not None
    number = 0
    for file in Path(f"/proc/{operator.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            number += str(file.readlink()).startswith("socket:")
    return number


def changes_are_applied(cluster: Cluster, name: str, slots: int) -> None:
    """Change a resource, and wait until its Deployment follows."""
    before = cluster.get("deployments", name)["metadata"]["generation"]
    cluster.patch("inferencedeployments", name, {"spec": {"slots": slots}})
    until(lambda: cluster.get("deployments", name)["metadata"]["generation"] > before, said=f"{name} is applied")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_delays_no_other_resource_and_the_polls_go_on_at_its_end(
    operator: Operator, cluster: Cluster, valkey: Any, link: network.Link, fault: str
) -> None:
    link.point_to(valkey.url.removeprefix("redis://"))
    cluster.secret("near", url=valkey.url)
    cluster.secret("far", url=f"redis://127.0.0.1:{link.port}")
    for name in ("near", "far"):
        cluster.make(name, redis={"secretName": name})
        report(Queue.connect(valkey.url, f"{cluster.namespace}/{name}"), f"10.9.5.{len(name)}")
        cluster.says("DeadlineAtRisk", "False", name=name)
    before = connections(operator)

    link.spoil(FAULTS[fault])
    try:
        if fault in CUTS:
            cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable", name="far")
        changes_are_applied(cluster, "near", 5)
        changes_are_applied(cluster, "far", 5)
        near = cluster.condition("DeadlineAtRisk", "near")
    finally:
        link.heal()

    cluster.says("DeadlineAtRisk", "False", name="far")
    assert near["status"] == "False", "the fault of one Redis showed at the other"
    until(lambda: connections(operator) <= before + 2, said="the connections of the fault to be closed")
