"""The Deployment of worker pods. PURE."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import (
    HTTP_PORT,
    HTTP_PORT_NAME,
    METRICS_PORT,
    METRICS_PORT_NAME,
    config_map,
    pod_labels,
    selector,
)
from ballast_operator.children.backends import backend_of, environment, memory_request, num_ranks
from ballast_operator.children.config import (
    CONFIG_DIRECTORY,
    KEYS_DIRECTORY,
    REDIS_DIRECTORY,
    TLS_DIRECTORY,
    VERSION,
    file_name,
    redis_of,
)
from ballast_operator.children.files import (
    CACHE_DIRECTORY,
    FileSource,
    cache_mount,
    fetched_mount,
    file_mounts,
    file_volumes,
    is_cached,
    sources,
)
from ballast_operator.children.manifest import manifest
from ballast_operator.kinds import DEPLOYMENT, Body

WORKER = "worker"
FETCH = "fetch"
PROBE_SECONDS = 5
CPU_REQUEST = "250m"
"""CPU request if the template names no CPU. A pod without a request yields to every other pod of its node, and the GPU
then waits for the thread that starts its steps. The request is small, so that the pod fits on every node."""
LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
LOST_NODE_SECONDS = 30
"""Time until a pod on an unresponsive node is replaced. The default of Kubernetes is five minutes."""
NVIDIA_GPU = "nvidia.com/gpu"
"""The resource of NVIDIA's device plugin, and the taint that clouds and the GPU operator set on GPU nodes."""
FS_GROUP = 65532
"""Group of Ballast's image."""
SHARED_MEMORY_MEBIBYTES = 1024
"""Default size of the shared memory, for each GPU."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the pod's own


def deployment(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    """Return the Deployment with worker pods, which read the file of this version in the ConfigMap.

    They have `image` if the resource names none. `own_keys` is as in `redis_of`.
    """
    rollout = resource.spec.rollout
    labels = pod_labels(resource.metadata.name, resource.spec.served_name, resource.spec.template.labels)
    spec = {
        "replicas": resource.spec.replicas,
        "selector": {"matchLabels": selector(resource.metadata.name)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        # After this time the rollout counts as stuck. It is longer than the time of the startup probe.
        "progressDeadlineSeconds": resource.spec.startup_seconds + 2 * PROBE_SECONDS,
        "revisionHistoryLimit": 3,
        "template": {
            "metadata": {
                "labels": labels,
                "annotations": resource.spec.template.annotations | {VERSION: version},
            },
            "spec": worker_pod(resource, version, image=resource.spec.template.image or image, own_keys=own_keys),
        },
    }
    return manifest(DEPLOYMENT, resource, {"spec": spec})


def worker_pod(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    """Return the spec of a worker pod; see `deployment`."""
    template, seconds = resource.spec.template, resource.spec.rollout.drain_seconds + resource.spec.unready_seconds
    pod: Body = {
        "containers": [_worker(resource, version, image=image, own_keys=own_keys)],
        "volumes": [*_volumes(resource, own_keys=own_keys), *(volume.manifest() for volume in template.volumes)],
        "terminationGracePeriodSeconds": seconds + backend_of(resource).exit_seconds,
        "securityContext": _pod_security(resource),
    }
    fetched = [source for source in sources(resource) if source.is_fetched]
    if fetched:
        pod["initContainers"] = [_fetch(resource, source, image=image) for source in fetched]
    if resource.spec.backend == "vllm":
        # Kubernetes would set VLLM_PORT for a Service with the name `vllm`, and vLLM reads all variables VLLM_*.
        pod["enableServiceLinks"] = False
    if template.service_account_name is None:
        pod["automountServiceAccountToken"] = False
    claim = resource.spec.gpu.resource_claim_template
    if claim is not None:
        pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": claim}]
    passed: Body = {
        "serviceAccountName": template.service_account_name,
        "nodeSelector": template.node_selector,
        "tolerations": tolerations(resource),
        "affinity": template.affinity,
        "topologySpreadConstraints": _spread(resource),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in template.image_pull_secrets],
    }
    return pod | {name: value for name, value in passed.items() if value}


def _pod_security(resource: InferenceDeployment) -> Body:
    """Return the security context. Claims belong to root, unless the kubelet gives them to a group of the pod."""
    context: Body = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    group = resource.spec.template.fs_group
    if group is None and resource.spec.model.cache is not None:
        group = FS_GROUP
    if group is not None:
        # The default policy visits every file at every start of a pod, which takes minutes for a full cache.
        context |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def tolerations(resource: InferenceDeployment) -> list[Body]:
    """Return the tolerations of the template, and the operator's own for taints that the template does not name."""
    given = resource.spec.template.tolerations
    own: list[Body] = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for taint in LOST_NODE_TAINTS
    ]
    if resource.spec.gpu.count > 0:
        name = resource.spec.gpu.resource_name or NVIDIA_GPU
        taint = NVIDIA_GPU if name.startswith("nvidia.com/") else name  # nodes with MIG slices have NVIDIA's taint
        own.insert(0, {"key": taint, "operator": "Exists", "effect": "NoSchedule"})
    named = {(each.key, each.effect) for each in given}
    return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in given] + [
        each
        for each in own
        # A toleration without a key matches every taint, and one without an effect matches every effect.
        if not named & {(key, effect) for key in (each["key"], None) for effect in (each["effect"], None)}
    ]


