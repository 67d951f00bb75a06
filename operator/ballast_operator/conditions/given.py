"""The input of the conditions, and what is known of it: without fresh reports, a condition is Unknown. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_openai.errors import counted
from ballast_operator.kinds import Body
from ballast_operator.poll_result import FRESH_SECONDS, PollResult
from ballast_operator.resource_type import ConditionInput, ConditionValue

Given = ConditionInput[InferenceDeployment]
HELD = ConditionValue(
    "Unknown", ConditionReason.STALE, "not evaluated while the operator cannot reconcile the resource: see Degraded"
)


def is_unknown(given: Given) -> ConditionValue | None:
    """Return Unknown if the resource is not reconciled, or no fresh report of its workers and queue is there."""
    poll = given.poll
    if given.is_held:
        return HELD
    if poll is None:
        return ConditionValue("Unknown", ConditionReason.PENDING, "workers and queue have not been polled yet")
    if poll.problem is not None:
        return ConditionValue("Unknown", poll.problem.reason, poll.problem.message)
    if given.now - poll.at > FRESH_SECONDS:
        return ConditionValue(
            "Unknown", ConditionReason.STALE, f"the last poll of workers and queue is older than {FRESH_SECONDS:g} s"
        )
    return None


def polled(given: Given) -> PollResult:
    """Return the last poll, in a check that follows `is_unknown`."""
    assert given.poll is not None, "is_unknown precedes this check"
    return given.poll


def no_worker(given: Given) -> ConditionValue | None:
    """Return Unknown if no worker reports."""
    if not polled(given).workers:
        return ConditionValue("Unknown", ConditionReason.NO_WORKERS, "no worker has reported")
    return None


def knows_versions(given: Given) -> bool:
    """Return whether it is known which workers have the newest version. Workers on Ray report it themselves."""
    return given.ray_service is None or is_unknown(given) is None


def old_version(given: Given) -> str:
    """Return how many workers of the old version remain ready, as the end of a message; empty if none is known."""
    ready, updated = given.count("availableReplicas"), given.count("updatedReplicas")
    is_known = ready > updated and knows_versions(given)
    left = counted(ready, "worker of the old version remains ready", "workers of the old version remain ready")
    return f"; {left}" if is_known else ""


def deployment_condition(given: Given, kind: str) -> Body | None:
    """Return a condition of the Deployment."""
    entries = ((given.deployment or {}).get("status") or {}).get("conditions") or ()
    return next((entry for entry in entries if entry.get("type") == kind), None)
