"""The Valkey in which the head of a Ray cluster keeps its state (GCS), for a resource that names no Redis for it. PURE.

A head that is replaced reads this state and finds its workers again. Each resource has a Valkey of its own, because
whoever can write the state of a head can run code in its Ray cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import RAY_LABEL, gcs_redis
from ballast_operator.children.manifest import beside_workers, manifest
from ballast_operator.context import GcsValkey, OperatorContext
from ballast_operator.kinds import SECRET, SERVICE, STATEFUL_SET, Body, Kind

PORT = 6379
PASSWORD = "password"  # noqa: S105 - the name of a key
COMPONENT = "app.kubernetes.io/component"
RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
"""With both limits, a namespace with a quota on limits admits the pod. The server computes on one thread."""
VOLUME_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
START = r"""umask 077
printf 'requirepass "%s"\n' "$(cat /etc/gcs/password)" > /run/valkey/password.conf
exec valkey-server /run/valkey/password.conf --dir /data --appendonly yes --port 6379"""
"""No process list shows the password."""
PING = "REDISCLI_AUTH=$(cat /etc/gcs/password) valkey-cli ping | grep -q PONG"
"""It fails after a change of the password, too, and the kubelet then restarts the server, which reads the new one."""


def is_needed(resource: InferenceDeployment, context: OperatorContext) -> bool:
    """Return whether the operator runs the Redis for the head of this resource."""
    ray = resource.spec.runtime.ray
    return ray is not None and ray.gcs_redis is None and bool(context.gcs.image)


def options(resource: InferenceDeployment, context: OperatorContext) -> Body | None:
    """Return `gcsFaultToleranceOptions` of the RayService; None if the state of the head is stored nowhere.

    They name no namespace of the storage. KubeRay then takes the uid of each Ray cluster, so that a second cluster that
    takes over does not read the state of the first.
    """
    ray = resource.spec.runtime.ray
    if ray is not None and ray.gcs_redis is not None:
        address, secret, key = ray.gcs_redis.address, ray.gcs_redis.password_secret, ray.gcs_redis.password_key
        return {"redisAddress": address} | (_password(secret, key) if secret is not None else {})
    if not is_needed(resource, context):
        return None
    name = gcs_redis(resource.metadata.name)
    # When the resource is deleted, the Secret goes first. KubeRay's last job must start nevertheless.
    return {"redisAddress": f"{name}:{PORT}"} | _password(name, PASSWORD, optional=True)


def _password(secret: str, key: str, **more: bool) -> Body:
    return {"redisPassword": {"valueFrom": {"secretKeyRef": {"name": secret, "key": key, **more}}}}


def gcs_secret(resource: InferenceDeployment) -> Body:
    """Return the Secret with the password of this Valkey, without the password."""
    return manifest(SECRET, resource, {"type": "Opaque"}, name=gcs_redis(resource.metadata.name))


def gcs_children(
    resource: InferenceDeployment, context: OperatorContext, placement: Body, found: Body | None
) -> Iterator[tuple[Kind, Body]]:
    """Yield the Service and the StatefulSet of this Valkey. `found` is the StatefulSet that exists: its volume stays.

    `placement` has the fields of the pod that choose its node.
    """
    gcs = context.gcs if found is None else _with_volume_of(found, context.gcs)
    name, labels = gcs_redis(resource.metadata.name), {RAY_LABEL: resource.metadata.name, COMPONENT: "gcs-redis"}
    ports = [{"name": "redis", "port": PORT, "targetPort": "redis", "protocol": "TCP"}]
    spec: Body = {"type": "ClusterIP", "ports": ports, "selector": labels}
    yield SERVICE, manifest(SERVICE, resource, {"spec": spec}, name=name)
    spec = {
        "replicas": 1,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # OrderedReady never replaces a pod that is not ready by a corrected one
        "revisionHistoryLimit": 3,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        # The volume of a deleted resource goes with its StatefulSet.
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": beside_workers(resource, labels), "spec": placement | _pod(name, gcs)},
    }
    if gcs.storage:
        claim: Body = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": gcs.storage}}}
        if gcs.storage_class:
            claim["storageClassName"] = gcs.storage_class
        spec["volumeClaimTemplates"] = [VOLUME_CLAIM | {"metadata": {"name": "data"}, "spec": claim}]
    yield STATEFUL_SET, manifest(STATEFUL_SET, resource, {"spec": spec}, name=name)


def _with_volume_of(found: Body, gcs: GcsValkey) -> GcsValkey:
    """Return the settings with the volume of a StatefulSet: Kubernetes refuses every apply that changes its claim."""
    templates = found["spec"].get("volumeClaimTemplates")
    if not templates:
        return replace(gcs, storage="")
    claim = templates[0]["spec"]
    storage_class = claim.get("storageClassName", "")
    return replace(gcs, storage=claim["resources"]["requests"]["storage"], storage_class=storage_class)


def _pod(secret: str, gcs: GcsValkey) -> Body:
    probe: Body = {"exec": {"command": ["sh", "-c", PING]}, "timeoutSeconds": 5, "failureThreshold": 3}
    volumes: list[Body] = [
        {"name": "password", "secret": {"secretName": secret}},
        {"name": "run", "emptyDir": {"medium": "Memory"}},
    ]
    if not gcs.storage:
        volumes.append({"name": "data", "emptyDir": {}})
    container = {
        "name": "valkey",
        "image": gcs.image,
        "command": ["sh", "-c", START],
        "ports": [{"name": "redis", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": probe | {"periodSeconds": 5},
        "livenessProbe": probe | {"periodSeconds": 20},
        "resources": RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "run", "mountPath": "/run/valkey"},
            {"name": "password", "mountPath": "/etc/gcs", "readOnly": True},
        ],
    }
    return {
        "containers": [container],
        "volumes": volumes,
        "securityContext": gcs.security,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "enableServiceLinks": False,
    }
