"""What the owner of the cluster permits the pods of resources to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from operated import Cluster, running, until
from resources import make_resource

from ballast_operator.named_secrets import named_secrets
from ballast_operator.permitted import PodRules
from ballast_operator.settings import OperatorSettings

STRICT = PodRules(
    images=("registry.example/*:1",),
    service_accounts=("research/inference",),
    volumes=("emptyDir",),
    host_paths=("/var/cache/ballast/", "/models", "/srv"),
    cache_paths=("/cache/", "/srv/cache"),
)


def violations(rules: PodRules, *, model: dict[str, Any] | None = None, **template: Any) -> list[str]:
    model = {"uri": "hf://a/b"} | (model or {})
    return list(rules.violations(make_resource(namespace="research", model=model, template=template)))


def volume(kind: str, **content: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "x", kind: content}]}


PERMITTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an image": {"image": "registry.example/team/worker:1"},
    "an account": {"serviceAccountName": "inference"},
    "a volume": volume("emptyDir"),
    "a directory": volume("hostPath", path="/var/cache/ballast"),
    "what it contains": volume("hostPath", path="/models/a//b/../c"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"image": "elsewhere.example/worker:1"}, "allowedImages"),
    "an account": ({"serviceAccountName": "admin"}, "allowedServiceAccounts"),
    "a volume": (volume("nfs", server="s", path="/"), "allowedVolumes"),
    "a directory": (volume("hostPath", path="/etc"), "allowedHostPaths"),
    "a name that only begins alike": (volume("hostPath", path="/models-of-others"), "allowedHostPaths"),
    "a way out": (volume("hostPath", path="/models/../etc"), "allowedHostPaths"),
    "no path": (volume("hostPath"), "allowedHostPaths"),
    "a cache": (volume("hostPath", path="/srv/cache"), "allowedCachePaths"),
    "a part of a cache": (volume("hostPath", path="/srv/cache/other"), "allowedCachePaths"),
    "what contains a cache": (volume("hostPath", path="/srv"), "allowedCachePaths"),
    "two kinds": ({"volumes": [{"name": "x", "emptyDir": {}, "hostPath": {"path": "/etc"}}]}, "allowedHostPaths"),
}


@pytest.mark.parametrize("case", PERMITTED)
def test_what_the_rules_permit_is_accepted(case: str) -> None:
    template = PERMITTED[case]

    assert violations(STRICT, **template) == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_rules_do_not_permit_is_refused_with_the_setting(case: str) -> None:
    template, setting = REFUSED[case]
    (message,) = violations(STRICT, **template)

    assert setting in message


@pytest.mark.parametrize(
    ("path", "is_permitted"),
    [
        ("/cache", True),
        ("/cache/", True),
        ("/srv/x/../cache", True),
        ("/cache/other-namespace", False),
        ("/models", False),
        ("/etc", False),
        ("/cache/../etc", False),
    ],
)
def test_the_cache_of_a_node_needs_a_permitted_path(path: str, is_permitted: bool) -> None:
    assert bool(violations(STRICT, model={"cachePath": path})) != is_permitted


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "pvc://claim/m"},
        {"cache": {"persistentVolumeClaim": {"claimName": "claim"}}},
        {"cache": {"volumeClaimTemplate": {"spec": {}}}},
    ],
)
def test_a_claim_with_files_of_the_model_is_a_volume(model: dict[str, Any]) -> None:
    (message,) = violations(STRICT, model=model)

    assert "allowedVolumes" in message
    assert violations(PodRules(), model=model) == []


def test_no_mount_of_the_template_has_the_caches_of_all_namespaces() -> None:
    mount = {"volumeMounts": [{"name": "cache", "mountPath": "/all"}]}
    (message,) = violations(STRICT, model={"cachePath": "/cache"}, **mount)

    assert "has the parts of all namespaces" in message
    assert violations(STRICT, **mount) == []


def test_a_permitted_root_does_not_open_a_cache_behind_two_slashes() -> None:
    rules = PodRules(host_paths=("/",), cache_paths=("/srv/cache",))

    assert violations(rules, **volume("hostPath", path="/etc")) == []
    assert violations(rules, **volume("hostPath", path="//srv/cache/other"))


@pytest.mark.parametrize("label", ["ballast.dev/ray", "ray.io/cluster", "ray.io/node-type"])
def test_no_label_of_the_template_moves_a_pod_to_another_ray_cluster(label: str) -> None:
    (message,) = violations(PodRules(), labels={label: "theirs"})

    assert label in message
    assert violations(PodRules(), labels={"kueue.x-k8s.io/queue-name": "ours"}) == []


@pytest.mark.parametrize(
    "token", [{"serviceAccountToken": {"path": "token"}}, {"podCertificate": {"keyType": "ED25519"}}]
)
def test_a_token_of_the_default_account_needs_a_permitted_account(token: dict[str, Any]) -> None:
    volumes = volume("projected", sources=[{"configMap": {"name": "c"}}, token])
    (message,) = violations(PodRules(), **volumes)

    assert "allowedServiceAccounts" in message
    assert violations(PodRules(service_accounts=("research/default",)), serviceAccountName="default", **volumes) == []
    assert violations(PodRules(), **volume("projected", sources=[{"configMap": {"name": "c"}}])) == []


def test_by_default_no_account_no_path_of_the_node_and_no_driver_of_volumes_is_permitted() -> None:
    settings = OperatorSettings.read({"BALLAST_NAMESPACE": "n", "BALLAST_WORKER_IMAGE": "w"})

    assert settings.pod_rules == PodRules()
    assert violations(PodRules(), image="any/image") == []
    assert violations(PodRules(), serviceAccountName="default")
    assert violations(PodRules(), model={"cachePath": "/var/cache"})
    assert violations(PodRules(), **volume("hostPath", path="/"))
    driver = volume("csi", driver="secrets-store.csi.k8s.io", volumeAttributes={"secretProviderClass": "admin"})
    assert "allowedVolumes" in violations(PodRules(), **driver)[0], "the driver may act as the account `default`"
    assert violations(PodRules(volumes=("csi",)), **driver) == []


def test_a_csi_volume_names_no_secret_of_another_namespace() -> None:
    rules = PodRules(volumes=("*",))

    def found(namespace: str) -> list[str]:
        there = volume("csi", driver="smb.csi.k8s.io", volumeAttributes={"secretnamespace": namespace})
        assert named_secrets(make_resource(template=there)) == ()
        return violations(rules, **there)

    assert found("research") == found("") == []
    assert "the namespace theirs, and only research is permitted" in found("theirs")[0]


@pytest.mark.envtest
def test_a_resource_that_is_not_permitted_gets_no_pod_until_it_is(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    model = {"uri": "hf://a/b", "cachePath": "/etc"}
    with running(controllers.kubeconfig, tmp_path, BALLAST_ALLOWED_CACHE_PATHS="/var/cache"):
        cluster.make(model=model)
        assert "allowedCachePaths" in cluster.says("Degraded", "True", "NotPermitted")["message"]
        assert not cluster.list("deployments")
        cluster.patch("inferencedeployments", "llm", {"spec": {"model": {"cachePath": "/var/cache"}}})
        until(lambda: cluster.get("deployments", "llm"))
        cluster.says("Degraded", "False")


@pytest.mark.envtest
def test_pods_stay_when_a_change_is_not_permitted(controllers: ControlPlane, cluster: Cluster, tmp_path: Path) -> None:
    with running(controllers.kubeconfig, tmp_path):
        cluster.make()
        until(lambda: cluster.get("deployments", "llm"))
        cluster.patch("inferencedeployments", "llm", {"spec": {"template": {"serviceAccountName": "admin"}}})
        cluster.says("Degraded", "True", "NotPermitted")

    assert cluster.get("deployments", "llm")["metadata"]["generation"] == 1
