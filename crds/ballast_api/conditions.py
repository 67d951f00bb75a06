"""Condition types of an `InferenceDeployment`, and the reasons that stand in them.

A reason is part of the contract (people and alerts match on it); its message carries the figures.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """What `status.conditions` says, each True, False or Unknown."""

    READY = "Ready"
    """Workers serve: as many as the rollout promises."""
    PROGRESSING = "Progressing"
    """Pods are being made or replaced."""
    DEGRADED = "Degraded"
    """Something does not work and will not mend itself; the old version may still serve."""
    CONFIG_APPLIED = "ConfigApplied"
    """Every running worker has the hot part of this spec in force."""
    OFFLINE_RESERVATION_SATISFIED = "OfflineReservationSatisfied"
    """While offline work waits, it runs in its reserved slots, or in as many as its maximum and tenant caps allow."""
    SLO_MET = "SLOMet"
    """At least `slo.objectivePercent` of the online requests meet `spec.slo`, by the workers' counts."""
    DEADLINE_AT_RISK = "DeadlineAtRisk"
    """A job will miss its deadline at the present rate."""


class Reason(StrEnum):
    """Why a condition is as it is."""

    # Ready, Progressing
    SERVING = "Serving"
    SERVING_ON_CPU = "ServingOnCPU"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALED_TO_ZERO = "ScaledToZero"
    NOT_ENOUGH_READY = "NotEnoughReady"
    COMPLETE = "Complete"
    # Degraded: what the pod, the scheduler or the API server said
    HEALTHY = "Healthy"
    IMAGE_PULL = "ImagePull"
    UNSCHEDULABLE = "Unschedulable"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_NOT_FOUND = "ModelNotFound"
    CRASHING = "Crashing"
    INVALID_POD = "InvalidPod"
    INVALID_SPEC = "InvalidSpec"
    NO_SECRET = "SecretMissing"  # noqa: S105 - a reason, no password
    ROLLOUT_STUCK = "RolloutStuck"
    QUOTA = "Quota"
    NAME_TAKEN = "NameTaken"
    # ConfigApplied
    APPLIED = "Applied"
    PENDING = "Pending"
    # OfflineReservationSatisfied, SLOMet, DeadlineAtRisk
    SATISFIED = "Satisfied"
    RESERVATION_NOT_MET = "ReservationNotMet"
    MET = "Met"
    MISSED = "Missed"
    ON_TIME = "OnTime"
    LATE = "Late"
    NO_TRAFFIC = "NoTraffic"
    NO_WORKERS = "NoWorkers"
    NOT_REPORTED = "NotReported"
    NO_REDIS = "NoRedis"
    REDIS_UNREACHABLE = "RedisUnreachable"
    STALE = "Stale"
