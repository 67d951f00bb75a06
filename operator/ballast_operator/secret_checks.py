"""What the Secrets among the children have: which of them must be written again, and who has a former password."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.context import OperatorContext
from ballast_operator.errors import computed
from ballast_operator.kinds import Body, Key
from ballast_operator.own_secrets import outdated_users, own_secrets
from ballast_operator.plan import ClusterSnapshot, is_live
from ballast_operator.resource_memory import ResourceMemory

KUBELET_SECONDS = 60.0
"""Time in which the kubelet updates the file of a Secret that was written, if its pod has no new annotation."""
WAITING = frozenset({"ContainerCreating", "PodInitializing", "CreateContainerConfigError"})
SECRETS_AGAIN_SECONDS = 15.0
"""Interval of checks of the resource's Secrets while a pod cannot start."""


@dataclass(frozen=True, slots=True)
class SecretChecks:
    """Checks the Secrets of resources, which no watch shows."""

    cluster: Cluster
    cache: Cache

    async def check(self, resource: InferenceDeployment, context: OperatorContext, memory: ResourceMemory) -> bool:
        """Find out which Secrets of a resource must be written again. Return whether there are any."""
        memory.checked = time.monotonic()
        for secret in own_secrets(resource, context):
            found = await self.cluster.metadata(secret)
            # A former process may have written it. To write it again changes nothing then.
            if found is None or found["metadata"]["resourceVersion"] != memory.secrets.get(secret, ("", ""))[1]:
                memory.lost.add(secret)
        return bool(memory.lost)

    async def check_while_pods_wait(
        self, key: Key, resource: InferenceDeployment, context: OperatorContext, memory: ResourceMemory
    ) -> None:
        """Check the Secrets without waiting for an audit while a pod cannot start: it may wait for one of them."""
        is_waiting = any(map(_is_waiting, self.cache.pods(key)))
        if is_waiting and time.monotonic() - max(memory.checked, memory.since) >= SECRETS_AGAIN_SECONDS:
            await self.check(resource, context, memory)

    def note_outdated_users(
        self, resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, memory: ResourceMemory
    ) -> None:
        """Note whose former password stays valid: the kubelet updates the files of a pod some time after the Secret.

        While the previous key is valid, each user has the previous password anyway.
        """
        keys = context.user_keys
        if keys.is_first:
            memory.outdated = {}
            return
        written, now = {secret: marker for secret, (marker, _) in memory.secrets.items()}, time.monotonic()
        found = computed(outdated_users, resource, snapshot, context, written)
        recent = {name: at for name, at in memory.outdated.items() if now - at < KUBELET_SECONDS}
        memory.outdated = recent | dict.fromkeys(found, -math.inf if keys.previous else now)


def _is_waiting(pod: Body) -> bool:
    """Return whether a container of a pod waits to be created."""
    status = pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    waiting = ((each.get("state") or {}).get("waiting") or {} for each in containers)
    return is_live(pod) and any(each.get("reason") in WAITING for each in waiting)
