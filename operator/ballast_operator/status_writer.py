"""Writes what a reconciliation found: the status of the resource, its events, and the figures for the metrics."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.metadata import Metadata
from ballast_api.status import ScalingStatus, Status
from ballast_log import Log
from ballast_operator import report, resource_status
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.conditions.chains import conditions
from ballast_operator.conditions.given import ConditionValue, Given
from ballast_operator.conditions.ray import ray_parts
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, ObjectNotFound, Unplannable
from ballast_operator.events import event
from ballast_operator.kinds import Body, Key
from ballast_operator.metrics import Figures
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot
from ballast_operator.poll_result import UNPOLLED, PollResult
from ballast_operator.poller import Poller
from ballast_operator.releases import Releases
from ballast_operator.resource_memory import Failure, ResourceMemory

log = Log(__name__)

POLL_WITHIN_SECONDS, HURRY_SECONDS = 5.0, 0.5
"""A resource becomes ready with the figures of its workers, or without them after the first time."""


@dataclass(frozen=True, slots=True)
class StatusWriter:
    """Writes the status of resources if it changed."""

    cluster: Cluster
    cache: Cache
    poller: Poller
    releases: Releases
    figures: dict[Key, Figures] = field(default_factory=dict)
    """The figures of each resource."""

    async def report(
        self, key: Key, body: Body, given: Given, scaling: ScalingStatus | None, memory: ResourceMemory
    ) -> float | None:
        """Write the status if it changed. Return the seconds that a small change may wait."""
        metadata, before = given.resource.metadata, given.resource.status
        values, memory.unsettled = report.settle(conditions(given), before, memory.unsettled, given.now)
        reported = report.conditions(values, before, generation=metadata.generation, now=time.time())
        status = resource_status.status(given, reported, scaling).model_copy(update={"operator": self.releases.own})
        self._count(key, body, status, ray_parts(given))
        if status == before and report.has_standard_conditions(body.get("status") or {}, status):
            return None
        if resource_status.awaits_poll(given, status):
            memory.awaited = memory.awaited or given.now
            if given.now - memory.awaited < POLL_WITHIN_SECONDS:
                self.poller.hurry(key)
                return HURRY_SECONDS
        else:
            memory.awaited = 0.0
        return await self._write_soon(key, metadata, before, status, memory, poll=given.poll)

    async def _write_soon(
        self,
        key: Key,
        metadata: Metadata,
        before: Status,
        status: Status,
        memory: ResourceMemory,
        *,
        poll: PollResult | None = None,
    ) -> float | None:
        """Write a status that changed. Return the seconds that a small change may wait."""
        now = time.monotonic()
        wait = report.delay(before, status, poll, seen=now - memory.since, written=now - memory.written)
        if wait > 0:
            return wait
        memory.written = now
        await self._write(key, metadata, before, status)
        return None

    async def _write(self, key: Key, metadata: Metadata, before: Status, status: Status) -> None:
        known = self.cache.resources.get(key)
        if known is None or known["metadata"]["uid"] != metadata.uid:
            return  # deleted meanwhile, and maybe created again: the API server ignores a uid in what is sent here
        try:
            answer = await self.cluster.apply_status(key, report.status_manifest(metadata, status))
        except ObjectNotFound:
            return  # the resource was deleted
        self.cache.put(key.kind, answer)
        self._announce(metadata, before, status)

    def _announce(self, metadata: Metadata, before: Status, status: Status) -> None:
        """Post an event for each condition that changed."""
        for condition in report.news(before, status):
            message = f"{condition.type} is {condition.status}: {condition.message}"
            self.post(metadata, condition.reason, message, is_warning=report.is_bad(condition))

    async def degraded(
        self, key: Key, body: Body, value: ConditionValue, memory: ResourceMemory, *, is_valid: bool = False
    ) -> float | None:
        """Report why a resource cannot be reconciled. Return the seconds that a small change may wait.

        `value` is that of `Degraded`. `Ready` and the counts follow the pods. Conditions that depend on reports of
        workers become Unknown. With `is_valid`, the spec is in force, or the next try applies it: then only `Degraded`
        changes, and `Ready` if its status does.
        """
        metadata = Metadata.model_validate(body["metadata"])
        before = Status.model_validate(body.get("status") or {})
        is_own = before.operator == self.releases.own
        if not is_own and not self.releases.is_former(before.operator):
            return None  # another release may report it
        snapshot = ClusterSnapshot(
            metadata.uid, self.cache.children(key), self.cache.pods(key), heads=self.cache.heads(key)
        )
        counted = resource_status.read_counted(body)
        given = Given(counted, snapshot, ChildrenPlan(), UNPOLLED, time.monotonic(), is_held=True)
        values = conditions(given)
        if is_valid:
            ready, reported = values[ConditionType.READY], before.condition(ConditionType.READY)
            is_same = reported is not None and reported.status == ready.status
            values = {} if is_same else {ConditionType.READY: ready}
        values[ConditionType.DEGRADED] = value
        status = report.with_conditions(before, values, generation=metadata.generation, now=time.time())
        status = status.model_copy(update=resource_status.counts(given))
        self._count(key, body, status, ray_parts(given))
        if status == before and (not is_own or report.has_standard_conditions(body.get("status") or {}, status)):
            return None
        if not is_own:  # only the release that has claimed a resource writes its status
            if not memory.is_announced:
                memory.is_announced = True
                self._announce(metadata, before, status)
            return None
        return await self._write_soon(key, metadata, before, status, memory)

    async def unplannable(self, key: Key, body: Body, error: Unplannable, memory: ResourceMemory) -> float | None:
        """Report a spec from which the children cannot be computed. Log the cause once for each generation.

        Return the seconds that a small change may wait.
        """
        generation = body["metadata"].get("generation")
        if memory.unplannable != generation:
            memory.unplannable = generation
            trace = "".join(traceback.format_exception(error.__cause__))
            log.error("the children of a resource cannot be computed", resource=str(key), trace=trace)
        return await self.degraded(key, body, ConditionValue("True", ConditionReason.INVALID_SPEC, str(error)), memory)

    async def failed(self, key: Key, body: Body, error: Failure, memory: ResourceMemory) -> None:
        """Report a reconciliation that failed several times in a row, unless the failure of a child is reported."""
        if memory.is_reported:
            memory.is_reported = False
            return
        if isinstance(error, ClusterUnavailable) and not error.is_about_one:
            return
        problem = memory.problem(error)
        if problem is not None:
            value = ConditionValue("True", problem.reason, problem.message)
            with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                await self.degraded(key, body, value, memory, is_valid=True)

    def _count(self, key: Key, body: Body, status: Status, ray: Mapping[str, bool]) -> None:
        found = tuple((each.type, each.status, each.reason) for each in status.conditions)
        self.figures[key] = Figures(phase(status), replicas_of(body), status.ready_replicas, found, ray)

    def post(self, metadata: Metadata, reason: str, message: str, *, is_warning: bool = False) -> None:
        self.cluster.post_event(event(metadata, reason=reason, message=message, now=time.time(), is_warning=is_warning))


def replicas_of(body: Body) -> int | None:
    """Return the replicas that a resource asks for; None if it has none."""
    found = (body.get("spec") or {}).get("replicas")
    return found if isinstance(found, int) else None


def phase(status: Status) -> str:
    """Return one word for the metrics."""
    found = {ConditionType(condition.type): condition.status for condition in status.conditions}
    if found.get(ConditionType.DEGRADED) == "True":
        return "Degraded"
    if found.get(ConditionType.READY) != "True":
        return "NotReady"
    return "Progressing" if found.get(ConditionType.PROGRESSING) == "True" else "Ready"
