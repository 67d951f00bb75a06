"""Condition types of an `InferenceDeployment`, and their reasons.

A reason is part of the contract, because people and alerts match on it. The message contains the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal


class ConditionType(StrEnum):
    """Type of a condition. Its status is True, False or Unknown."""

    READY = "Ready"
    """Enough workers serve: `replicas` minus `rollout.maxUnavailable`, and at least one."""
    PROGRESSING = "Progressing"
    """Pods are being created or replaced."""
    DEGRADED = "Degraded"
    """Something does not work and needs a person. The old version may still serve."""
    CONFIG_APPLIED = "ConfigApplied"
    """Every running worker has the hot fields of this spec in force."""
    OFFLINE_RESERVATION_SATISFIED = "OfflineReservationSatisfied"
    """While offline work waits, it runs in its reserved slots, or in as many as its maximum and tenant limits allow."""
    SLO_MET = "SLOMet"
    """At least `slo.objectivePercent` of the online requests meet `spec.slo`, by the workers' counts."""
    DEADLINE_AT_RISK = "DeadlineAtRisk"
    """A job will miss its deadline at the current rate."""


HEALTHY: Mapping[ConditionType, Literal["True", "False"]] = {
    ConditionType.READY: "True",
    ConditionType.PROGRESSING: "False",
    ConditionType.DEGRADED: "False",
    ConditionType.CONFIG_APPLIED: "True",
    ConditionType.OFFLINE_RESERVATION_SATISFIED: "True",
    ConditionType.SLO_MET: "True",
    ConditionType.DEADLINE_AT_RISK: "False",
}
"""The status of each condition of a healthy resource."""


class ConditionReason(StrEnum):
    """Reason of a condition."""

    # Ready, Progressing
    SERVING = "Serving"
    SERVING_ON_CPU = "ServingOnCPU"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALED_TO_ZERO = "ScaledToZero"
    NOT_ENOUGH_READY = "NotEnoughReady"
    SCHEDULING_GATED = "SchedulingGated"
    RAY_REPLICAS_PENDING = "RayReplicasPending"
    COMPLETE = "Complete"
    # Degraded: reported by the pod, the scheduler or the API server
    HEALTHY = "Healthy"
    IMAGE_PULL = "ImagePull"
    UNSCHEDULABLE = "Unschedulable"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_NOT_FOUND = "ModelNotFound"
    CRASHING = "Crashing"
    PODS_FAILING = "PodsFailing"
    INVALID_POD = "InvalidPod"
    INVALID_SPEC = "InvalidSpec"
    NO_SECRET = "SecretMissing"  # noqa: S105 - a reason, no password
    SECRET_NOT_ALLOWED = "SecretNotAllowed"  # noqa: S105 - the same
    NOT_PERMITTED = "NotPermitted"
    ROLLOUT_STUCK = "RolloutStuck"
    QUOTA = "Quota"
    NAME_TAKEN = "NameTaken"
    NOT_APPLIED = "NotApplied"
    QUEUE_NOT_ALLOWED = "QueueNotAllowed"
    NO_REDIS_USER = "NoRedisUser"
    QUEUE_CONFLICT = "QueueConflict"
    QUEUE_LEFT = "QueueLeft"
    OLDER_FUNCTIONS = "OlderFunctions"
    NO_KUBERAY = "KubeRayMissing"
    RAY_FAILED = "RayFailed"
    RAY_STORAGE_DOWN = "RayStorageDown"
    RAY_HEAD_DOWN = "RayHeadDown"
    # ConfigApplied
    APPLIED = "Applied"
    PENDING = "Pending"
    INVALID_FILE = "InvalidFile"
    OTHER_SETTINGS = "OtherSettings"
    NEWER_FUNCTIONS = "NewerFunctions"
    # OfflineReservationSatisfied, SLOMet, DeadlineAtRisk
    SATISFIED = "Satisfied"
    NO_WORK = "NoWork"
    REDIS_FULL = "RedisFull"
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
