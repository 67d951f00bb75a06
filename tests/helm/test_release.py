"""Releases in a real API server: install, upgrade and uninstall."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from control_plane import ControlPlane, control_plane

from ballast_api.names import CRD_NAME

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = [pytest.mark.envtest, pytest.mark.helm]

CHART = str(Path(__file__).parents[2] / "helm" / "ballast")
SAMPLE = Path(__file__).parents[2] / "docs" / "samples" / "minimal.yaml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server for these tests alone, because the releases install and remove the CRD."""
    with control_plane(tmp_path_factory.mktemp("releases")) as plane:
        yield plane


class Release:
    """One release in one namespace."""

    def __init__(self, helm: Helm, cluster: ControlPlane) -> None:
        self._helm, self._cluster = helm, cluster

    def run(self, verb: str, *more: str, check: bool = True) -> str:
        """Run Helm, and return its errors."""
        more = (CHART, *more) if verb != "uninstall" else more
        where = ("-n", "system", "--kubeconfig", str(self._cluster.kubeconfig))
        return self._helm.run(verb, "ballast", *more, *where, check=check).stderr

    def get(self, *what: str) -> dict[str, Any]:
        return json.loads(self._cluster.kubectl("get", *what, "-n", "system", "-o", "json").stdout)

    @property
    def password(self) -> str:
        return base64.b64decode(self.get("secret", "ballast-redis")["data"]["password"]).decode()

    @property
    def address(self) -> str:
        return base64.b64decode(self.get("secret", "ballast-redis")["data"]["url"]).decode()

    @property
    def certificate(self) -> dict[str, str]:
        data = self.get("secret", "ballast-valkey-tls")["data"]
        return {key: base64.b64decode(text).decode() for key, text in data.items()}

    @property
    def ports(self) -> list[int]:
        """The ports of Valkey, which Service, pod and configuration agree on."""
        service = [each["port"] for each in self.get("service", "ballast-valkey")["spec"]["ports"]]
        (container,) = self.get("statefulset", "ballast-valkey")["spec"]["template"]["spec"]["containers"]
        config = self.get("configmap", "ballast-valkey")["data"]["valkey.conf"]
        served = [int(line.split()[1]) for line in config.splitlines() if line.split()[0] in {"port", "tls-port"}]

        assert service == [each["containerPort"] for each in container["ports"]] == [port for port in served if port]
        return service

    @property
    def hash_of_valkey(self) -> str:
        template = self.get("statefulset", "ballast-valkey")["spec"]["template"]
        return template["metadata"]["annotations"]["ballast.dev/config-hash"]


@pytest.fixture
def release(helm: Helm, cluster: ControlPlane) -> Iterator[Release]:
    cluster.kubectl("create", "namespace", "system", check=False)
    release = Release(helm, cluster)
    try:
        release.run("install", "--set", "operator.replicas=1")
        yield release
    finally:
        helm.run("uninstall", "ballast", "-n", "system", "--kubeconfig", str(cluster.kubeconfig), check=False)
        cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")


def test_an_upgrade_keeps_the_password_and_restarts_nothing(release: Release) -> None:
    password, hashed = release.password, release.hash_of_valkey

    release.run("upgrade", "--set", "operator.replicas=2")

    assert release.get("deployment", "ballast-operator")["spec"]["replicas"] == 2
    assert (release.password, release.hash_of_valkey) == (password, hashed)
    assert len(password) == 32


@pytest.mark.parametrize("name", ["nameOverride=last", "nameOverride=foo", "fullnameOverride=mine"])
def test_another_name_is_refused_before_anything_changes(release: Release, name: str) -> None:
    """Services would select no pod, Kubernetes refuses the Deployment, or a second, empty Valkey would start."""
    before = release.get("service", "ballast-valkey")

    said = release.run("upgrade", "--set", name, check=False)

    assert "nameOverride and fullnameOverride are for a new release only" in said
    assert 'Set nameOverride to "ballast" and fullnameOverride to "ballast"' in said
    assert release.get("service", "ballast-valkey") == before
    release.run("upgrade", "--set", "nameOverride=ballast,fullnameOverride=ballast")


def test_a_new_password_restarts_the_queue_with_it(release: Release) -> None:
    hashed = release.hash_of_valkey

    release.run("upgrade", "--set", "valkey.password=fresh")

    assert release.password == "fresh"
    assert release.hash_of_valkey != hashed


def test_a_password_changed_in_the_secret_is_taken_over_by_an_upgrade(release: Release, cluster: ControlPlane) -> None:
    hashed = release.hash_of_valkey
    changed = json.dumps({"stringData": {"password": "rotated"}})
    cluster.kubectl("patch", "secret", "ballast-redis", "-n", "system", "--type=merge", "-p", changed)

    release.run("upgrade")

    assert release.password == "rotated"
    assert release.hash_of_valkey != hashed


def test_an_upgrade_keeps_the_certificate_until_it_is_old(release: Release, cluster: ControlPlane) -> None:
    def age(days: float) -> None:
        secret = release.get("secret", "ballast-valkey-tls")
        secret["metadata"]["annotations"]["ballast.dev/made"] = f"{time.time() - days * 86400:.0f}"
        cluster.kubectl("apply", "--server-side", "--field-manager=helm", "-f", "-", manifest=secret)

    hashed, before = release.hash_of_valkey, release.certificate
    age(days=364)
    release.run("upgrade", "--set", "operator.replicas=2")
    kept = release.certificate
    age(days=366)
    release.run("upgrade")
    renewed = release.certificate
    release.run("upgrade")

    assert kept == before
    assert renewed == release.certificate, "the next upgrade keeps it"
    assert renewed["tls.crt"] != before["tls.crt"]
    assert renewed["ca.crt"].endswith(before["ca.crt"]), "clients trust both while they learn of it"
    assert renewed["ca.crt"].count("BEGIN CERTIFICATE") == 2
    assert release.hash_of_valkey == hashed, "Valkey takes it up without a restart"


