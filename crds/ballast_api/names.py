"""Names that operator, chart, alerts, command line and tests share.

Labels follow `app.kubernetes.io/*`. Pods also have labels `llm-d.ai/*`, so that an InferencePool can select them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GROUP = "ballast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"
SINGULAR = "inferencedeployment"
SHORT = "infd"
CRD_NAME = f"{PLURAL}.{GROUP}"

FIELD_MANAGER = "ballast-operator"
"""Field manager of the objects that the operator applies."""
SCALING_MANAGER = "ballast-scaler"
"""Field manager of `spec.replicas` if `spec.scaling` is set."""

HTTP_PORT = 8000
HTTP_PORT_NAME = "http"
METRICS_PORT = 8001
"""Port with the metrics that name tenants."""
METRICS_PORT_NAME = "metrics"
METRICS_PATH = "/metrics"

MOST_NAME_CHARACTERS = 52
"""Most characters in the name of a resource. Names of pods add a hash and an id, and a label value has at most 63."""

MOST_RAY_CHARACTERS = 40
"""The same for a resource that runs on Ray. KubeRay permits 47 characters for a RayService."""

CONFIG_HASH = f"{GROUP}/config-hash"
"""Annotation: hash of the configuration file. Its change on a pod makes the kubelet refresh the file at once."""
SPEC_HASH = f"{GROUP}/spec-hash"
"""Annotation: hash of the manifest of a child."""
COPY_OF = f"{GROUP}/copy-of"
"""Annotation of a copied Secret: `namespace/name` of the original."""

ALLOW_LABEL = f"{GROUP}/allow"
"""Label of a Secret: with the value `true`, resources of its namespace may name it."""
SUBMITTER_SUFFIX = "-ballast-submitter"
"""End of the names of Secrets with users that may only submit. The operator reports a name that is taken, and this must
not show whether a Secret of somebody else exists."""

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
WORKER = "ballast-worker"
OPERATOR = "ballast-operator"
KUEUE = "kueue.x-k8s.io/"
"""Prefix of the labels, annotations and scheduling gates of Kueue."""
LLM_D = "llm-d.ai/"
"""Prefix of the labels by which the routers of llm-d select workers."""
RAY_LABEL = f"{GROUP}/ray"
"""Label of the pods of a Ray cluster, head and workers: the name of the resource."""
RAY_HEAD_LABEL = f"{GROUP}/ray-head"
"""Label of the head of a Ray cluster: the name of the resource. The head has no labels by which a Service selects."""


OWN_VOLUMES = ("models", "fetched", "cache", "config", "tmp", "shared-memory", "redis", "api-keys", "tls")
"""Volumes that the operator may add to a pod, besides those of claims."""
CLAIM_VOLUME = "claim-"
"""How the name of the volume of a claim begins. A number follows."""


def selector(name: str) -> dict[str, str]:
    """Return the fixed labels of the pods of one resource: the selector of Deployment, Service, budget and pool."""
    return {NAME_LABEL: WORKER, INSTANCE_LABEL: name}


def child_labels(name: str) -> dict[str, str]:
    """Return the labels of every child of one resource."""
    return selector(name) | {
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "ballast",
        MANAGED_BY_LABEL: OPERATOR,
    }


def pod_labels(name: str, served_name: str, others: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the labels of the worker pods.

    Args:
        name: Name of the resource. The labels of all its children win over the others.
        served_name: The model name that clients use.
        others: Labels of the template. They win over those for routers: with them, a pod joins each InferencePool that
            selects one of these labels, also of another owner.
    """
    return router_labels(served_name) | dict(others) | child_labels(name)


def router_labels(served_name: str) -> dict[str, str]:
    """Return the labels that the routers of llm-d need.

    The engine type decides which metrics the endpoint picker of a router reads. Workers export the metric names of
    vLLM. The role means that a pod both prefills and decodes.
    """
    return {
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/role": "both",
        "llm-d.ai/model": label_value(served_name),
        "llm-d.ai/engine-type": "vllm",
    }


def label_value(text: str) -> str:
    """Return `text` as the value of a label: at most 63 characters. Characters that are not allowed become `-`."""
    allowed = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63]
    return allowed.strip("._-")


def config_map(name: str) -> str:
    """Return the name of the ConfigMap with the `WorkerConfig` of each version."""
    return f"{name}-ballast-config"


def gcs_redis(name: str) -> str:
    """Return the name of the Valkey, and of its Secret, with the state of the head of a Ray cluster."""
    return f"{name}-ballast-gcs"


def redis_secret(name: str) -> str:
    """Return the name of the Secret with the workers' user in the operator's own Redis."""
    return f"{name}-ballast-redis"
