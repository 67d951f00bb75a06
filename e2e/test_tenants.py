"""Teams that share a cluster: a queue belongs to its namespace, and a user in Redis decides the tenant."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import jobs
import pytest
from client import Client
from cluster import INFD, Cluster, tiny, until
from release import Release

ITEMS = 300
SUBMITTER = "research-ballast-submitter"
RESOURCE = tiny("mine")
TENANTS: dict[str, Any] = {
    "offline": {"tenants": [{"name": "research"}, {"name": "sales"}]},
    "queueAccess": {"submitters": [{"secretName": SUBMITTER, "tenant": "research"}]},
}


@pytest.fixture(scope="module")
def theirs(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Create the namespace of another team."""
    name = f"{namespace}-b"
    cluster.make_namespace(name)
    yield name
    cluster.drop_namespace(name)


@pytest.fixture(scope="module")
def queue(cluster: Cluster, namespace: str) -> str:
    """Start a worker whose queue has tenants, and return the name of the queue."""
    cluster.apply(RESOURCE | {"spec": RESOURCE["spec"] | TENANTS}, namespace=namespace)
    cluster.wait_ready("mine", namespace=namespace)
    return f"{namespace}/mine"


def test_another_namespace_neither_runs_nor_reads_the_items_of_a_queue(
    cluster: Cluster, client: Client, release: Release, queue: str, theirs: str
) -> None:
    guest = RESOURCE | {"metadata": {"name": "guest"}, "spec": RESOURCE["spec"] | {"offline": {"queue": queue}}}
    own = RESOURCE | {"metadata": {"name": "own"}, "spec": RESOURCE["spec"] | {"replicas": 0}}
    cluster.apply(guest, own, namespace=theirs)
    job = jobs.submit(client, queue, ITEMS)
    job.finish(seconds=300, compared=3)
    refused = cluster.condition("guest", "Degraded", namespace=theirs)
    until(lambda: cluster.get("secret", "own-ballast-redis", namespace=theirs), seconds=60, said="a user of its own")
    account = user(cluster, "own-ballast-redis", theirs)

    assert (refused["status"], refused["reason"]) == ("True", "QueueNotAllowed")
    assert cluster.pods("guest", namespace=theirs) == []
    assert cluster.get("secret", "guest-ballast-redis", namespace=theirs) is None
    assert "NOPERM" not in until_login(release, account, "hgetall", f"ballast:{{{theirs}/own}}:totals")
    for command in (
        ("hgetall", f"ballast:{{{queue}}}:totals"),
        ("xrange", f"ballast:{{{queue}}}:inbox:research", "-", "+"),
        ("fcall", "ballast1_claim", "1", f"ballast:{{{queue}}}:totals"),
        ("keys", "*"),
        ("flushall",),
        ("function", "flush"),
    ):
        assert "NOPERM" in release.valkey(*command, **account, check=False), command


def test_a_grant_admits_the_other_namespace_and_ends_with_it(
    cluster: Cluster, release: Release, namespace: str, queue: str, theirs: str
) -> None:
    cluster.patch("mine", {"queueAccess": {"namespaces": [theirs]}}, namespace=namespace)
    cluster.wait_ready("guest", namespace=theirs)
    account = user(cluster, "guest-ballast-redis", theirs)
    admitted = release.valkey("hgetall", f"ballast:{{{queue}}}:totals", **account)
    cluster.patch("mine", {"queueAccess": {"namespaces": []}}, namespace=namespace)

    until(
        lambda: cluster.condition("guest", "Degraded", namespace=theirs)["reason"] == "QueueNotAllowed",
        seconds=60,
        said="the grant is gone",
    )
    until(lambda: "WRONGPASS" in release.valkey("ping", **account, check=False), seconds=60, said="the user is gone")
    assert "succeeded" in admitted
    cluster.kubectl("delete", INFD, "guest", "-n", theirs, "--timeout=60s", seconds=70)


def test_the_user_in_redis_decides_the_tenant(
    cluster: Cluster, client: Client, release: Release, namespace: str, queue: str
) -> None:
    account = user(cluster, SUBMITTER, namespace)
    inbox = f"ballast:{{{queue}}}:inbox"
    entries = [f"XADD {inbox}:research * item '{json.dumps(line)}' job nightly" for line in jobs.lines(20)]
    release.valkey(**account, stdin="\n".join([*entries, f"XADD {inbox}:research * job nightly end 1"]) + "\n")

    jobs.Submitted(client, queue, "nightly@research", 20, 16).finish(seconds=120, compared=2)
    assert client.job("nightly@research", queue=queue)["tenant"] == "research"
    for other in (inbox, f"{inbox}:sales"):
        assert "NOPERM" in release.valkey("xadd", other, "*", "item", "x", **account, check=False)


def test_settings_and_user_go_with_the_resource(cluster: Cluster, release: Release, namespace: str, queue: str) -> None:
    key = f"ballast:{{{queue}}}:settings"
    before = release.valkey("hget", key, "owner")
    cluster.kubectl("delete", INFD, "mine", "-n", namespace, "--timeout=60s", seconds=70)

    until(lambda: release.valkey("exists", key) == "0", seconds=90, said="no settings")
    until(lambda: f":{queue}" not in release.valkey("acl", "users"), seconds=60, said="no user")
    assert before == queue


def user(cluster: Cluster, secret: str, namespace: str) -> dict[str, str]:
    """Return the user and the password in a Secret that the operator created."""
    data = until(lambda: cluster.get("secret", secret, namespace=namespace), seconds=60, said=f"Secret {secret}")[
        "data"
    ]
    url, password = (base64.b64decode(data[key]).decode() for key in ("url", "password"))
    return {"user": unquote(urlsplit(url).username or ""), "password": password}


def until_login(release: Release, account: dict[str, str], *command: str) -> str:
    """Wait until Redis knows a user, and return the answer to a command."""

    def answer() -> str:
        found = release.valkey(*command, **account, check=False)
        return "" if "WRONGPASS" in found else found or "nothing"

    return until(answer, seconds=60, said="the user exists")