def test_an_upgrade_to_tls_keeps_the_plain_port_until_the_next_upgrade(release: Release) -> None:
    release.run("upgrade", "--set", "valkey.tls.enabled=false")
    before = release.address, release.ports
    release.run("upgrade", "--reset-values")
    during = release.address, release.ports
    release.run("upgrade", "--reset-values")

    assert before == ("redis://ballast-valkey.system.svc:6379/0", [6379])
    assert during == ("rediss://ballast-valkey.system.svc:6380/0", [6379, 6380])
    assert (release.address, release.ports) == (during[0], [6380])


def test_a_valkey_of_an_older_commit_keeps_the_policy_of_its_pods(release: Release, cluster: ControlPlane) -> None:
    """No upgrade can change it."""
    found = release.get("statefulset", "ballast-valkey")
    assert found["spec"]["podManagementPolicy"] == "Parallel"
    found["spec"]["podManagementPolicy"] = "OrderedReady"
    for field in ("uid", "resourceVersion"):
        del found["metadata"][field]
    cluster.kubectl("delete", "statefulset", "ballast-valkey", "-n", "system")
    cluster.kubectl("apply", "--server-side", "--field-manager=helm", "-f", "-", manifest=found)

    release.run("upgrade", "--set", "valkey.image.tag=corrected")

    spec = release.get("statefulset", "ballast-valkey")["spec"]
    assert spec["podManagementPolicy"] == "OrderedReady"
    assert spec["template"]["spec"]["containers"][0]["image"].endswith(":corrected")


def test_resources_outlive_the_release_and_meet_the_next_one(release: Release, cluster: ControlPlane) -> None:
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD_NAME}", "--timeout=30s")
    cluster.kubectl("apply", "-n", "default", "-f", str(SAMPLE))

    release.run("uninstall")
    kept = json.loads(cluster.kubectl("get", "infd", "chat", "-n", "default", "-o", "json").stdout)
    release.run("install")

    again = json.loads(cluster.kubectl("get", "infd", "chat", "-n", "default", "-o", "json").stdout)
    assert again["metadata"]["uid"] == kept["metadata"]["uid"]
    assert again["spec"] == kept["spec"]


def test_everything_the_chart_can_make_is_taken_by_the_api_server_beside_another_release(
    release: Release, helm: Helm, cluster: ControlPlane
) -> None:
    values = ("crds.enabled=false", "grafana.dashboards.enabled=true", "valkey.persistence.enabled=false")
    sets = [part for value in values for part in ("--set", value)]

    where = ("-n", "system", "--kubeconfig", str(cluster.kubeconfig))
    try:
        helm.run("install", "second", CHART, *sets, *where)
        release.run("upgrade")
        made = json.loads(cluster.kubectl("get", "configmap,statefulset", "-n", "system", "-o", "json").stdout)["items"]
    finally:
        helm.run("uninstall", "second", *where, check=False)

    assert {each["metadata"]["name"] for each in made} >= {"second-ballast-dashboards", "second-ballast-valkey"}


@pytest.mark.usefixtures("release")
def test_the_operator_updates_its_own_lease_only(cluster: ControlPlane) -> None:
    account = ("-n", "system", "--as", "system:serviceaccount:system:ballast-operator")

    def may(verb: str, name: str = "") -> str:
        what = f"leases.coordination.k8s.io/{name}".removesuffix("/")
        return cluster.kubectl("auth", "can-i", verb, what, *account, check=False).stdout.strip()

    assert (may("create"), may("update", "ballast-operator")) == ("yes", "yes")
    assert (may("get", "another"), may("update", "another"), may("update")) == ("yes", "no", "no")


def adopt(helm: Helm, cluster: ControlPlane, release: str, where: tuple[str, ...]) -> None:
    """Let Helm adopt the definition, as the documentation describes for this version of Helm."""
    if "--take-ownership" in helm.run("install", "--help").stdout:
        helm.run("install", release, CHART, "--take-ownership", *where)
        return
    owner = (f"meta.helm.sh/release-name={release}", f"meta.helm.sh/release-namespace={where[1]}")
    cluster.kubectl("annotate", "--overwrite", "crd", CRD_NAME, *owner)
    helm.run("install", release, CHART, *where)


def test_a_kept_definition_is_taken_over_by_a_release_of_another_name(
    release: Release, helm: Helm, cluster: ControlPlane
) -> None:
    release.run("uninstall")
    where = ("-n", "elsewhere", "--create-namespace", "--kubeconfig", str(cluster.kubeconfig))

    try:
        refused = helm.run("install", "third", CHART, *where, check=False)
        helm.run("uninstall", "third", *where[:2], *where[3:], check=False)
        adopt(helm, cluster, "third", where)
        labels = json.loads(cluster.kubectl("get", "crd", CRD_NAME, "-o", "json").stdout)["metadata"]["labels"]
    finally:
        helm.run("uninstall", "third", *where[:2], *where[3:], check=False)

    assert "invalid ownership metadata" in refused.stderr
    assert labels["app.kubernetes.io/instance"] == "third"
