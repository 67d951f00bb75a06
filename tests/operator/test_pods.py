"""Worker pods: their volumes, their two containers, and their place in the cluster. What fields give other children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane
from resources import make_resource

from ballast_api.errors import InvalidConfig
from ballast_api.names import OWN_VOLUMES
from ballast_operator.children.config import worker_config
from ballast_operator.children.monitoring import service_monitor
from ballast_operator.children.pods import CPU_REQUEST, LOST_NODE_TAINTS, deployment
from ballast_operator.children.service import service
from ballast_operator.context import OperatorContext
from ballast_operator.inference_deployment import plan
from ballast_operator.named_secrets import named_secrets
from ballast_operator.plan import ClusterSnapshot

FETCHED = "hf://a/b"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gpu-cluster.md"
TEMPLATE = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}}}
SHARED: dict[str, Any] = {"uri": FETCHED, "cache": {"persistentVolumeClaim": {"claimName": "models"}}}
PER_POD: dict[str, Any] = {"uri": FETCHED, "cache": {"volumeClaimTemplate": TEMPLATE}}
OF_THE_NODE: dict[str, Any] = {"uri": FETCHED, "cachePath": "/var/cache/ballast"}


def pod(model: dict[str, Any] | None = None, *, is_stored: bool = False, **spec: Any) -> dict[str, Any]:
    resource = make_resource(is_stored=is_stored, model=model or {"uri": FETCHED}, **spec)
    made: dict[str, Any] = deployment(resource, "v", image="worker:1", own_keys=frozenset({"url"}))
    return dict(made["spec"]["template"]["spec"])


def volume(made: dict[str, Any], name: str) -> Any:
    """Return the source of a volume, or None if the pod has no such volume."""
    found = [each for each in made["volumes"] if each["name"] == name]
    return {key: value for key, value in found[0].items() if key != "name"} if found else None


def mounts(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return volume and write access by path."""
    return {each["mountPath"]: (each["name"], not each.get("readOnly")) for each in container["volumeMounts"]}


