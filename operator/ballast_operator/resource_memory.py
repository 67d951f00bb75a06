"""What one process remembers of a resource between reconciliations. Losing it does no harm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.status import ScalingStatus
from ballast_operator import report
from ballast_operator.context import OperatorContext
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import Key
from ballast_operator.plan import ChildrenPlan, Tolerated
from ballast_operator.poll_result import Problem
from ballast_operator.scaling import History

Failure = ClusterUnavailable | ClusterRefused
MOST_FAILURES = 1
"""A failure is reported if it is repeated more often in a row."""
REASON_SECONDS = 300.0
"""Time for which the reason of the same number of replicas is kept. Sparse requests change it at every other poll."""


@dataclass(slots=True)
class ResourceMemory:
    """The memory of one resource."""

    uid: str
    history: History = field(default_factory=History)
    is_scaling: bool = False
    """Whether this process has decided on its replicas."""
    decision: ScalingStatus | None = None
    """The last decision on its replicas that was reported."""
    decided: float = 0.0
    """When it was made."""
    unsettled: report.Unsettled = field(default_factory=dict)
    tolerated: dict[Key, Tolerated] = field(default_factory=dict)
    """Fields of each child that the cluster changes after each write."""
    refused: dict[str, tuple[float, Problem]] = field(default_factory=dict)
    """By the hash of a manifest: when to send it again, and the problem."""
    failures: Counter[str] = field(default_factory=Counter)
    """By the hash of a manifest, or empty for the whole reconciliation: failures in a row."""
    restored: dict[Key, tuple[str, int, float]] = field(default_factory=dict)
    """The shape of each child, how often it was restored in a row, and when it was restored last."""
    contest: tuple[float, Problem] | None = None
    """Another writer changes a child after each repair: until when this is reported, and the problem."""
    secrets: dict[Key, tuple[str, str]] = field(default_factory=dict)
    """The hash of the manifest of each Secret that was written, and the resourceVersion of the result."""
    lost: set[Key] = field(default_factory=set)
    """Secrets that must be written again."""
    outdated: dict[str, float] = field(default_factory=dict)
    """The users in Redis whose Secret had a former password a short time ago, and when."""
    progress: tuple[Hashable, float] | None = None
    """Figures that change while the children make progress, and since when they are the same."""
    awaited: float = 0.0
    """When the resource became ready without the figures of its workers."""
    checked: float = 0.0
    """When its Secrets were last checked."""
    unplannable: int | None = None
    """The last generation whose children could not be computed."""
    parsed: tuple[str, InferenceDeployment] | None = None
    """The resource at a resourceVersion."""
    settled: tuple[tuple[str, int, OperatorContext], ChildrenPlan] | None = None
    """The last plan if it was empty, and the versions of its inputs."""
    since: float = field(default_factory=time.monotonic)
    """When this process first saw the resource."""
    is_reported: bool = False
    """Whether the status has the failure with which the present reconciliation ends."""
    is_announced: bool = False
    """Whether an event stated why this release cannot claim the resource."""
    written: float = 0.0
    """When its status was last written."""

    def reported(self, decision: ScalingStatus, now: float) -> ScalingStatus:
        """Return the decision to report: the last one, until its replicas change, or its reason after a while."""
        last = self.decision
        if last is not None and last.replicas == decision.replicas:
            is_new = now - self.decided < REASON_SECONDS
            if is_new or report.is_same_reason(last.because, decision.because):
                return last
        self.decision, self.decided = decision, now
        return decision

    def problem(self, failure: Failure, marker: str = "") -> Problem | None:
        """Count a failure of a manifest, or of the whole reconciliation. Return a problem if it is to be reported."""
        self.failures[marker] += 1
        return Problem(ConditionReason.NOT_APPLIED, str(failure)) if self.failures[marker] > MOST_FAILURES else None
