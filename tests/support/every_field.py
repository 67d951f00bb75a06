"""One field of the resource changed at a time, from the sample that has every field."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from ballast_api import crd
from ballast_api.structural import is_closed, leaves

ROOT = Path(__file__).parents[2]
EVERYTHING: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "samples" / "everything.yaml").read_text())
SPEC = crd.schema()["properties"]["spec"]

REFUSED = {"engine.speculative.method": "changes only together with engine.speculative.draftUri"}
BY_OWN_REDIS = {leaf for leaf in leaves(SPEC) if leaf.startswith("queueAccess.")}
"""Fields about users in the operator's own Redis, which the sample does not use: see operator/test_redis_users.py."""
BY_RAY = {leaf for leaf in leaves(SPEC) if leaf.startswith("runtime.ray.")}
"""Fields that need KubeRay."""
BY_SCALING = {leaf for leaf in leaves(SPEC) if leaf.startswith("scaling.")}

BASE: dict[str, Any] = {"monitoring.serviceMonitor": True, "monitoring.prometheusRule": True}
"""Changes to the sample of every field, so that every child is made."""
TEMPLATE: dict[str, Any] = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}}
NATIVE: dict[str, Any] = {"engine.backend": "native", "gpu": {"count": 0}}
"""Changes to the sample of every field after which it can have the fields of the native engine."""
DRAFT = {"method": "draftModel", "draftUri": "hf://a/b"}
ADAPTER = {"name": "a", "uri": "file:///a"}
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("engine.backend", "engine.attention", "engine.blockTokens"), NATIVE),
    **{f"engine.speculative.{name}": {"engine.speculative": DRAFT} for name in ("draftTokens", "draftUri")},
    **{f"model.adapters[].{name}": {"model.adapters": [ADAPTER]} for name in ("name", "uri", "tenants")},
    "gpu.count": {"gpu": {}},
    "slo.latencyMilliseconds": {"slo": {"latencyMilliseconds": 20}},
    "gpu.resourceClaimTemplate": {"gpu": {"count": 1}},
    "model.cache.persistentVolumeClaim.claimName": {
        "model": {"uri": "hf://a/b", "cache": {"persistentVolumeClaim": {"claimName": "models"}}}
    },
    "model.cache.volumeClaimTemplate": {"model": {"uri": "hf://a/b", "cache": {"volumeClaimTemplate": TEMPLATE}}},
    "model.sizeLimitGibibytes": {"model": {"uri": "hf://a/b"}},
    "network.policy": {"network.ingressFrom": [], "network.metricsFrom": []},
    "template.env[].valueFrom": {
        "template.env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]
    },
    "template.tolerations[].effect": {
        "template.tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}]
    },
    "template.tolerations[].value": {"template.tolerations": [{"key": "a", "operator": "Equal", "value": "b"}]},
}
NEEDED |= {
    leaf: {"network": {}, "scaling": None, "runtime": {"ray": {"gcsRedis": {"address": "a:1", "passwordSecret": "s"}}}}
    for leaf in BY_RAY
}
"""What else must be so for a field to be free to change."""
OTHER: dict[str, Any] = {
    "engine.attention": "sdpa",
    "engine.kvDtype": "fp8",
    "engine.quantization": "fp8",
    "engine.vllm.args": ["--enforce-eager"],
    "model.adapters[].tenants": ["legal"],
    "model.aliases": ["a", "b"],
    "model.cache.volumeClaimTemplate": {"spec": TEMPLATE["spec"] | {"storageClassName": "fast"}},
    "model.uri": "hf://Qwen/Qwen3-4B",
    "gpu.count": 0,
    "gpu.resourceClaimTemplate": "one-gpu",
    "offline.maxPercent": 80,
    "template.affinity": {"podAffinity": {}},
    "template.env[].valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
    "template.imagePullSecrets": ["other"],
    "template.resources.limits": {"memory": "48Gi"},
    "template.resources.requests": {"cpu": 2},
    "template.topologySpreadConstraints": [],
    "template.volumes": [{"name": "scratch", "emptyDir": {"medium": "Memory"}}],
    "template.volumeMounts": [{"name": "scratch", "mountPath": "/other"}],
    "network.ingressFrom": [{"podSelector": {}}],
    "network.metricsFrom": [{"podSelector": {}}],
    "runtime.ray.gcsRedis.address": "other:6379",
    "runtime.ray.head.limits": {"memory": "8Gi"},
    "runtime.ray.head.requests": {"cpu": 2},
    "runtime.ray.head.nodeSelector": {"pool": "cpu"},
    "runtime.redisUrl": "redis://other",
}


def schema_of(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    for part in path.split("."):
        schema = schema["properties"][part.removesuffix("[]")]
        schema = schema["items"] if part.endswith("[]") else schema
    return schema


def put(value: dict[str, Any], path: str, new: Any) -> None:
    """Set a leaf; of a list, the first entry's."""
    head, _, rest = path.partition(".")
    name = head.removesuffix("[]")
    if not rest:
        value[name] = new
    elif head.endswith("[]"):
        put(value.setdefault(name, [{}])[0], rest, new)
    else:
        put(value.setdefault(name, {}), rest, new)


def get(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part.removesuffix("[]"), {}) if isinstance(value, dict) else value
        value = value[0] if part.endswith("[]") and value else value
    return None if value == {} else value


def filled(value: Any, schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of the schema that a value has, and the value of each."""
    if is_closed(schema):
        for name, member in value.items():
            yield from filled(member, schema["properties"][name], f"{prefix}.{name}" if prefix else name)
    elif is_closed(schema.get("items", {})):
        for entry in value:
            yield from filled(entry, schema["items"], f"{prefix}[]")
    else:
        yield prefix, value


def another(path: str, found: Any, schema: dict[str, Any]) -> Any:
    """A valid value that differs from what is there."""
    if path in OTHER:
        return OTHER[path]
    leaf = schema_of(path, schema)
    if "enum" in leaf:
        return next(value for value in leaf["enum"] if value != found)
    match leaf.get("type"):
        case "boolean":
            return not found
        case "integer" | "number":
            raised = (found or leaf.get("minimum", 0)) + 1
            return raised if raised <= leaf.get("maximum", raised) else leaf.get("minimum", 0)
        case "string":
            return f"{found or ''}x"
        case _:
            return {"other": "1"}


def changed(base: dict[str, Any], path: str, schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The value before and after a change of one leaf."""
    before = deepcopy(base)
    for needed, value in NEEDED.get(path, {}).items():
        if needed.partition(".")[0] in schema["properties"]:  # a worker's configuration has no section `gpu`
            put(before, needed, value)
    after = deepcopy(before)
    put(after, path, another(path, get(before, path), schema))
    return before, after


def everything() -> dict[str, Any]:
    spec = deepcopy(EVERYTHING["spec"])
    for path, value in BASE.items():
        put(spec, path, value)
    return spec
