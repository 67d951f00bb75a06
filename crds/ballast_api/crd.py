"""The CustomResourceDefinition, from the models."""

from __future__ import annotations

from typing import Any

import yaml

from ballast_api.base import VALIDATIONS
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import CRD_NAME, GROUP, KIND, PLURAL, SHORT, SINGULAR, VERSION
from ballast_api.structural import Schema, structural

_READY = '.status.conditions[?(@.type=="Ready")]'
COLUMNS = (
    ("Ready", "string", f"{_READY}.status", 0),
    ("Reason", "string", f"{_READY}.reason", 1),
    ("Replicas", "integer", ".spec.replicas", 0),
    ("Model", "string", ".spec.model.uri", 0),
    ("Online", "integer", ".status.slots.online", 0),
    ("Offline", "integer", ".status.slots.offline", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Name, type, path, priority. They show what is configured or what changed: a live figure would be written for ever."""


def schema() -> Schema:
    """What the API server checks of an `InferenceDeployment`."""
    whole = structural(InferenceDeployment)
    properties = whole["properties"]
    # The API server knows these itself, and refuses a CRD that says more than their types.
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {"type": "object"}
    properties["status"].pop("default", None)
    return {
        "description": whole["description"],
        "type": "object",
        "required": ["spec"],
        "properties": properties,
        VALIDATIONS: whole[VALIDATIONS],
    }


def manifest() -> dict[str, Any]:
    """The CRD as an object."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema()},
                    "additionalPrinterColumns": columns,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                }
            ],
        },
    }


def text() -> str:
    """The CRD as YAML for `kubectl apply`."""
    return "# Written by `make generate` from crds/ballast_api.\n" + _dump(manifest())


def chart_template() -> str:
    """The CRD as a template of the chart, kept when the chart is uninstalled: the resources would go with it."""
    body = manifest()
    body["metadata"] = {"name": CRD_NAME, "labels": "LABELS", "annotations": "ANNOTATIONS"}
    filled = (
        _dump(body)
        .replace("  labels: LABELS\n", '  labels:\n    {{- include "ballast.labels" . | nindent 4 }}\n')
        .replace(
            "  annotations: ANNOTATIONS\n",
            "  {{- if .Values.crds.keep }}\n  annotations:\n    helm.sh/resource-policy: keep\n  {{- end }}\n",
        )
    )
    head = "{{- /* Written by `make generate` from crds/ballast_api. */ -}}\n{{- if .Values.crds.enabled }}\n"
    return head + filled + "{{- end }}\n"


def _dump(manifest: dict[str, Any]) -> str:
    return yaml.safe_dump(manifest, sort_keys=False, width=118, allow_unicode=True)
