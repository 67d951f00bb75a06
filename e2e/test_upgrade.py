"""Changes of the chart during a job: another password, another version and back, and an uninstall."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from secrets import token_hex
from typing import Any

import jobs
import pytest
import yaml
from children import wait_tidy
from client import NAMESPACE as CLIENT_NAMESPACE
from client import POD, Client
from cluster import INFD, Cluster, until
from images import WORKER
from online import loop
from previous import Previous, previous
from release import NAME, NAMESPACE, Release, remove

SAMPLE = Path(__file__).parents[1] / "docs" / "samples" / "laptop.yaml"
SLOTS = 4
ITEMS, TOKENS = 3000, 128
LONG = 5000
"""Items of a job that still runs after an upgrade, also on a fast machine."""
CRD = "inferencedeployments.ballast.dev"


@pytest.fixture(scope="module")
def old(cluster: Cluster) -> Previous:
    """Build the previous version."""
    return previous(cluster)


@pytest.fixture
def before(cluster: Cluster, release: Release, old: Previous) -> Previous:
    """Install the chart of the previous version instead of this one."""
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
        job = jobs.submit(client, f"{namespace}/{first}", LONG, most=TOKENS)
        assert job.wait_leased() > 0
        upgrade(release, "--reuse-values", f"--set-string=valkey.password={new}")

        assert release.redis_password == new
        assert "WRONGPASS" in release.valkey("ping", password=old, check=False)
        until(lambda: redis_up(cluster, namespace) == {1.0}, seconds=90, said="workers have Redis")
        assert job.counts["succeeded"] < LONG
        job.finish(seconds=900, compared=6)
        said = online.stop()

    assert copied(cluster, namespace) not in {old, new}, "the workers have a user of their own"
    assert images(cluster, namespace) == pods
    assert said["failures"] == []
    wait_tidy(cluster, namespace)
    cluster.kubectl("delete", "infd", first, "-n", namespace, "--timeout=60s", seconds=70)


def test_a_new_certificate_reaches_everyone_and_nothing_restarts(
    cluster: Cluster, namespace: str, client: Client, release: Release
) -> None:
    cluster.start(sample(), count=2, namespace=namespace)
    everyone = {pod["metadata"]["uid"] for part in ("operator", "queue") for pod in release.pods(part)}
    pods, before = images(cluster, namespace), served(client)
    job = jobs.submit(client, f"{namespace}/laptop", ITEMS, most=TOKENS)
    upgrade(release, "--reuse-values", "--set=valkey.tls.renewDays=0")
    new = release.secret(f"{NAME}-valkey-tls", "tls.crt")
    until(lambda: served(client).strip() == new.strip(), seconds=180, said="Valkey uses the new certificate")
    release.valkey("client", "kill", "type", "normal", "skipme", "yes")

    until(lambda: redis_up(cluster, namespace) == {1.0}, seconds=180, said="workers trust the new authority")
    until(
        lambda: cluster.condition("laptop", "DeadlineAtRisk", namespace=namespace)["status"] != "Unknown",
        seconds=90,
        said="the operator trusts it, too",
    )
    job.finish(seconds=900, compared=3)
    assert before.strip() != new.strip()
    assert images(cluster, namespace) == pods
    assert {pod["metadata"]["uid"] for part in ("operator", "queue") for pod in release.pods(part)} == everyone
    cluster.kubectl("delete", "infd", "laptop", "-n", namespace, "--timeout=60s", seconds=70)


def test_queue_users_secrets_tls_and_settings_move_over_with_a_running_job(
    cluster: Cluster, namespace: str, client: Client, release: Release, before: Previous
) -> None:
    """The owner does what CHANGELOG.md asks for: label the Secrets that resources name, then upgrade."""
    queue, keys = f"{namespace}/laptop", "keys.yaml=key-of-research: research\n"
    cluster.kubectl("create", "secret", "generic", "keys", "-n", namespace, f"--from-literal={keys}")
    cluster.apply(with_tenants(), namespace=namespace)
    (pod, *_) = cluster.wait_pods("laptop", 2, namespace=namespace)
    assert set(images(cluster, namespace).values()) == {before.worker}
    access = [f"BALLAST_REDIS_URL={release.redis_url}", f"BALLAST_REDIS_PASSWORD={release.redis_password}"]
    words = ["env", *access, f"BALLAST_QUEUE={queue}", "ballast", "submit", "-", "--json", "--tenant", "research"]
    lines = "".join(json.dumps(line) + "\n" for line in jobs.lines(ITEMS, most=TOKENS))
    said = cluster.exec(pod["metadata"]["name"], *words, namespace=namespace, stdin=lines, seconds=120).stdout
    until(lambda: leased(cluster, namespace) > 0, seconds=60, said="the job runs", pause=0.1)

    cluster.kubectl("label", "secret", "keys", "-n", namespace, "ballast.dev/allow=true")
    upgrade(release, "--reset-values")
    wait_image(cluster, namespace, WORKER.name)
    until(lambda: redis_up(cluster, namespace) == {1.0}, seconds=90, said="workers have Redis")
    job = jobs.Submitted(client, queue, json.loads(said)["job_id"], ITEMS, TOKENS)
    during = ports_of_valkey(cluster)
    upgrade(release, "--reset-values")
    job.finish(seconds=900, compared=6)
    jobs.submit(client, queue, 50).finish(seconds=120, compared=3)

    settings = json.loads(release.valkey("hget", f"ballast:{{{queue}}}:settings", "json"))
    assert client.job(job.id, queue=queue)["tenant"] == "research"
    assert (settings["owner"], [tenant["name"] for tenant in settings["tenants"]]) == (queue, ["research", "sales"])
    assert copied(cluster, namespace) != release.redis_password
    assert f":{queue}" in release.valkey("acl", "users")
    assert (during, ports_of_valkey(cluster)) == ([6379, 6380], [6380])
    assert [answered(client, namespace, key) for key in ("key-of-research", "another")] == ["200", "401"]
    assert cluster.condition("laptop", "Degraded", namespace=namespace)["status"] == "False"
    cluster.kubectl("delete", "infd", "laptop", "-n", namespace, "--timeout=60s", seconds=70)
    cluster.kubectl("delete", "secret", "keys", "-n", namespace)
    wait_tidy(cluster, namespace)
    assert cluster.get("pods,deployments,services,secrets", namespace=namespace) == []


def test_an_upgrade_and_a_rollback_under_a_running_job_lose_nothing(
    cluster: Cluster, namespace: str, client: Client, release: Release, before: Previous
) -> None:
    queue = f"{namespace}/laptop"
    cluster.apply(sample(), namespace=namespace)
    cluster.wait_pods("laptop", 2, namespace=namespace)
    assert set(images(cluster, namespace).values()) == {before.worker}
    client.ballast("queue", "init", queue=queue)  # the command is newer than the installation
    with loop(client, namespace, "laptop") as online:
        job = jobs.submit(client, queue, ITEMS, most=TOKENS)
        assert job.wait_leased() > 0
        upgrade(release, "--reset-values")
        wait_image(cluster, namespace, WORKER.name)

        another = jobs.submit(client, queue, ITEMS, most=TOKENS)
        assert another.wait_leased(seconds=900) > 0  # its items come after those of the first job
        until(
            lambda: copied(cluster, namespace) != release.redis_password, seconds=60, said="workers with their own user"
        )
        until(lambda: redis_up(cluster, namespace) == {1.0}, seconds=90, said="workers have Redis")
        assert f":{queue}" in release.valkey("acl", "users")
        assert release.redis_url.startswith("rediss://")
        release.check_rights()
        cluster.helm("rollback", NAME, "1", "-n", NAMESPACE, "--wait", "--timeout", "3m")
        wait_image(cluster, namespace, before.worker)

        job.finish(seconds=900, compared=6)
        another.finish(seconds=900, compared=6)
        said = online.stop()

    # A worker of the previous version may refuse requests on connections that clients keep; new ones never reach it.
    assert [failure for failure in said["failures"] if failure["lane"] == "fresh"] == []
    wait_tidy(cluster, namespace)


def test_uninstalling_keeps_resource_workers_and_data_and_a_new_install_takes_them_up(
    cluster: Cluster, namespace: str, client: Client, release: Release
) -> None:
    queue, pods = f"{namespace}/laptop", images(cluster, namespace)
    earlier = json.loads(client.ballast("jobs", "--json", queue=queue))
    with loop(client, namespace, "laptop") as online:
        cluster.helm("uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "2m")

        assert cluster.get("crd", CRD) is not None
        assert cluster.get(INFD, "laptop", namespace=namespace) is not None
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

    cluster.kubectl("delete", "infd", "laptop", "-n", namespace, "--timeout=60s", seconds=70)

    wait_tidy(cluster, namespace)
    assert cluster.get("pods,deployments,services,secrets", namespace=namespace) == []


def sample() -> dict[str, Any]:
    """Return docs/samples/laptop.yaml with few slots, so that a job outlasts an upgrade."""
    manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    manifest["spec"]["slots"] = SLOTS
    return manifest


def with_tenants() -> dict[str, Any]:
    """Return the sample with tenants and API keys."""
    manifest = sample()
    tenants = [{"name": "research", "weight": 3}, {"name": "sales"}]
    manifest["spec"] |= {"offline": {"tenants": tenants}, "apiKeys": {"secretName": "keys"}}
    return manifest


def leased(cluster: Cluster, namespace: str) -> float:
    return sum(jobs.leases(cluster, cluster.pods("laptop", namespace=namespace)).values())


def ports_of_valkey(cluster: Cluster) -> list[int]:
    service = cluster.get("service", f"{NAME}-valkey", namespace=NAMESPACE)
    return sorted(port["port"] for port in service["spec"]["ports"])


def answered(client: Client, namespace: str, key: str) -> str:
    """Return the status of a request with an API key."""
    program = f"""
