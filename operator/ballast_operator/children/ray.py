"""The RayService of a resource that runs on Ray, and the policy of its head. PURE.

KubeRay makes a Ray cluster of it: a head without GPUs, and a pod for each worker (or for each node of a worker). Serve
then starts a replica in each worker pod, which serves the same port as a plain pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import MANAGED_BY_LABEL, OPERATOR, RAY_HEAD_LABEL, RAY_LABEL, pod_labels
from ballast_api.ray import RayRuntime
from ballast_api.serve_config import serve_config
from ballast_api.worker_config import WorkerConfig
from ballast_operator.children.gcs import options
from ballast_operator.children.manifest import beside_workers, manifest
from ballast_operator.children.pods import NVIDIA_GPU, tolerations, worker_pod
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import NETWORK_POLICY, RAY_CLUSTER, RAY_SERVICE, SERVICE, Body, Key
from ballast_operator.plan import ClusterSnapshot, Resize, is_live

RAY_VERSION = "2.60.0"
GROUP = "workers"
HEAD = {"requests": {"cpu": "500m", "memory": "2Gi"}}
MOST_PODS = 160_000
"""`maxReplicas`, which limits nothing: the operator decides the number of pods."""
OBJECT_STORE_BYTES = "100000000"
"""Ray would reserve a third of the memory for objects that pass between its processes. No request passes there."""
NO_LOGS = {"include-log-monitor": "false"}
"""Ray would send every line of its logs to drivers, and there are none."""
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # a record of each call between Serve and a replica, without a reader
    "RAY_worker_niceness": "0",  # Ray would run replicas with the niceness 15, below its own agents
    # Ray would kill the replica if 95 % of the pod's memory is used, or of the node's if the pod has no limit.
    "RAY_memory_monitor_refresh_ms": "0",
}
DELETION_SECONDS = 5
"""How long KubeRay keeps a Ray cluster that was replaced. Its pods drain, so there is nothing else to wait for."""
CLUSTER_LABEL = "ray.io/cluster"
"""Label that KubeRay sets on each pod: the name of the Ray cluster."""
TAINTED = "DeletionByTaintManager"
"""Reason of a pod's condition `DisruptionTarget` when its node is lost."""
DASHBOARD_PORT = 8265
KUBERAY = {"app.kubernetes.io/component": "kuberay-operator"}
"""Labels of the pods of KubeRay, which configures Serve through the dashboard of the head."""


def ray_service(resource: InferenceDeployment, text: str, context: OperatorContext) -> Body:
    """Return the RayService of workers with the configuration `text`.

    KubeRay does not pass a change of `replicas` on to a Ray cluster that exists: see `resize`.
    """
    ray = resource.spec.runtime.ray
    assert ray is not None, "the caller checked it"
    config = WorkerConfig.parse(text, resource.metadata.name)
    serve = serve_config(config, text, replicas=resource.spec.replicas, gpus=resource.spec.gpu.count)
    cluster: Body = {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": "0",
                "num-gpus": "0",
                "dashboard-host": context.any_host,  # KubeRay calls it, and the policy admits no other client
                "object-store-memory": OBJECT_STORE_BYTES,
                **NO_LOGS,
            },
            "template": _head(resource, ray, context),
        },
        "workerGroupSpecs": [
            {
                "groupName": GROUP,
                "replicas": resource.spec.replicas * ray.nodes,
                "minReplicas": 0,
                "maxReplicas": MOST_PODS,
                "rayStartParams": {
                    "num-cpus": "1",
                    "num-gpus": str(resource.spec.gpu.count),
                    "object-store-memory": OBJECT_STORE_BYTES,
                    **NO_LOGS,
                },
                "template": _worker(resource, context),
            }
        ],
    }
    storage = options(resource, context)
    if storage is not None:
        cluster["gcsFaultToleranceOptions"] = storage
    spec = {
        "serveConfigV2": yaml.safe_dump(serve, sort_keys=False),
        "rayClusterConfig": cluster,
        "rayClusterDeletionDelaySeconds": DELETION_SECONDS,
    }
    return manifest(RAY_SERVICE, resource, {"spec": spec})


