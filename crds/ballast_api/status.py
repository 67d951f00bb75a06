"""What the operator reports in `status`.

Figures change only with a condition's reason or with what is configured, so that an idle cluster makes no calls; live
figures are metrics, and `ballast top`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ballast_api.base import ApiModel, keyed_by
from ballast_api.conditions import ConditionType


class Condition(ApiModel):
    """One entry of `status.conditions`."""

    type: str = Field(min_length=1, max_length=316)
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(min_length=1, max_length=1024)
    message: str = Field(default="", max_length=32768)
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """When `status` changed last, RFC 3339."""
    observed_generation: int = Field(default=0, ge=0)


class ClassSlots(ApiModel):
    """Slots over all workers as configured."""

    online: int = Field(ge=0)
    """Slots that offline work never keeps from online requests."""
    offline: int = Field(ge=0)
    """Slots reserved for offline work."""


class ScalingStatus(ApiModel):
    """What scaling decided last."""

    replicas: int = Field(ge=0)
    """Replicas that it asks for."""
    because: str = Field(max_length=1024)
    """Why, with figures."""


class ResourceStatus(ApiModel):
    """The part of the status that every kind of resource has."""

    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that the status describes."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=keyed_by("type"))

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, or None if it was not reported."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


class Status(ResourceStatus):
    """What the operator saw and did."""

    replicas: int = Field(default=0, ge=0)
    """Worker pods that exist."""
    ready_replicas: int = Field(default=0, ge=0)
    """Worker pods that serve."""
    updated_replicas: int = Field(default=0, ge=0)
    """Worker pods of the newest version."""
    selector: str = Field(default="", max_length=1024)
    """Label selector of the pods, for the scale subresource."""
    served_name: str = Field(default="", max_length=253)
    """The model name that clients ask for."""
    endpoint: str = Field(default="", max_length=1024)
    """Base URL of the Service inside the cluster."""
    config_hash: str = Field(default="", max_length=64)
    """Of the hot configuration that workers should have in force."""
    slots: ClassSlots | None = None
    """Unknown until a worker has reported."""
    scaling: ScalingStatus | None = None
    """Where `spec.scaling` is set."""
