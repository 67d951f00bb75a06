"""The `status` that the operator reports.

Numbers change only with the reason of a condition or with the configuration, so that an idle cluster causes no calls.
Metrics and `ballast top` show live numbers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from ballast_api.base import ApiModel, keyed_by
from ballast_api.conditions import ConditionType

MOST_FORMER_QUEUES = 8
TYPES = frozenset(ConditionType)


class StatusModel(ApiModel):
    """A part of a status. It ignores fields that it does not know: an operator of another version wrote them."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One entry of `status.conditions`."""

    type: str = Field(min_length=1, max_length=316)
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: str = Field(min_length=1, max_length=1024)
    """Reason in one word, for programs."""
    message: str = Field(default="", max_length=32768)
    """Reason in sentences, for people."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """Time of the last change of `status`, RFC 3339."""
    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that the condition describes."""


class ClassSlots(StatusModel):
    """Configured slots of all workers."""

    online: int = Field(ge=0)
    """Slots that are not reserved for offline work."""
    offline: int = Field(ge=0)
    """Slots reserved for offline work."""


class ScalingStatus(StatusModel):
    """The last decision of scaling."""

    replicas: int = Field(ge=0)
    """Number of replicas."""
    because: str = Field(max_length=1024)
    """Reason, with numbers."""


class Status(StatusModel):
    """The observed state."""

    operator: str = Field(default="", max_length=317)
    """Release that reconciles the resource, by its Lease: `NAMESPACE/NAME`. Other releases write nothing to it."""
    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that the status describes."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=keyed_by("type"))
    """Conditions of the resource; docs/conditions.md describes them."""
    replicas: int = Field(default=0, ge=0)
    """Worker pods that exist."""
    ready_replicas: int = Field(default=0, ge=0)
    """Worker pods that serve."""
    updated_replicas: int = Field(default=0, ge=0)
    """Worker pods of the newest version."""
    workers: str = Field(default="", max_length=32)
    """Workers that serve, of those that `spec.replicas` asks for, e.g. `2/3`."""
    selector: str = Field(default="", max_length=1024)
    """Label selector of the pods, for the scale subresource."""
    served_name: str = Field(default="", max_length=253)
    """The model name that clients use."""
    endpoint: str = Field(default="", max_length=1024)
    """Base URL of the Service inside the cluster."""
    queue: str = Field(default="", max_length=507)
    """Name of the queue that the workers serve."""
    former_queues: tuple[str, ...] = Field(default=(), max_length=MOST_FORMER_QUEUES)
    """Queues that the workers served before a change of `spec.offline.queue`, and that may have unfinished items, or
    pods of the earlier spec. Such pods keep their rights on them. Queues on which the user of Redis has no right are
    left out."""
    config_hash: str = Field(default="", max_length=64)
    """Hash of the configuration that workers should have in force."""
    slots: ClassSlots | None = None
    """Slots of all workers; absent while no worker exists, and until one reports."""
    scaling: ScalingStatus | None = None
    """Set if `spec.scaling` is set."""

    @field_validator("conditions")
    @classmethod
    def _known(cls, found: tuple[Condition, ...]) -> tuple[Condition, ...]:
        """Ignore the conditions that other programs report on the resource."""
        return tuple(condition for condition in found if condition.type in TYPES)

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, or None if it was not reported."""
        return next((condition for condition in self.conditions if condition.type == kind), None)
