"""The names that operator, chart, alerts, command line and tests agree on.

Labels follow `app.kubernetes.io/*`; `llm-d.ai/*` stands on pods so that an InferencePool can select them.
"""

from __future__ import annotations

import re

GROUP = "ballast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"
SINGULAR = "inferencedeployment"
SHORT = "infd"
CRD_NAME = f"{PLURAL}.{GROUP}"

FIELD_MANAGER = "ballast-operator"
"""Owns what the operator applies."""
SCALING_MANAGER = "ballast-scaler"
"""Owns `spec.replicas` where `spec.scaling` is set."""

HTTP_PORT = 8000
HTTP_PORT_NAME = "http"
METRICS_PATH = "/metrics"

MOST_NAME_CHARACTERS = 52
"""Of a resource: its pods' names add a hash and an id, and a label value ends at 63."""

CONFIG_HASH = f"{GROUP}/config-hash"
"""Annotation: content of the hot configuration; touched on pods, so that their kubelets refresh the file at once."""
SPEC_HASH = f"{GROUP}/spec-hash"
"""Annotation: what a child was built from."""
COPY_OF = f"{GROUP}/copy-of"
"""Annotation of a copied Secret: `namespace/name` of the original."""

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
WORKER = "ballast-worker"
OPERATOR = "ballast-operator"


def selector(name: str) -> dict[str, str]:
    """The labels that pods of one resource have and keep: the selector of Deployment, Service, PDB and pool."""
    return {NAME_LABEL: WORKER, INSTANCE_LABEL: name}


def child_labels(name: str) -> dict[str, str]:
    """Labels of every child of one resource."""
    return selector(name) | {
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "ballast",
        MANAGED_BY_LABEL: OPERATOR,
    }


def pod_labels(name: str, served_name: str) -> dict[str, str]:
    """Labels of the pods: what children have, and what llm-d's routers look for.

    The engine type is the one whose metric names the router's endpoint picker reads; workers export vLLM's. The role
    says that a pod both prefills and decodes.
    """
    return child_labels(name) | {
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/role": "both",
        "llm-d.ai/model": label_value(served_name),
        "llm-d.ai/engine-type": "vllm",
    }


def label_value(text: str) -> str:
    """`text` as a label's value: at most 63 characters of those allowed, others become `-`."""
    allowed = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63]
    return allowed.strip("._-")


def config_map(name: str) -> str:
    """Holds the `WorkerConfig` of each version."""
    return f"{name}-config"


def redis_secret(name: str) -> str:
    """The copy of the operator's own Redis Secret beside a resource that names none."""
    return f"{name}-redis"