def _spread(resource: InferenceDeployment) -> list[Body]:
    given = resource.spec.template.topology_spread_constraints
    if given is not None:
        return list(given)
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(resource.metadata.name)},
            "matchLabelKeys": ["pod-template-hash"],  # during a rollout, pods of the old version do not count
        }
    ]


def _worker(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    arguments = ["--config", f"{CONFIG_DIRECTORY}/{file_name(version)}", "--log-format", "json"]
    return _container(resource, WORKER, image=image) | {
        "command": [backend_of(resource).command],
        "args": arguments,
        "ports": list(_ports(resource)),
        "env": [
            # The operator matches the status of a worker to its pod by this address.
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *_environment(resource, environment(resource)),
        ],
        "volumeMounts": [*_mounts(resource, own_keys=own_keys), *resource.spec.template.volume_mounts],
        "resources": _worker_resources(resource),
        "startupProbe": _probe(resource, "/ready", failures=math.ceil(resource.spec.startup_seconds / PROBE_SECONDS)),
        "readinessProbe": _probe(resource, "/ready", failures=1),
        "livenessProbe": _probe(resource, "/health", failures=6),
    }


def _ports(resource: InferenceDeployment) -> Iterator[Body]:
    yield {"name": HTTP_PORT_NAME, "containerPort": HTTP_PORT, "protocol": "TCP"}
    if resource.spec.network.metrics_from:
        yield {"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"}


def _fetch(resource: InferenceDeployment, source: FileSource, *, image: str) -> Body:
    """Return the init container that fetches the files of a source."""
    model = resource.spec.model
    is_model = source.name == "model"
    command = ["ballast", "fetch", source.uri, source.path]
    if is_model and model.revision and model.uri.startswith("hf://"):
        command += ["--revision", model.revision]  # elsewhere it is only a name for the weights
    if source.is_adapter:
        command.append("--adapter")
    mounts = [fetched_mount(resource), {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - the pod's own
    if is_cached(resource):
        command += ["--cache", CACHE_DIRECTORY]
        mounts.append(cache_mount(resource))
    container = _container(resource, FETCH if is_model else f"{FETCH}-{source.name}", image=image) | {
        "command": command,
        "env": _environment(resource),
        "volumeMounts": [*mounts, *resource.spec.template.volume_mounts],
        "resources": _fetch_resources(resource),
    }
    if model.credentials_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret}}]
    return container


def _container(resource: InferenceDeployment, name: str, *, image: str) -> Body:
    """Return what both containers have."""
    policy = resource.spec.template.image_pull_policy
    return {
        "name": name,
        "image": image,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log line becomes a condition
        **({"imagePullPolicy": policy} if policy is not None else {}),
    }


