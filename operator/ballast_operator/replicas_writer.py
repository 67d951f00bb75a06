"""Writes the replicas of a resource: those with which scaling begins, and those that it decides on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.metadata import Metadata
from ballast_api.status import ScalingStatus
from ballast_log import Log
from ballast_openai.errors import counted
from ballast_operator.cluster import Cluster
from ballast_operator.conditions.given import Given
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, Conflict, ObjectNotFound, computed
from ballast_operator.inference_deployment import made_replicas
from ballast_operator.kinds import Body, Key
from ballast_operator.pod_problem import fetches, lacks_node
from ballast_operator.resource_memory import Failure, ResourceMemory
from ballast_operator.scaling import Fleet, History, scale
from ballast_operator.status_writer import replicas_of

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class ReplicasWriter:
    """Writes the replicas of resources. Each change returns as an event."""

    cluster: Cluster
    post: Callable[[Metadata, str, str], None]
    """Post an event about a resource: its reason and message."""

    def first(self, body: Body, given: Given, memory: ResourceMemory) -> int | None:
        """Return the replicas with which scaling begins, if the children have more than the spec asks for; else None.

        If `replicas` leaves a file when `scaling` is added, it becomes its default.
        """
        scaling = given.resource.spec.scaling
        if scaling is None or memory.is_scaling or (body.get("status") or {}).get("scaling") is not None:
            return None
        found = min(computed(made_replicas, given), scaling.max_replicas)
        return found if found > (replicas_of(body) or 0) else None

    async def scale(
        self, key: Key, body: Body, given: Given, memory: ResourceMemory
    ) -> tuple[ScalingStatus | None, Failure | None]:
        """Write the replicas that scaling decides on.

        Return the decision, and the failure to write it, which does not keep the children from being restored.
        """
        scaling = given.resource.spec.scaling
        memory.is_scaling = scaling is not None
        if scaling is None:
            memory.history, memory.decision = History(), None
            return None, None
        replicas = replicas_of(body) or 0
        fleet = Fleet(
            replicas,
            given.count("readyReplicas"),
            slots=given.resource.spec.slots,
            startup_seconds=given.resource.spec.startup_seconds,
            lacks_node=any(map(lacks_node, given.live)),
            is_fetching=any(map(fetches, given.live)),
        )
        decision = scale(scaling, fleet, poll=given.poll, now=time.monotonic(), history=memory.history)
        memory.history = decision.history
        reported = ScalingStatus(replicas=decision.replicas, because=decision.because[:1024])
        if given.poll.is_pending:
            before = given.resource.status.scaling
            reported = before if before is not None and before.replicas == decision.replicas else reported
        else:
            reported = memory.reported(reported, time.monotonic())
        if decision.replicas == replicas:
            return reported, None
        wanted, because = decision.replicas, decision.because
        return reported, await self.write(key, body, given.resource, replicas=wanted, because=because)

    async def write(
        self, key: Key, body: Body, resource: InferenceDeployment, *, replicas: int, because: str
    ) -> Failure | None:
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
