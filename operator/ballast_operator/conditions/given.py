"""The input of the conditions, and what is known of it: without fresh reports, a condition is Unknown. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_openai.errors import counted
from ballast_operator.kinds import DEPLOYMENT, RAY_SERVICE, Body
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot, is_live
from ballast_operator.poll_result import FRESH_SECONDS, PollResult, Problem
from ballast_operator.ray_status import as_deployment

MOST_CHARACTERS = 1000


class ConditionValue(NamedTuple):
    """Status, reason and message of a condition."""

    status: Literal["True", "False", "Unknown"]
    reason: ConditionReason
    message: str


def on_hold(reason: ConditionReason, message: str) -> ConditionValue:
    """Return the value of `Degraded` of a resource that must change first. `message` has no full stop."""
    text = f"{message}. Until then, the children of this resource do not change"
    return ConditionValue("True", reason, text[:MOST_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Given:
    """Everything that the conditions of a resource depend on."""

    resource: InferenceDeployment
    snapshot: ClusterSnapshot
    """The children and pods after the writes of this reconciliation."""
    plan: ChildrenPlan
    poll: PollResult
    now: float
    refused: Problem | None = None
    """The first child that the API server refused."""
    is_held: bool = False
    """The resource is not reconciled, so its children stay as they are."""
    unchanged: float = 0.0
    """Seconds without a change of its `progress`, as far as this process knows; 0 if no progress is expected."""

    @property
    def live(self) -> tuple[Body, ...]:
        """Return the pods that run or will run."""
        return tuple(pod for pod in self.snapshot.pods if is_live(pod))

    @property
    def ray_service(self) -> Body | None:
        """Return the RayService that is named like the resource."""
        return self.snapshot.child(RAY_SERVICE, self.resource.metadata)

    @property
    def deployment(self) -> Body | None:
        """Return the Deployment that is named like the resource; for workers on Ray, the same figures of their pods."""
        found, ray = self.snapshot.child(DEPLOYMENT, self.resource.metadata), self.ray_service
        if ray is None:
            return found
        config = self.plan.files.get(self.plan.version, "")
        return as_deployment(ray, self.live, self.poll.by_pod(self.live), config)

    def count(self, name: str) -> int:
        """Return a figure of the Deployment's status; zero while the Deployment has no status."""
        status = (self.deployment or {}).get("status") or {}
        return int(status.get(name) or 0)

    @property
    def is_current(self) -> bool:
        """Return whether the Deployment's status describes its present spec."""
        found = self.deployment
        return found is not None and self.count("observedGeneration") >= found["metadata"].get("generation", 0)

    @property
    def has_older_pods(self) -> bool:
        """Return whether pods of an earlier spec may still work. A pod that is being deleted returns its items."""
        if self.refused is not None or any(pod["metadata"].get("deletionTimestamp") for pod in self.snapshot.pods):
            return True
        if self.deployment is None:
            return bool(self.live)
        return not self.is_current or self.count("updatedReplicas") != self.count("replicas")


HELD = ConditionValue(
    "Unknown", ConditionReason.STALE, "not evaluated while the operator cannot reconcile the resource: see Degraded"
)


def is_unknown(given: Given) -> ConditionValue | None:
    """Return Unknown if the resource is not reconciled, or no fresh report of its workers and queue is there."""
    poll = given.poll
    if given.is_held:
        return HELD
    if poll.problem is not None:
        return ConditionValue("Unknown", poll.problem.reason, poll.problem.message)
    if given.now - poll.at > FRESH_SECONDS:
        return ConditionValue(
            "Unknown", ConditionReason.STALE, f"the last poll of workers and queue is older than {FRESH_SECONDS:g} s"
        )
    return None


def no_worker(given: Given) -> ConditionValue | None:
    """Return Unknown if no worker reports."""
    if not given.poll.workers:
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