def _environment(resource: InferenceDeployment, own: Sequence[Body] = ()) -> list[Body]:
    """Return the operator's own variables that the template does not name, and those of the template."""
    given = [env.model_dump(mode="json", by_alias=True, exclude_none=True) for env in resource.spec.template.env]
    named = {each["name"] for each in given}
    home = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - the pod's own, the root is read-only
    return [*(each for each in (home, *own) if each["name"] not in named), *given]


def _volumes(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> Iterator[Body]:
    spec = resource.spec
    yield {"name": "config", "configMap": {"name": config_map(resource.metadata.name)}}
    yield {"name": "tmp", "emptyDir": {}}
    if _has_shared_memory(resource):
        limit = spec.template.shared_memory_mebibytes or num_ranks(resource) * SHARED_MEMORY_MEBIBYTES
        yield {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{limit}Mi"}}
    redis = redis_of(resource, own_keys=own_keys)
    if redis is not None:
        yield {"name": "redis", "secret": {"secretName": redis.secret_name}}
    if spec.api_keys is not None:
        yield {"name": "api-keys", "secret": {"secretName": spec.api_keys.secret_name}}
    if spec.network.tls_secret is not None:
        yield {"name": "tls", "secret": {"secretName": spec.network.tls_secret}}
    yield from file_volumes(resource)


def _mounts(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> Iterator[Body]:
    yield {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True}
    yield {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - the pod's own
    if _has_shared_memory(resource):
        yield {"name": "shared-memory", "mountPath": SHARED_MEMORY}
    if redis_of(resource, own_keys=own_keys) is not None:
        yield {"name": "redis", "mountPath": REDIS_DIRECTORY, "readOnly": True}
    if resource.spec.api_keys is not None:
        yield {"name": "api-keys", "mountPath": KEYS_DIRECTORY, "readOnly": True}
    if resource.spec.network.tls_secret is not None:
        yield {"name": "tls", "mountPath": TLS_DIRECTORY, "readOnly": True}
    yield from file_mounts(resource)


def _resources(resource: InferenceDeployment) -> Body:
    """Return the requests and limits of the template. Kubernetes takes the larger of both containers, not the sum."""
    asked = resource.spec.template.resources
    requests = dict(asked.requests)
    if "cpu" not in requests | asked.limits:  # a limit alone is also the request
        requests["cpu"] = CPU_REQUEST
    memory = memory_request(resource)
    if memory is not None and "memory" not in requests | asked.limits:
        requests["memory"] = memory
    return {name: values for name, values in (("requests", requests), ("limits", dict(asked.limits))) if values}


def _fetch_resources(resource: InferenceDeployment) -> Body:
    """Return the resources of the container that fetches, which uses no GPU.

    A stored resource may have one in its template. The pod would hold that many, and the worker uses `gpu.count`.
    """
    found: Body = {}
    for field, values in _resources(resource).items():
        without = {name: value for name, value in values.items() if not resource.spec.is_gpu(name)}
        found |= {field: without} if without else {}
    return found


def _worker_resources(resource: InferenceDeployment) -> Body:
    gpu, resources = resource.spec.gpu, _resources(resource)
    if gpu.resource_claim_template is not None:
        resources["claims"] = [{"name": "gpu"}]
    elif gpu.count > 0:
        resources["limits"] = resources.get("limits", {}) | {gpu.resource_name or NVIDIA_GPU: str(gpu.count)}
    return resources


def _probe(resource: InferenceDeployment, path: str, *, failures: int) -> Body:
    scheme = {"scheme": "HTTPS"} if resource.spec.network.tls_secret is not None else {}
    return {
        "httpGet": {"path": path, "port": HTTP_PORT_NAME} | scheme,
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": PROBE_SECONDS,
        "failureThreshold": failures,
    }


def _has_shared_memory(resource: InferenceDeployment) -> bool:
    """Return false if the template mounts its own volume there. Kubernetes refuses two mounts at one path."""
    paths = (mount.get("mountPath") for mount in resource.spec.template.volume_mounts)
    return all(str(path).rstrip("/") != SHARED_MEMORY for path in paths)
