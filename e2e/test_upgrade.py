"""Changes of the chart during a job: another password, another version and back, and an uninstall."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from secrets import token_hex

import jobs
import pytest
from children import wait_tidy
from client import NAMESPACE as CLIENT_NAMESPACE
from client import POD, Client
from cluster import INFD, Cluster, until
from images import WORKER
from online import loop
from previous import Previous, previous
from release import NAME, NAMESPACE, Release, remove

SAMPLE = Path(__file__).parents[1] / "docs" / "samples" / "laptop.yaml"
ITEMS, TOKENS = 1000, 128
CRD = "inferencedeployments.ballast.dev"


@pytest.fixture(scope="module")
def before(cluster: Cluster, release: Release) -> Previous:
    """Install the chart of the previous version instead of this one."""
    old = previous(cluster)
    release.check_rights()
    remove(cluster)
    cluster.make_namespace(NAMESPACE)
    cluster.helm("install", NAME, old.package, "-n", NAMESPACE, *old.values, "--wait", "--timeout", "3m")
    return old


def test_a_new_password_reaches_the_same_workers_and_nothing_is_lost(
    cluster: Cluster, namespace: str, first: str, client: Client, release: Release
) -> None:
    pods = images(cluster, namespace)
    old, new = release.redis_password, token_hex(16)
    with loop(client, namespace, first) as online:
        job = jobs.submit(client, f"{namespace}/{first}", ITEMS, most=TOKENS)
        assert job.wait_leased() > 0
        upgrade(release, "--reuse-values", f"--set-string=valkey.password={new}")

        assert release.redis_password == new
        assert "WRONGPASS" in release.valkey("ping", password=old, check=False)
        until(lambda: up(cluster, namespace) == {1.0}, seconds=90, said="workers have Redis")
        assert job.counts["succeeded"] < ITEMS
        job.finish(seconds=500, compared=6)
        said = online.stop()

    assert copied(cluster, namespace) not in {old, new}, "the workers have a user of their own"
    assert images(cluster, namespace) == pods
    assert said["failures"] == []
    wait_tidy(cluster, namespace)
    cluster.kubectl("delete", "infd", first, "-n", namespace, "--timeout=60s", seconds=70)


def test_a_new_certificate_reaches_everyone_and_nothing_restarts(
    cluster: Cluster, namespace: str, client: Client, release: Release
) -> None:
    cluster.apply(SAMPLE, namespace=namespace)
    cluster.wait_ready("first", namespace=namespace)
    cluster.wait_pods("first", 2, namespace=namespace)
    everyone = {pod["metadata"]["uid"] for part in ("operator", "queue") for pod in release.pods(part)}
    pods, before = images(cluster, namespace), served(client)
    job = jobs.submit(client, f"{namespace}/first", ITEMS, most=TOKENS)
    upgrade(release, "--reuse-values", "--set=valkey.tls.renewDays=0")
    new = release.secret(f"{NAME}-valkey-tls", "tls.crt")
    until(lambda: served(client).strip() == new.strip(), seconds=180, said="Valkey uses the new certificate")
    release.valkey("client", "kill", "type", "normal", "skipme", "yes")

    until(lambda: up(cluster, namespace) == {1.0}, seconds=180, said="workers trust the new authority")
    until(
        lambda: cluster.condition("first", "DeadlineAtRisk", namespace=namespace)["status"] != "Unknown",
        seconds=90,
        said="the operator trusts it, too",
    )
    job.finish(seconds=500, compared=3)
    assert before.strip() != new.strip()
    assert images(cluster, namespace) == pods
    assert {pod["metadata"]["uid"] for part in ("operator", "queue") for pod in release.pods(part)} == everyone
    cluster.kubectl("delete", "infd", "first", "-n", namespace, "--timeout=60s", seconds=70)


def test_an_upgrade_and_a_rollback_under_a_running_job_lose_nothing(
    cluster: Cluster, namespace: str, client: Client, release: Release, before: Previous
) -> None:
    queue = f"{namespace}/first"
    cluster.apply(SAMPLE, namespace=namespace)
    cluster.wait_pods("first", 2, namespace=namespace)
    assert set(images(cluster, namespace).values()) == {before.worker}
    client.ballast("queue", "init", queue=queue)  # the command is newer than the installation
    with loop(client, namespace, "first") as online:
        job = jobs.submit(client, queue, ITEMS, most=TOKENS)
        assert job.wait_leased() > 0
        upgrade(release, "--reset-values")
        wait_image(cluster, namespace, WORKER.name)

        another = jobs.submit(client, queue, ITEMS, most=TOKENS)
        assert another.wait_leased() > 0
        until(
            lambda: copied(cluster, namespace) != release.redis_password, seconds=60, said="workers with their own user"
        )
        until(lambda: up(cluster, namespace) == {1.0}, seconds=90, said="workers have Redis")
        assert f":{queue}" in release.valkey("acl", "users")
        assert release.redis_url.startswith("rediss://")
        release.check_rights()
        cluster.helm("rollback", NAME, "1", "-n", NAMESPACE, "--wait", "--timeout", "3m")
        wait_image(cluster, namespace, before.worker)

        job.finish(seconds=500, compared=6)
        another.finish(seconds=500, compared=6)
        said = online.stop()

    # A worker of the previous version may refuse requests on connections that clients keep; new ones never reach it.
    assert [failure for failure in said["failures"] if failure["lane"] == "fresh"] == []
    wait_tidy(cluster, namespace)


def test_uninstalling_keeps_resource_workers_and_data_and_a_new_install_takes_them_up(
    cluster: Cluster, namespace: str, client: Client, release: Release
) -> None:
    queue, pods = f"{namespace}/first", images(cluster, namespace)
    earlier = json.loads(client.ballast("jobs", "--json", queue=queue))
    with loop(client, namespace, "first") as online:
        cluster.helm("uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "2m")

        assert cluster.get("crd", CRD) is not None
        assert cluster.get(INFD, "first", namespace=namespace) is not None
        assert [pvc["metadata"]["name"] for pvc in cluster.get("pvc", namespace=NAMESPACE)] == [f"data-{NAME}-valkey-0"]
        until(lambda: not cluster.get("pods,deployments", namespace=NAMESPACE), seconds=90, said="no pod of the chart")
        online.wait_more()

        cluster.helm("install", NAME, release.package, "-n", NAMESPACE, "--wait", "--timeout", "3m")
        wait_image(cluster, namespace, WORKER.name)
        said = online.stop()

    assert earlier["jobs"]
    assert json.loads(client.ballast("jobs", "--json", queue=queue)) == earlier
    assert not pods.keys() & images(cluster, namespace).keys()
    assert [failure for failure in said["failures"] if failure["lane"] == "fresh"] == []
    jobs.submit(client, queue, 50).finish(seconds=120, compared=3)


def test_without_the_operator_a_resource_is_deleted_all_the_same(
    cluster: Cluster, namespace: str, release: Release
) -> None:
    release.check_rights()
    cluster.helm("uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "2m")

    cluster.kubectl("delete", "infd", "first", "-n", namespace, "--timeout=60s", seconds=70)

    wait_tidy(cluster, namespace)
    assert cluster.get("pods,deployments,services,secrets", namespace=namespace) == []


def upgrade(release: Release, *values: str) -> None:
    """Upgrade the release as its notes describe."""
    release.check_rights()
    release.cluster.helm("upgrade", NAME, release.package, "-n", NAMESPACE, *values, "--wait", "--timeout", "3m")


def images(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Return the image of each worker pod by its uid."""
    pods = cluster.pods("first", namespace=namespace)
    return {pod["metadata"]["uid"]: pod["spec"]["containers"][0]["image"] for pod in pods}


def wait_image(cluster: Cluster, namespace: str, image: str) -> None:
    """Wait until all workers run this image and serve."""
    until(lambda: set(images(cluster, namespace).values()) == {image}, seconds=300, said=f"workers run {image}")
    cluster.wait_pods("first", 2, namespace=namespace, seconds=240)


def copied(cluster: Cluster, namespace: str) -> str:
    """Return the password in the resource's namespace."""
    return base64.b64decode(
        cluster.get("secret", "first-ballast-redis", namespace=namespace)["data"]["password"]
    ).decode()


def served(client: Client) -> str:
    """Return the certificate of Valkey."""
    program = f"import ssl; print(ssl.get_server_certificate(('{NAME}-valkey.{NAMESPACE}.svc', 6380)))"
    return client.cluster.exec(POD, "python3", "-c", program, namespace=CLIENT_NAMESPACE).stdout


def up(cluster: Cluster, namespace: str) -> set[float]:
    """Return the state of Redis that workers report."""
    return {cluster.metrics(pod)["ballast_redis_up"] for pod in cluster.pods("first", namespace=namespace)}
