"""The reports of workers and queue in Redis at the last poll. PURE.

An unknown value is None, never zero: an unknown value must not count as idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import urlsplit

from ballast_api.conditions import ConditionReason
from ballast_operator.children.config import Redis
from ballast_operator.kinds import Body
from ballast_operator.plan import has_ended
from ballast_queue.settings import InForce
from ballast_queue.status import QueueStats, WorkerStatus

FRESH_SECONDS = 60.0
"""An older result counts as unknown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason and the message of something that is wrong or unknown."""

    reason: ConditionReason
    message: str


@dataclass(frozen=True, slots=True)
class QueueSource:
    """Where workers and queue of a resource report."""

    redis: Redis | None
    """The Secret that leads to Redis; None if no Redis is configured."""
    queue: str
    owner: str = ""
    """The resource, as `namespace/name`."""
    former: tuple[str, ...] = field(default=(), compare=False)
    """Queues that the resource served before."""
    is_scaled: bool = field(default=False, compare=False)
    """Whether the load decides on the number of workers."""
    own: Mapping[str, str] | None = field(default=None, compare=False)
    """Data of the operator's own Secret, if the resource names none."""

    @property
    def is_own(self) -> bool:
        """Return whether the operator's own Secret leads to Redis."""
        return self.own is not None


@dataclass(frozen=True, slots=True)
class FormerQueue:
    """A queue that the resource served before."""

    name: str
    num_unfinished: int | None = None
    """None: unknown, because the queue could not be read."""
    is_served: bool = False
    """A worker serves it: one that is being replaced, or one of another resource."""
    is_forbidden: bool = False
    """The user of Redis has no right on it."""

    @property
    def is_over(self) -> bool:
        """Return whether the resource has nothing more to do with the queue.

        The poll of a former queue reports work that is left in it, and removes the settings of the resource. A user
        without a right on the queue can do neither. Such a queue counts as over, because an entry in the status that
        no poll can end would stay for as long as the resource.
        """
        return self.is_forbidden or self.num_unfinished == 0


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll of Redis: either `queue` and `workers`, or the `problem` that prevented it."""

    at: float
    """Time of the poll, on the caller's clock."""
    workers: tuple[WorkerStatus, ...] = ()
    queue: QueueStats | None = None
    problem: Problem | None = None
    settings: InForce | None = None
    """The settings of the queue that are in force; None: unknown."""
    former: tuple[FormerQueue, ...] = ()
    has_newer_functions: bool = False
    """Whether Redis has the functions of a newer version of Ballast."""
    unneeded: int | None = None
    """Workers without which no job would be at risk, either. None: a job is, or it was not computed.

    Of the whole queue until `only_workers_in`. Otherwise each resource of a queue would remove all of them.
    """
    has_deadlines: bool = True
    """Whether a job may have a deadline, which only a worker could forecast."""
    has_older_functions: bool = False
    """Whether Redis has those of an older version, and no memory for those of this one."""

    @property
    def is_pending(self) -> bool:
        """Return whether this process has not polled yet."""
        return self.problem is not None and self.problem.reason is ConditionReason.PENDING

    def only_workers_in(self, pods: tuple[Body, ...]) -> Self:
        """Return the result with the workers of these pods, and their share of the workers that are not needed.

        Workers of other resources may serve the same queue. The share is rounded down: the resources decide on their
        own, and together may not remove more than are not needed.
        """
        found = self.by_pod(pods)
        if len(found) == len(self.workers):
            return self
        unneeded = None if self.unneeded is None else self.unneeded * len(found) // len(self.workers)
        return replace(self, workers=tuple(found.values()), unneeded=unneeded)

    def by_pod(self, pods: tuple[Body, ...]) -> Mapping[str, WorkerStatus]:
        """Return the status that each pod published, by the name of the pod.

        A pod that ended keeps its address in its status, and a younger pod may have the same address.
        """
        by_host = {urlsplit(status.address).hostname: status for status in self.workers}
        living = (pod for pod in pods if not has_ended(pod))
        oldest_first = sorted(living, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))
        owners = {pod.get("status", {}).get("podIP", ""): pod["metadata"]["name"] for pod in oldest_first}
        return {name: by_host[address] for address, name in owners.items() if address in by_host}


UNPOLLED = PollResult(0.0, problem=Problem(ConditionReason.PENDING, "workers and queue have not been polled yet"))
"""The result before this process has polled."""
