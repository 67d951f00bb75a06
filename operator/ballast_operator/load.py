"""What workers and queue say of themselves, as the operator last saw it. PURE.

A value that is not known is None, never zero: what is unknown must not read as idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlsplit

from ballast_api.conditions import Reason
from ballast_operator.kinds import Body
from ballast_queue.status import QueueStats, WorkerStatus

FRESH_SECONDS = 60.0
"""A look older than this says nothing any more."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no load to see."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Load:
    """One look at Redis: either `queue` and `workers`, or the `trouble`."""

    at: float
    """When, on the caller's clock."""
    workers: tuple[WorkerStatus, ...] = ()
    queue: QueueStats | None = None
    trouble: Trouble | None = None

    def own(self, pods: tuple[Body, ...]) -> Self:
        """With the workers that run in these pods alone: others may work from the same queue."""
        found = self.of_pods(pods)
        return self if len(found) == len(self.workers) else replace(self, workers=tuple(found.values()))

    def of_pods(self, pods: tuple[Body, ...]) -> Mapping[str, WorkerStatus]:
        """The status of each pod that has published one, by the pod's name."""
        by_host = {urlsplit(status.address).hostname: status for status in self.workers}
        found = {}
        for pod in pods:
            status = by_host.get(pod.get("status", {}).get("podIP", ""))
            if status is not None:
                found[pod["metadata"]["name"]] = status
        return found
