"""The Deployment of worker pods. PURE."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT, HTTP_PORT_NAME, config_map, pod_labels, selector
from ballast_api.pods import Toleration
from ballast_operator.children.config import (
    CACHE_DIRECTORY,
    CONFIG_DIRECTORY,
    KEYS_DIRECTORY,
    LEAVE_SECONDS,
    MODEL_DIRECTORY,
    REDIS_DIRECTORY,
    VERSION,
    file_name,
    model_path,
    redis_of,
)
from ballast_operator.children.manifest import manifest
from ballast_operator.kinds import DEPLOYMENT, Body

WORKER = "worker"
FETCH = "fetch"
PROBE_SECONDS = 5
SPARE_SECONDS = 15
"""Beyond draining, for what a process does at its end."""
CPU_REQUEST = "250m"
"""Where the template says nothing of the CPU. A pod that asks for none yields to every other on its node, and the GPU
then waits for the thread that begins its steps. Small, so that it keeps no pod off a node."""
LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
LOST_NODE_SECONDS = 30
"""Until a pod of a node that fell silent is replaced; Kubernetes' own default waits five minutes."""


def deployment(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    """Worker pods of one version.

    Args:
        resource: what is wanted.
        version: the file of the ConfigMap to run with.
        image: the worker's, where the resource names none.
        own_keys: keys of the Secret for resources that name no Redis; empty where the operator has none.
    """
    rollout = resource.spec.rollout
    labels = resource.spec.template.labels | pod_labels(resource.metadata.name, resource.spec.served_name)
    spec = {
        "replicas": resource.spec.replicas,
        "selector": {"matchLabels": selector(resource.metadata.name)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        # The Deployment's own patience, after which the rollout counts as stuck; above that of the startup probe.
        "progressDeadlineSeconds": rollout.startup_seconds + 2 * PROBE_SECONDS,
        "revisionHistoryLimit": 3,
        "template": {
            "metadata": {
                "labels": labels,
                "annotations": resource.spec.template.annotations | {VERSION: version},
            },
            "spec": _pod(resource, version, image=resource.spec.template.image or image, own_keys=own_keys),
        },
    }
    return manifest(DEPLOYMENT, resource, {"spec": spec})


def _pod(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    template = resource.spec.template
    pod: Body = {
        "containers": [_worker(resource, version, image=image, own_keys=own_keys)],
        "volumes": _volumes(resource, own_keys=own_keys) + list(template.volumes),
        "terminationGracePeriodSeconds": resource.spec.rollout.drain_seconds + LEAVE_SECONDS + SPARE_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if _is_fetched(resource):
        pod["initContainers"] = [_fetch(resource, image=image)]
    if template.service_account_name is None:
        pod["automountServiceAccountToken"] = False
    claim = resource.spec.gpu.resource_claim_template
    if claim is not None:
        pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": claim}]
    passed: Body = {
        "serviceAccountName": template.service_account_name,
        "nodeSelector": template.node_selector,
        "tolerations": _tolerations(template.tolerations),
        "affinity": template.affinity,
        "topologySpreadConstraints": list(template.topology_spread_constraints),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in template.image_pull_secrets],
    }
    return pod | {name: value for name, value in passed.items() if value}


def _tolerations(given: tuple[Toleration, ...]) -> list[Body]:
    """Those of the template, and for a lost node the operator's own where the template says nothing of it."""
    said = {each.key for each in given if each.effect in {None, "NoExecute"}}
    own = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for taint in LOST_NODE_TAINTS
        if not said & {taint, None}  # without a key: every taint
    ]
    return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in given] + own


def _worker(resource: InferenceDeployment, version: str, *, image: str, own_keys: frozenset[str]) -> Body:
    template = resource.spec.template
    container: Body = {
        "name": WORKER,
        "image": image,
        "command": ["ballast-worker"],
        "args": ["--config", f"{CONFIG_DIRECTORY}/{file_name(version)}", "--log-format", "json"],
        "ports": [{"name": HTTP_PORT_NAME, "containerPort": HTTP_PORT, "protocol": "TCP"}],
        "env": [
            # Set by hand and not through downward names alone, because status is matched to pods by this address.
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the pod's own, the root is read-only
            *(env.model_dump(mode="json", by_alias=True, exclude_none=True) for env in template.env),
        ],
        "volumeMounts": _mounts(resource, own_keys=own_keys) + list(template.volume_mounts),
        "resources": _resources(resource),
        "securityContext": _locked_down(),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # a sentence of the worker becomes a condition
        "startupProbe": _probe("/ready", failures=math.ceil(resource.spec.rollout.startup_seconds / PROBE_SECONDS)),
        "readinessProbe": _probe("/ready", failures=1),
        "livenessProbe": _probe("/health", failures=6),
    }
    if template.image_pull_policy is not None:
        container["imagePullPolicy"] = template.image_pull_policy
    return container


def _fetch(resource: InferenceDeployment, *, image: str) -> Body:
    """Brings the model into the pod before the worker starts."""
    model, template = resource.spec.model, resource.spec.template
    command = ["ballast", "fetch", model.uri, model_path(resource)]
    if model.revision and model.uri.startswith("hf://"):
        command += ["--revision", model.revision]  # elsewhere it only names the weights
    mounts = [{"name": "models", "mountPath": MODEL_DIRECTORY}, {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - the pod's own
    if model.cache_path is not None:
        command += ["--cache", CACHE_DIRECTORY]
        mounts.append({"name": "cache", "mountPath": CACHE_DIRECTORY})
    container: Body = {
        "name": FETCH,
        "image": image,
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - the pod's own, the root is read-only
        "volumeMounts": mounts,
        "securityContext": _locked_down(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if model.credentials_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret}}]
    if template.image_pull_policy is not None:
        container["imagePullPolicy"] = template.image_pull_policy
    return container


def _volumes(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> list[Body]:
    spec, parts = resource.spec, urlsplit(resource.spec.model.uri)
    volumes: list[Body] = [
        {"name": "config", "configMap": {"name": config_map(resource.metadata.name)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    redis = redis_of(resource, own_keys=own_keys)
    if redis is not None:
        volumes.append({"name": "redis", "secret": {"secretName": redis.secret_name}})
    if spec.api_keys is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": spec.api_keys.secret_name}})
    if parts.scheme == "pvc":
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": parts.netloc, "readOnly": True}})
    elif _is_fetched(resource):
        volumes.append({"name": "models", "emptyDir": {}})
    if spec.model.cache_path is not None:
        host = {"path": spec.model.cache_path, "type": "DirectoryOrCreate"}
        volumes.append({"name": "cache", "hostPath": host})
    return volumes


def _mounts(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> list[Body]:
    mounts: list[Body] = [
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
    ]
    if redis_of(resource, own_keys=own_keys) is not None:
        mounts.append({"name": "redis", "mountPath": REDIS_DIRECTORY, "readOnly": True})
    if resource.spec.api_keys is not None:
        mounts.append({"name": "api-keys", "mountPath": KEYS_DIRECTORY, "readOnly": True})
    if not resource.spec.model.uri.startswith("file://"):
        mounts.append({"name": "models", "mountPath": MODEL_DIRECTORY, "readOnly": True})
    if resource.spec.model.cache_path is not None:
        mounts.append({"name": "cache", "mountPath": CACHE_DIRECTORY, "readOnly": True})
    return mounts


def _resources(resource: InferenceDeployment) -> Body:
    gpu, asked = resource.spec.gpu, resource.spec.template.resources
    requests, limits = dict(asked.requests), dict(asked.limits)
    if "cpu" not in requests | limits:  # a limit alone is Kubernetes' request, too
        requests["cpu"] = CPU_REQUEST
    resources: Body = {}
    if gpu.resource_claim_template is not None:
        resources["claims"] = [{"name": "gpu"}]
    elif gpu.count > 0:
        limits[gpu.resource_name or "nvidia.com/gpu"] = str(gpu.count)
    if requests:
        resources["requests"] = requests
    if limits:
        resources["limits"] = limits
    return resources


def _probe(path: str, *, failures: int) -> Body:
    return {
        "httpGet": {"path": path, "port": HTTP_PORT_NAME},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": PROBE_SECONDS,
        "failureThreshold": failures,
    }


def _locked_down() -> Body:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _is_fetched(resource: InferenceDeployment) -> bool:
    return resource.spec.model.uri.startswith(("hf://", "s3://"))