def test_environment_and_volume_mounts_of_the_template_reach_both_containers() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    mount = {"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True}
    made = pod(
        template={"env": [proxy], "volumes": [{"name": "ca", "configMap": {"name": "ca"}}], "volumeMounts": [mount]}
    )

    for container in (*made["containers"], *made["initContainers"]):
        assert proxy in container["env"]
        assert mount in container["volumeMounts"]
    assert volume(made, "ca") == {"configMap": {"name": "ca"}}


def test_the_fetch_container_has_the_resources_of_the_worker_without_the_gpu() -> None:
    made = pod(template={"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "16Gi"}}})
    (worker,), (fetch,) = made["containers"], made["initContainers"]

    assert fetch["resources"] == {"requests": {"memory": "8Gi", "cpu": CPU_REQUEST}, "limits": {"memory": "16Gi"}}
    assert worker["resources"]["requests"] == fetch["resources"]["requests"]
    assert worker["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "1"}


STORED_GPUS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPUs": ({"limits": {"nvidia.com/gpu": 4, "rdma/hca": 1}}, {"nvidia.com/gpu": "1", "rdma/hca": 1}),
    "a slice": ({"limits": {"nvidia.com/mig-1g.10gb": 1, "rdma/hca": 1}},
                {"nvidia.com/mig-1g.10gb": 1, "nvidia.com/gpu": "1", "rdma/hca": 1}),
    "a part of a GPU": ({"limits": {"nvidia.com/gpumem": 3000, "rdma/hca": 1}},
                        {"nvidia.com/gpumem": 3000, "rdma/hca": 1, "nvidia.com/gpu": "1"}),
}  # fmt: skip


@pytest.mark.parametrize("case", STORED_GPUS)
def test_the_fetch_container_of_a_stored_resource_has_no_gpu_and_its_worker_stays_as_it_was(case: str) -> None:
    resources, limits = STORED_GPUS[case]
    made = pod(is_stored=True, template={"resources": resources})
    (worker,), (fetch,) = made["containers"], made["initContainers"]
    kept = {name: number for name, number in resources["limits"].items() if not name.endswith(("/gpu", ".10gb"))}

    assert worker["resources"]["limits"] == limits
    assert fetch["resources"]["limits"] == kept
    assert worker["resources"]["requests"] == fetch["resources"]["requests"]


def test_the_fetch_container_has_none_of_the_resource_that_the_resource_names_for_its_gpu() -> None:
    resources = {"requests": {"example.com/gpu": 1}, "limits": {"example.com/gpu": 1}}
    made = pod(is_stored=True, gpu={"resourceName": "example.com/gpu"}, template={"resources": resources})

    assert made["initContainers"][0]["resources"] == {"requests": {"cpu": CPU_REQUEST, "memory": "4096Mi"}}


def test_each_volume_that_the_operator_adds_has_a_name_that_a_template_may_not_use() -> None:
    adapters = [{"name": "sql", "uri": "pvc://more/sql"}, {"name": "law", "uri": "hf://a/law"}]
    secrets: dict[str, Any] = {"redis": {"secretName": "r"}, "apiKeys": {"secretName": "k"}}
    made = [
        pod({"uri": "pvc://models/b", "adapters": adapters}, network={"tlsSecret": "t"}, **secrets),
        pod(SHARED),
        pod(OF_THE_NODE),
    ]
    names = {each["name"] for one in made for each in one["volumes"]}

    assert {name for name in names if name not in OWN_VOLUMES} == {"claim-0"}
    assert names >= set(OWN_VOLUMES)
    for name in names:
        with pytest.raises(InvalidConfig, match="the name of a volume that Ballast adds"):
            pod(template={"volumes": [{"name": name, "emptyDir": {}}]})


def test_a_volume_of_the_template_is_passed_on_as_it_was_written() -> None:
    claim = {"name": "own", "persistentVolumeClaim": {"claimName": "scratch", "readOnly": True}}
    other = {"name": "other", "csi": {"driver": "d", "volumeAttributes": {"aB_c": "1"}}}

    assert pod({"uri": "pvc://models/b"}, template={"volumes": [claim, other]})["volumes"][-2:] == [claim, other]


def test_a_shared_claim_is_written_by_the_fetch_and_read_by_the_worker() -> None:
    made = pod(SHARED)
    (worker,), (fetch,) = made["containers"], made["initContainers"]

    assert volume(made, "cache") == {"persistentVolumeClaim": {"claimName": "models"}}
    assert fetch["command"] == ["ballast", "fetch", FETCHED, "/models/model", "--cache", "/cache"]
    assert mounts(fetch)["/cache"] == ("cache", True)
    assert mounts(worker)["/cache"] == ("cache", False)


ON_THE_CLAIM_OF_THE_CACHE: dict[str, tuple[dict[str, Any], str, str]] = {
    "the model": ({"uri": "pvc://models/b", "adapters": [{"name": "sql", "uri": "hf://a/sql"}]}, "/models", "fetched"),
    "an adapter": (
        {"uri": FETCHED, "adapters": [{"name": "sql", "uri": "pvc://models/sql"}]},
        "/claims/models",
        "models",
    ),
}


@pytest.mark.parametrize("case", ON_THE_CLAIM_OF_THE_CACHE)
def test_a_claim_with_files_and_the_cache_is_one_volume(case: str) -> None:
    model, path, fetched = ON_THE_CLAIM_OF_THE_CACHE[case]
    made = pod(model | {"cache": SHARED["cache"]})
    (worker,), (fetch,) = made["containers"], made["initContainers"]
    claims = [each for each in made["volumes"] if "persistentVolumeClaim" in each]

    assert claims == [{"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}]
    assert mounts(fetch)["/cache"] == ("cache", True)
    assert mounts(worker)["/cache"] == mounts(worker)[path] == ("cache", False)
    assert volume(made, fetched) == {"emptyDir": {}}


def test_the_volumes_of_files_keep_their_order_so_that_an_upgrade_rolls_no_pods() -> None:
    uris = "hf://a/sql", "pvc://more/sql", "pvc://models/sql"
    adapters = [{"name": f"a{number}", "uri": uri} for number, uri in enumerate(uris)]
    made = pod({"uri": "pvc://models/b", "adapters": adapters, "cache": {"persistentVolumeClaim": {"claimName": "c"}}})

    assert [each["name"] for each in made["volumes"]][-4:] == ["models", "fetched", "claim-0", "cache"]


def test_a_claim_per_pod_holds_the_model_itself() -> None:
    made = pod(PER_POD)
    (worker,), (fetch,) = made["containers"], made["initContainers"]

    assert volume(made, "models") == {"ephemeral": {"volumeClaimTemplate": TEMPLATE}}
    assert volume(made, "cache") is None
    assert fetch["command"] == ["ballast", "fetch", FETCHED, "/models/model"]
    assert mounts(fetch)["/models"] == ("models", True)
    assert mounts(worker)["/models"] == ("models", False)


def test_of_a_directory_of_the_node_each_namespace_sees_its_own_part() -> None:
    made = pod(OF_THE_NODE)
    containers = [*made["initContainers"], *made["containers"]]
    parts = [each.get("subPath") for one in containers for each in one["volumeMounts"] if each["name"] == "cache"]

    assert volume(made, "cache") == {"hostPath": {"path": "/var/cache/ballast", "type": "DirectoryOrCreate"}}
    assert made["initContainers"][0]["command"][-2:] == ["--cache", "/cache"]
    assert parts == ["ns", "ns"]


def test_a_claim_is_mounted_whole_because_a_namespace_owns_it() -> None:
    containers = [*pod(SHARED)["initContainers"], *pod(SHARED)["containers"]]

    assert not [each for one in containers for each in one["volumeMounts"] if "subPath" in each]


def test_the_volume_of_a_fetched_model_has_the_size_limit_of_the_resource() -> None:
    limited = pod({"uri": FETCHED, "sizeLimitGibibytes": 80})

    assert volume(limited, "models") == {"emptyDir": {"sizeLimit": "80Gi"}}
    assert volume(pod(), "models") == {"emptyDir": {}}


GROUPS: dict[str, tuple[dict[str, Any], int | None]] = {
    "no claim": ({}, None),
    "a directory of the node": ({"model": OF_THE_NODE}, None),
    "a shared claim": ({"model": SHARED}, 65532),
    "a claim per pod": ({"model": PER_POD}, 65532),
    "a claim and a group of the template": ({"model": SHARED, "template": {"fsGroup": 2000}}, 2000),
    "a group of the template alone": ({"template": {"fsGroup": 0}}, 0),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_pod_that_writes_to_a_claim_has_a_group_for_it(case: str) -> None:
    spec, group = GROUPS[case]
    context = pod(**spec)["securityContext"]

    assert context.get("fsGroup") == group
    assert ("fsGroupChangePolicy" in context) == (group is not None)


def test_shared_memory_is_limited() -> None:
    made = pod(template={"sharedMemoryMebibytes": 512})

    assert volume(made, "shared-memory") == {"emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}}
    assert mounts(made["containers"][0])["/dev/shm"] == ("shared-memory", True)


def test_a_mount_of_the_template_replaces_the_shared_memory() -> None:
    own = {"name": "dshm", "mountPath": "/dev/shm/"}
    made = pod(template={"volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}], "volumeMounts": [own]})

    assert volume(made, "shared-memory") is None
    assert [each["name"] for each in made["containers"][0]["volumeMounts"] if "shm" in each["mountPath"]] == ["dshm"]


def test_pods_spread_over_nodes_unless_the_template_has_constraints() -> None:
    (spread,) = pod()["topologySpreadConstraints"]
    zones = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}

    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "llm"
    assert pod(template={"topologySpreadConstraints": [zones]})["topologySpreadConstraints"] == [zones]
    assert "topologySpreadConstraints" not in pod(template={"topologySpreadConstraints": []})


def test_pods_have_the_annotations_for_a_node_autoscaler_that_the_page_names() -> None:
    section = PAGE.read_text().partition("## With a node autoscaler")[2]
    documented = yaml.safe_load(section.partition("```yaml")[2].partition("```")[0])["spec"]
    made = deployment(make_resource(**documented), "v", image="worker:1", own_keys=frozenset())["spec"]

    assert len(documented["template"]["annotations"]) == 2
    assert documented["template"]["annotations"].items() <= made["template"]["metadata"]["annotations"].items()
    assert "topologySpreadConstraints" not in made["template"]["spec"]


def taint(key: str) -> dict[str, str]:
    return {"key": key, "operator": "Exists", "effect": "NoSchedule"}


TOLERATED: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "a GPU": ({}, [taint("nvidia.com/gpu")]),
    "the CPU": ({"gpu": {"count": 0}}, []),
    "a slice": ({"gpu": {"resourceName": "nvidia.com/mig-3g.40gb"}}, [taint("nvidia.com/gpu")]),
    "another vendor": ({"gpu": {"resourceName": "amd.com/gpu"}}, [taint("amd.com/gpu")]),
    "a claim": ({"gpu": {"resourceClaimTemplate": "gpu"}}, [taint("nvidia.com/gpu")]),
    "the template has it": (
        {"template": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
        [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    ),
    "the template has another effect": (
        {"template": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}]}},
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, taint("nvidia.com/gpu")],
    ),
}


@pytest.mark.parametrize("case", TOLERATED)
def test_the_taint_of_gpu_nodes_is_tolerated(case: str) -> None:
    spec, expected = TOLERATED[case]
    found = [each for each in pod(**spec)["tolerations"] if each["key"] not in LOST_NODE_TAINTS]

    assert found == expected


ADAPTERS = [{"name": "a", "uri": "hf://a/a"}, {"name": "c", "uri": "pvc://b/c"}]
DRAFT = {"method": "draftModel", "draftUri": "hf://a/draft"}
RESTRICTED: dict[str, tuple[dict[str, Any], bool]] = {
    "an emptyDir": ({"model": {"uri": FETCHED, "sizeLimitGibibytes": 80}}, True),
    "a shared claim": ({"model": SHARED}, True),
    "a claim per pod": ({"model": PER_POD}, True),
    "a claim in place": ({"model": {"uri": "pvc://models/b"}}, True),
    "adapters and a draft model on several GPUs": (
        {"model": {"uri": FETCHED, "adapters": ADAPTERS}, "gpu": {"count": 8}, "engine": {"speculative": DRAFT}},
        True,
    ),
    "a directory of the node": ({"model": OF_THE_NODE}, False),
}


@pytest.mark.envtest
@pytest.mark.parametrize("case", RESTRICTED)
def test_a_restricted_namespace_admits_pods_without_a_directory_of_the_node(
    plane: ControlPlane, namespace: str, case: str
) -> None:
    spec, is_admitted = RESTRICTED[case]
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    made = pod(**spec) | {"automountServiceAccountToken": False}
    body = {"metadata": {"name": "llm"}, "spec": made}

    answer = plane.http.post(
        f"/api/v1/namespaces/{namespace}/pods", params={"dryRun": "All", "fieldValidation": "Strict"}, json=body
    ).json()

    assert (answer["kind"] == "Pod") == is_admitted, answer.get("message")
    assert is_admitted or "hostPath" in answer["message"]


def test_a_certificate_makes_probes_scrapes_and_the_address_https() -> None:
    def made(**network: Any) -> tuple[Any, Any, Any, set[str]]:
        resource = make_resource(network=network)
        pod = deployment(resource, "v", image="worker:1", own_keys=frozenset())["spec"]["template"]["spec"]
        monitor = service_monitor(resource)
        assert monitor is not None
        protocols = {port["appProtocol"] for port in service(resource)["spec"]["ports"]}
        return resource, pod["containers"][0], monitor["spec"]["endpoints"][0], protocols

    resource, worker, endpoint, protocols = made(tlsSecret="certificate", metricsFrom=ROUTER)
    _, plain_worker, plain_endpoint, plain_protocols = made(metricsFrom=ROUTER)
    probes = ("startupProbe", "readinessProbe", "livenessProbe")

    assert {worker[probe]["httpGet"]["scheme"] for probe in probes} == {"HTTPS"}
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "llm.ns.svc")
    assert "certificate" in named_secrets(resource)
    assert not [probe for probe in probes if "scheme" in plain_worker[probe]["httpGet"]]
    assert "scheme" not in plain_endpoint
    assert (protocols, plain_protocols) == ({"https"}, {"http"})


ROUTER = [{"podSelector": {"matchLabels": {"app": "router"}}}]
FIELDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "image": ({"template": {"image": "worker:2"}}, lambda made: made["container"]["image"], "worker:2"),
    "replicas": ({"replicas": 3}, lambda made: made["Deployment"]["spec"]["replicas"], 3),
    "slo": ({"slo": {"ttftMilliseconds": 250}}, lambda made: made["config"]["slo"]["ttftMilliseconds"], 250.0),
    "slots": ({"slots": 7}, lambda made: made["config"]["slots"], 7),
    "tenants": (
        {"offline": {"tenants": [{"name": "blue", "weight": 3}]}},
        lambda made: [tenant["name"] for tenant in made["config"]["offline"]["tenants"]],
        ["blue"],
    ),
    "drain": ({"rollout": {"drainSeconds": 90}}, lambda made: made["pod"]["terminationGracePeriodSeconds"], 110),
    "time to leave a load balancer": (
        {"rollout": {"unreadySeconds": 45}},
        lambda made: [made["pod"]["terminationGracePeriodSeconds"], made["config"]["runtime"]["unreadySeconds"]],
        [90, 45.0],
    ),
    "evictions": (
        {"disruption": {"maxUnavailable": 2}},
        lambda made: made["PodDisruptionBudget"]["spec"]["maxUnavailable"],
        2,
    ),
    "peers": (
        {"network": {"ingressFrom": ROUTER}},
        lambda made: made["NetworkPolicy"]["spec"]["ingress"][0]["from"],
        ROUTER,
    ),
    "metrics with tenants": (
        {"network": {"metricsFrom": ROUTER}},
        lambda made: [
            made["config"]["runtime"]["metricsPort"],
            [port["name"] for port in made["Service"]["spec"]["ports"]],
            [port["containerPort"] for port in made["container"]["ports"]],
            made["NetworkPolicy"]["spec"]["ingress"][1:],
        ],
        [8001, ["http", "metrics"], [8000, 8001], [{"ports": [{"port": 8001, "protocol": "TCP"}], "from": ROUTER}]],
    ),
    "no policy": ({"network": {"policy": False}}, lambda made: made.get("NetworkPolicy"), None),
    "keys": (
        {"apiKeys": {"secretName": "keys"}},
        lambda made: made["config"]["runtime"]["apiKeysFile"],
        "/etc/ballast/keys/keys.yaml",
    ),
    "no word of the CPU": (
        {"template": {"resources": {"requests": {"memory": "4Gi"}}}},
        lambda made: made["container"]["resources"],
        {"requests": {"cpu": "250m", "memory": "4Gi"}},
    ),
    # Kubernetes takes a limit for the request where there is none, in a pod and not yet in its Deployment.
    "CPU limited": (
        {"template": {"resources": {"limits": {"cpu": "2"}}}},
        lambda made: made["container"]["resources"],
        {"limits": {"cpu": "2"}},
    ),
    "CPU requested": (
        {"template": {"resources": {"requests": {"cpu": "2"}}}},
        lambda made: made["container"]["resources"],
        {"requests": {"cpu": "2"}},
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_gives_a_child_its_value(case: str) -> None:
    spec, found, expected = FIELDS[case]
    resource = make_resource(**({"gpu": {"count": 0}} | spec))
    steps = plan(resource, ClusterSnapshot("u-1"), OperatorContext(image="worker:1")).apply
    made: dict[str, Any] = {step.key.kind.name: step.manifest for step in steps}
    made["pod"] = made["Deployment"]["spec"]["template"]["spec"]
    (made["container"],) = made["pod"]["containers"]
    made["config"] = worker_config(resource, own_keys=frozenset()).model_dump(mode="json", by_alias=True)

    assert found(made) == expected