def resize(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> Iterator[Resize]:
    """Yield the change of a Ray cluster that has, by the status of KubeRay, another number of pods than it should.

    It is the Ray cluster that starts, if there is one: Serve in it waits for all replicas, and KubeRay moves to it only
    then. It only grows. The Ray cluster that serves also shrinks: a pod goes after Serve has ended its replica, because
    a pod without a replica is not ready. KubeRay 1.6 counts a pod until it is gone, and the pod of a lost node stays
    until its node is back. So it is added.

    The status follows late, and may not have the number until Serve runs. So the write reads the Ray cluster first.
    """
    ray, found = resource.spec.runtime.ray, snapshot.child(RAY_SERVICE, resource.metadata)
    if ray is None or found is None:
        return
    status = found.get("status") or {}
    pending = status.get("pendingServiceStatus") or {}
    is_starting = bool(pending.get("rayClusterName"))
    cluster = pending if is_starting else status.get("activeServiceStatus") or {}
    name = cluster.get("rayClusterName")
    if not name:
        return
    asked = int((cluster.get("rayClusterStatus") or {}).get("desiredWorkerReplicas") or 0)
    pods = [pod for pod in snapshot.pods if cluster_of(pod) == name]
    wanted = resource.spec.replicas * ray.nodes + sum(map(_is_lost, pods))
    leaving: list[str] = []
    if asked > wanted and not is_starting:
        # The status follows late: `asked` may still contain a pod that has left.
        live = [pod for pod in pods if is_live(pod)]
        most = max(0, min(asked - wanted, len(live) - resource.spec.replicas * ray.nodes))
        leaving = _last(live, ray)[:most]
        wanted = asked - len(leaving)
    if asked < wanted or leaving:
        because = f"Changed the Ray cluster {name} to {wanted} worker pods"
        key, owner = Key(RAY_CLUSTER, resource.metadata.namespace, name), found["metadata"]["uid"]
        yield Resize(key, owner, wanted, tuple(leaving), because)


def services_of_kuberay(child: Key) -> tuple[Key, ...]:
    """Return the Services that KubeRay makes for a RayService. It changes those that exist, whoever owns them."""
    if child.kind != RAY_SERVICE:
        return ()
    return tuple(Key(SERVICE, child.namespace, f"{child.name}-{name}-svc") for name in ("head", "serve"))


def cluster_of(pod: Body) -> str | None:
    """Return the name of the Ray cluster of a pod."""
    labels: dict[str, str] = pod["metadata"].get("labels") or {}
    return labels.get(CLUSTER_LABEL)


def is_ray_pod(pod: Body) -> bool:
    """Return whether a worker pod belongs to a Ray cluster."""
    return RAY_LABEL in (pod["metadata"].get("labels") or {})


def is_ready(pod: Body) -> bool:
    """Return whether a pod is ready."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _last(pods: Sequence[Body], ray: RayRuntime) -> list[str]:
    """Return the names of the pods that may leave a Ray cluster, beginning with the first to go.

    Of a worker over several pods only one is ever ready. The newest go: after a lost node is back, they do nothing.
    """
    if ray.nodes == 1:
        return sorted(pod["metadata"]["name"] for pod in pods if not is_ready(pod))
    newest = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return [pod["metadata"]["name"] for pod in newest]


def _is_lost(pod: Body) -> bool:
    """Return whether Kubernetes deletes a pod because of its node, which may be unable to end it."""
    conditions = pod.get("status", {}).get("conditions") or ()
    reasons = (each.get("reason") for each in conditions if each.get("type") == "DisruptionTarget")
    return "deletionTimestamp" in pod["metadata"] and TAINTED in reasons


def _worker(resource: InferenceDeployment, context: OperatorContext) -> Body:
    """Return the template of a worker pod. KubeRay adds the command that starts Ray."""
    image = resource.spec.template.image or context.image_of(resource)
    pod = worker_pod(resource, "", image=image, own_keys=context.redis_keys)
    (container,) = pod["containers"]
    for field in ("command", "args", "startupProbe", "livenessProbe"):
        del container[field]
    # KubeRay adds a liveness probe of Ray itself. Serve replaces a replica that does not work.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["python3", "-m", "ballast_serve.leave"]}}}
    named = {each["name"] for each in container["env"]}
    own = [each for each in _variables() if each["name"] not in named]
    container["env"] = [*container["env"], *own, {"name": "BALLAST_RAY_POD", "value": "1"}]
    labels = pod_labels(resource.metadata.name, resource.spec.served_name, resource.spec.template.labels)
    labels |= {RAY_LABEL: resource.metadata.name}
    return {"metadata": {"labels": labels, "annotations": dict(resource.spec.template.annotations)}, "spec": pod}


def _head(resource: InferenceDeployment, ray: RayRuntime, context: OperatorContext) -> Body:
    """Return the template of the head, which runs no replica."""
    image = resource.spec.template.image or context.image_of(resource)
    pod = worker_pod(resource, "", image=image, own_keys=frozenset())
    (container,) = pod["containers"]
    asked = {name: dict(values) for name, values in (("requests", ray.head.requests), ("limits", ray.head.limits))}
    kept = {name: container[name] for name in ("image", "securityContext", "imagePullPolicy") if name in container}
    container = kept | {
        "name": "head",
        "env": [{"name": "HOME", "value": "/tmp"}, *_variables()],  # noqa: S108 - the pod's own
        "resources": {name: values for name, values in asked.items() if values} or HEAD,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - the pod's own
    }
    head: Body = {
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "securityContext": pod["securityContext"],
        "automountServiceAccountToken": False,
    }
    labels = {RAY_LABEL: resource.metadata.name, RAY_HEAD_LABEL: resource.metadata.name}
    labels |= {"app.kubernetes.io/part-of": "ballast", MANAGED_BY_LABEL: OPERATOR}  # the operator watches the head
    return {"metadata": beside_workers(resource, labels), "spec": head | placement(resource, ray)}


def placement(resource: InferenceDeployment, ray: RayRuntime) -> Body:
    """Return the fields of a pod that choose its node, for the head and for the Redis of its state.

    With GPUs, `nodeSelector` and `affinity` of the template choose nodes with GPUs, which these pods do not use.
    """
    template, has_gpus = resource.spec.template, resource.spec.gpu.count > 0
    gpu_taints = {NVIDIA_GPU, resource.spec.gpu.resource_name}
    found: Body = {
        "imagePullSecrets": [{"name": name} for name in template.image_pull_secrets],
        "tolerations": [each for each in tolerations(resource) if each.get("key") not in gpu_taints],
        "nodeSelector": ray.head.node_selector or ({} if has_gpus else template.node_selector),
        "affinity": {} if has_gpus else template.affinity,
        "priorityClassName": template.priority_class_name,
    }
    return {name: value for name, value in found.items() if value}


def _variables() -> list[Body]:
    return [{"name": name, "value": value} for name, value in VARIABLES.items()]


def head_policy(resource: InferenceDeployment) -> Body | None:
    """Return the policy of the head: its own workers, and KubeRay. None if policies are turned off."""
    if not resource.spec.network.policy:
        return None
    peers = {"podSelector": {"matchLabels": {RAY_LABEL: resource.metadata.name}}}
    kuberay = {"namespaceSelector": {}, "podSelector": {"matchLabels": KUBERAY}}
    spec = {
        "podSelector": {"matchLabels": {RAY_LABEL: resource.metadata.name}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [peers]},
            {"from": [kuberay], "ports": [{"port": DASHBOARD_PORT, "protocol": "TCP"}]},
        ],
    }
    return manifest(NETWORK_POLICY, resource, {"spec": spec}, name=policy_name(resource))


def policy_name(resource: InferenceDeployment) -> str:
    """Return the name of the policy of the head."""
    return f"{resource.metadata.name}-ballast-ray"