import http.client, json
connection = http.client.HTTPConnection("laptop.{namespace}.svc", 8000, timeout=60)
body = json.dumps({{"model": "ballast-tiny", "prompt": "Hello", "max_tokens": 4}})
connection.request("POST", "/v1/completions", body, {{"Authorization": "Bearer {key}"}})
print(connection.getresponse().status)
"""
    return client.cluster.exec(POD, "python3", "-c", program, namespace=CLIENT_NAMESPACE).stdout.strip()


def upgrade(release: Release, *values: str) -> None:
    """Upgrade the release as its notes describe."""
    release.check_rights()
    release.cluster.helm("upgrade", NAME, release.package, "-n", NAMESPACE, *values, "--wait", "--timeout", "3m")


def images(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Return the image of each worker pod by its uid."""
    pods = cluster.pods("laptop", namespace=namespace)
    return {pod["metadata"]["uid"]: pod["spec"]["containers"][0]["image"] for pod in pods}


def wait_image(cluster: Cluster, namespace: str, image: str) -> None:
    """Wait until all workers run this image and serve."""
    until(lambda: set(images(cluster, namespace).values()) == {image}, seconds=300, said=f"workers run {image}")
    cluster.wait_pods("laptop", 2, namespace=namespace, seconds=240)


def copied(cluster: Cluster, namespace: str) -> str:
    """Return the password in the resource's namespace."""
    return base64.b64decode(
        cluster.get("secret", "laptop-ballast-redis", namespace=namespace)["data"]["password"]
    ).decode()


def served(client: Client) -> str:
    """Return the certificate of Valkey."""
    program = f"import ssl; print(ssl.get_server_certificate(('{NAME}-valkey.{NAMESPACE}.svc', 6380)))"
    return client.cluster.exec(POD, "python3", "-c", program, namespace=CLIENT_NAMESPACE).stdout


def redis_up(cluster: Cluster, namespace: str) -> set[float]:
    return cluster.redis_up(cluster.pods("laptop", namespace=namespace))
