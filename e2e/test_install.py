"""The chart installs from its package, in a namespace that admits only restricted pods, with the images just built."""

from __future__ import annotations

import pytest
from client import NAMESPACE as CLIENT_NAMESPACE
from client import POD, Client
from cluster import RESTRICTED, Cluster, is_ready
from images import OPERATOR, VALKEY, is_the_image
from release import NAME, NAMESPACE, Release


def test_the_namespace_lets_in_restricted_pods_only(cluster: Cluster, release: Release) -> None:
    privileged = ("run", "intruder", "-n", NAMESPACE, f"--image={OPERATOR.name}", "--restart=Never", "--privileged")

    refused = cluster.kubectl(*privileged, check=False)

    assert cluster.get("namespace", NAMESPACE)["metadata"]["labels"].items() >= RESTRICTED.items()
    assert refused.returncode == 1
    assert "violates PodSecurity" in refused.stderr


@pytest.mark.short
def test_two_operators_run_the_image_that_was_built(release: Release) -> None:
    pods = release.pods("operator")

    assert [is_ready(pod) for pod in pods] == [True, True]
    for pod in pods:
        (container,) = pod["status"]["containerStatuses"]
        assert is_the_image(container["imageID"], release.images[OPERATOR])
        assert container["restartCount"] == 0
        assert "hostNetwork" not in pod["spec"]
        assert not [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]


@pytest.mark.short
def test_helm_test_finds_the_operator_and_a_redis_fit_to_hold_work(cluster: Cluster, release: Release) -> None:
    done = cluster.helm("test", NAME, "-n", NAMESPACE, "--logs", "--timeout", "2m")

    assert "operator: " in done.stdout
    assert "redis: fit to hold work" in done.stdout


@pytest.mark.short
def test_the_queue_has_a_volume_and_a_password(cluster: Cluster, release: Release) -> None:
    (pod,) = release.pods("queue")
    (claim,) = cluster.get("pvc", namespace=NAMESPACE)

    assert is_ready(pod)
    if VALKEY in release.images:
        assert is_the_image(pod["status"]["containerStatuses"][0]["imageID"], release.images[VALKEY])
    assert claim["status"]["phase"] == "Bound"
    assert len(release.redis_password) >= 32
    assert "WRONGPASS" in release.valkey("ping", password="not-this-one", check=False)
    assert release.valkey("ping") == "PONG"
    assert "yes" in release.valkey("config", "get", "appendonly")
    assert "noeviction" in release.valkey("config", "get", "maxmemory-policy")


def test_the_queue_serves_tls_alone(cluster: Cluster, client: Client, release: Release) -> None:
    plain = cluster.exec(
        f"{NAME}-valkey-0", "valkey-cli", "-h", "127.0.0.1", "-p", "6379", "ping", namespace=NAMESPACE, check=False
    )
    words = (f"BALLAST_REDIS_URL={release.redis_url}", f"BALLAST_REDIS_PASSWORD={release.redis_password}")
    untrusted = cluster.exec(POD, "env", *words, "ballast", "jobs", namespace=CLIENT_NAMESPACE, check=False)

    assert release.redis_url.startswith("rediss://")
    assert "refused" in plain.stdout + plain.stderr
    assert "certificate is not trusted" in untrusted.stdout + untrusted.stderr
    assert client.ballast("jobs", "--json", queue="install/none")


def test_the_notes_say_what_to_do_next(release: Release) -> None:
    assert "helm test ballast -n ballast" in release.said


@pytest.mark.parametrize("verb", ["get", "describe"])
def test_kubectl_knows_the_resource_by_its_short_name(cluster: Cluster, release: Release, verb: str) -> None:
    assert "No resources found" in cluster.kubectl(verb, "infd", "-n", NAMESPACE).stderr
