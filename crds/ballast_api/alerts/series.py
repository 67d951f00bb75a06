"""The series of one resource, as PromQL selects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ballast_api import metrics
from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.inference_deployment import InferenceDeployment

RESERVED_LABELS = frozenset(
    {"alertname", "class", "inferencedeployment", "instance", "job", "kind", "le", "met", "name", "namespace", "part"}
    | {"outcome", "pod", "queue", "reason", "resource_namespace", "service", "severity", "slo", "state", "status"}
    | {"task", "type"}
)
"""Labels that rules, or the series that they read, have already."""
GAP_SECONDS = 480
GAP = f"{GAP_SECONDS // 60}m"
"""Longest time without series of an operator that restarts. Kubernetes waits for up to 5 minutes before a start."""


class Labels:
    """PromQL matchers of the series of one resource."""

    def __init__(self, resource: InferenceDeployment, match: str | None, labels: Mapping[str, str]) -> None:
        self.namespace, self.name = resource.metadata.namespace, resource.metadata.name
        every = [f'{label}="{value}"' for label, value in labels.items()]
        own = f'namespace="{self.namespace}",service="{self.name}"' if match is None else match
        self.match = _listed(*every, own)
        self.queue = f'queue="{resource.queue_name}"'
        self.recorded = _listed(*every, f'namespace="{self.namespace}",inferencedeployment="{self.name}"')
        self.operator = _listed(*every, f'resource_namespace="{self.namespace}",name="{self.name}"')

    def __str__(self) -> str:
        """Return namespace and name of the resource."""
        return f"{self.namespace}/{self.name}"

    def of(self, metric: str, *more: str) -> str:
        """Return the selector of a metric of the workers."""
        return f"{metric}{{{_listed(self.match, *more)}}}"

    def replicas(self, state: Literal["desired", "ready"]) -> str:
        """Return the selector of a number of workers, which each replica of the operator may export."""
        return f'{metrics.OPERATOR_REPLICAS}{{{self.operator},state="{state}"}}'

    def condition(self, kind: ConditionType, reason: ConditionReason) -> str:
        """Return the selector of a condition that the operator exports."""
        return f'{metrics.OPERATOR_CONDITION}{{{self.operator},type="{kind}",reason="{reason}"}}'

    def ray(self, part: Literal["head", "storage"]) -> str:
        """Return the selector of a part of the Ray cluster that the operator exports."""
        return f'{metrics.OPERATOR_RAY_READY}{{{self.operator},part="{part}"}}'

    def known(self, series: str) -> str:
        """Return the value that the operator exports, or the last one while it exports no figures of the resource.

        So a restart of the operator does not start the time of an alert again. The result has no labels.
        """
        last = f"max(last_over_time({series}[{GAP}])) unless max({self.replicas('desired')})"
        return f"(max({series}) or ({last}))"


def _listed(*matchers: str) -> str:
    return ",".join(part for part in matchers if part)
