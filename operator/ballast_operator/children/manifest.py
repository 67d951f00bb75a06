"""The parts that all children share: name, labels, owner, and a hash of the manifest. PURE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import API_VERSION, KIND, KUEUE, LLM_D, SPEC_HASH, child_labels
from ballast_operator.kinds import Body, Kind


def manifest(
    kind: Kind,
    resource: InferenceDeployment,
    content: Body,
    *,
    name: str | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Body:
    """Return a child of the resource with `content` (`spec`, `data`, ...). Its name is by default the resource's."""
    body: Body = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": name or resource.metadata.name,
            "namespace": resource.metadata.namespace,
            "labels": (labels or {}) | child_labels(resource.metadata.name),
            "annotations": dict(annotations or {}),
            "ownerReferences": [owner(resource)],
        },
        **content,
    }
    body["metadata"]["annotations"] |= {SPEC_HASH: hash_of(body)}
    return body


def beside_workers(resource: InferenceDeployment, labels: dict[str, str]) -> Body:
    """Return the metadata of a pod that is no worker: `labels`, and labels and annotations of the template.

    Labels of workers are left out: Services, budgets and the routers of llm-d select by them. So is what Kueue reads:
    its quota is for the workers, which use the GPUs.
    """
    template, of_workers = resource.spec.template, child_labels(resource.metadata.name)
    found = {name: value for name, value in _without(KUEUE, template.labels) if name not in of_workers}
    annotations = dict(_without(KUEUE, template.annotations))
    return {"labels": dict(_without(LLM_D, found)) | labels} | ({"annotations": annotations} if annotations else {})


def _without(prefix: str, found: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in found.items() if not name.startswith(prefix))


def owner(resource: InferenceDeployment) -> Body:
    """Return the owner reference. With it Kubernetes deletes the child after its owner, even without the operator."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": resource.metadata.name,
        "uid": resource.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,  # true needs the right to set finalizers, and nothing waits for the children
    }


def hash_of(value: object) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
