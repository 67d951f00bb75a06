"""Writes the replicas of a resource: those with which scaling begins, and those that it decides on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from ballast_api.metadata import Metadata
from ballast_api.status import ScalingStatus
from ballast_log import Log
from ballast_openai.errors import counted
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, Conflict, ObjectNotFound
from ballast_operator.kinds import Body, Key
from ballast_operator.pod_problem import fetches, lacks_node
from ballast_operator.poll_result import PollResult
from ballast_operator.resource_memory import Failure, ResourceMemory
from ballast_operator.resource_type import ConditionInput, R, ResourceType, computed
from ballast_operator.scaling import Fleet, History, scale
from ballast_operator.status_writer import replicas_of

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class ReplicasWriter(Generic[R]):
    """Writes the replicas of the resources of one type. Each change returns as an event."""

    resource_type: ResourceType[R]
    cluster: Cluster
    post: Callable[[Metadata, str, str], None]
    """Post an event about a resource: its reason and message."""

    def first(self, body: Body, given: ConditionInput[R], memory: ResourceMemory[R]) -> int | None:
        """Return the replicas with which scaling begins, if the children have more than the spec asks for; else None.

        If `replicas` leaves a file when `scaling` is added, it becomes its default.
        """
        scaling = computed(self.resource_type.scaling, given.resource)
        if scaling is None or memory.is_scaling or (body.get("status") or {}).get("scaling") is not None:
            return None
        found = min(computed(self.resource_type.made_replicas, given), scaling.max_replicas)
        return found if found > (replicas_of(body) or 0) else None

    async def scale(
        self, key: Key, body: Body, given: ConditionInput[R], poll: PollResult | None, memory: ResourceMemory[R]
    ) -> tuple[ScalingStatus | None, Failure | None]:
        """Write the replicas that scaling decides on.

        Return the decision, and the failure to write it, which does not keep the children from being restored.
        """
        scaling = computed(self.resource_type.scaling, given.resource)
        memory.is_scaling = scaling is not None
        if scaling is None:
            memory.history, memory.decision = History(), None
            return None, None
        replicas = replicas_of(body) or 0
        fleet = Fleet(
            replicas,
            given.count("readyReplicas"),
            slots=computed(self.resource_type.slots, given.resource),
            startup_seconds=computed(self.resource_type.startup_seconds, given.resource),
            lacks_node=any(map(lacks_node, given.live)),
            is_fetching=any(map(fetches, given.live)),
        )
        decision = scale(scaling, fleet, poll=poll, now=time.monotonic(), history=memory.history)
        memory.history = decision.history
        reported = ScalingStatus(replicas=decision.replicas, because=decision.because[:1024])
        if poll is not None and poll.is_pending:
            before = getattr(self.resource_type.read_status(body.get("status") or {}), "scaling", None)
            reported = before if before is not None and before.replicas == decision.replicas else reported
        else:
            reported = memory.reported(reported, time.monotonic())
        if decision.replicas == replicas:
            return reported, None
        wanted, because = decision.replicas, decision.because
        return reported, await self.write(key, body, given.resource, replicas=wanted, because=because)

    async def write(self, key: Key, body: Body, resource: R, *, replicas: int, because: str) -> Failure | None:
        """Write the replicas of a resource. Return a failure that does not keep the children from being restored."""
        before = replicas_of(body) or 0
        try:
            await self.cluster.scale(key, replicas, version=body["metadata"]["resourceVersion"])
        except ObjectNotFound:
            raise
        except Conflict:
            return None  # the event of the change leads to another try
        except (ClusterUnavailable, ClusterRefused) as error:
            if isinstance(error, ClusterUnavailable) and not error.is_about_one:
                raise
            return error
        log.info("scaled", resource=str(key), replicas=replicas, before=before, because=because)
        message = f"Scaled from {before} to {counted(replicas, 'replica')}: {because}"
        self.post(resource.metadata, "Scaled", message)
        return None
