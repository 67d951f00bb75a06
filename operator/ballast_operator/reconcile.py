"""The reconciliation of a resource: read -> plan -> apply -> report. Create, update, resume and repair are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ballast_api.conditions import ConditionReason
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.metadata import Metadata
from ballast_api.status import ScalingStatus, Status
from ballast_log import Log
from ballast_operator import report
from ballast_operator.blockers import blocked
from ballast_operator.cache import Cache
from ballast_operator.children.redis_users import redis_users
from ballast_operator.children_writer import (
    NAME_AGAIN_SECONDS,
    REFUSED_AGAIN_SECONDS,
    RESTORE_AGAIN_SECONDS,
    ChildrenWriter,
)
from ballast_operator.cluster import Cluster
from ballast_operator.conditions.given import ConditionValue, Given
from ballast_operator.conditions.progressing import ray_progress, reported_lack
from ballast_operator.content import trimmed, whole
from ballast_operator.context import OperatorContext
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, Conflict, ObjectNotFound, Unplannable, computed
from ballast_operator.inference_deployment import plan, queue_source, read
from ballast_operator.kinds import Body, Key
from ballast_operator.metrics import Figures
from ballast_operator.named_secrets import named_secrets
from ballast_operator.own_secrets import own_secrets
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot
from ballast_operator.poll_result import PollResult, Problem
from ballast_operator.poller import Poller
from ballast_operator.queue_rules import own_queue, queue_of
from ballast_operator.queue_users import QueueUsers
from ballast_operator.releases import LEASE_AGAIN_SECONDS, Releases
from ballast_operator.replicas_writer import ReplicasWriter
from ballast_operator.resource_memory import ResourceMemory
from ballast_operator.secret_checks import SecretChecks
from ballast_operator.secret_grants import SecretGrants
from ballast_operator.status_writer import StatusWriter
from ballast_queue.rights import RedisUser

log = Log(__name__)

PASSING = frozenset({ConditionReason.QUEUE_CONFLICT, ConditionReason.QUEUE_NOT_ALLOWED})
"""Reasons that another resource can end. No event shows that."""
AGAIN_SECONDS = {ConditionReason.NAME_TAKEN: NAME_AGAIN_SECONDS, ConditionReason.NOT_APPLIED: RESTORE_AGAIN_SECONDS}
"""When a child that was not written is tried again, by the reason."""
NOT_POLLED = frozenset({ConditionReason.SECRET_NOT_ALLOWED, ConditionReason.QUEUE_NOT_ALLOWED})
"""Reasons for which the queue of a resource is not read."""
CLAIM_AGAIN_SECONDS = 1.0
"""A resource that changed while this release claimed it is read again after this time."""
PROGRESS_AGAIN_SECONDS = 30.0
"""Interval of checks for a lack of progress, of which there is no event."""
LEFT_OVER_AGAIN_SECONDS = 2.0
"""A Secret of a deleted resource of the same name is looked at again after this time. No watch shows its deletion."""


class Reconciler:
    """Makes the cluster match the resources."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        *,
        poller: Poller,
        grants: SecretGrants,
        releases: Releases,
        context: OperatorContext,
        users_changed: Callable[[], None],
    ) -> None:
        self.context = context
        """It is replaced as a whole when something changes. Every resource is reconciled then."""
        self.foreign: dict[Key, str] = {}
        """Resources that another release reconciles, and the name of this release."""
        self.users = QueueUsers(cache, changed=users_changed)
        self._cluster = cluster
        self._cache = cache
        self._poller = poller
        self._grants = grants
        self._releases = releases
        self._status = StatusWriter(cluster, cache, poller, releases)
        self._writer = ChildrenWriter(cluster, cache, self._status.post)
        self._replicas = ReplicasWriter(cluster, self._status.post)
        self._secrets = SecretChecks(cluster, cache)
        self._memories: dict[Key, ResourceMemory] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one resource. Return the seconds after which to do so again; None: each event or poll does."""
        again: float | None = None
        try:
            again = await self._reconcile(key)
        except Unplannable as error:
            if known := self._known(key):
                again = await self._status.unplannable(key, known[0], error, known[1])
            again = _first(again, NAME_AGAIN_SECONDS)
        except (ClusterUnavailable, ClusterRefused) as error:
            if known := self._known(key):
                await self._status.failed(key, known[0], error, known[1])
            raise
        if key in self._memories:
            self._memories[key].failures.clear()
        return again

    async def _reconcile(self, key: Key) -> float | None:
        body = self._cache.resources.get(key)
        if body is None:
            self._forget(key)
            await self._writer.keep_own(key, "")
            if not self._cache.pods(key):
                self._poller.leave(key)
            return None
        # This comes before anything that may fail or block.
        if self.users.is_refused(key, own_queue(body), self.context):
            self._poller.forget(key)
            self.users.use(key, ())
        if body["metadata"].get("deletionTimestamp"):
            # Kubernetes deletes its children, and the operator sets no finalizers.
            self._status.figures.pop(key, None)
            return self.users.keep(key, body, self.context)
        memory = self._memory(key, body["metadata"]["uid"])
        await self._writer.keep_own(key, memory.uid)
        claimed = await self._claim(key, body)
        if claimed is None:
            return LEASE_AGAIN_SECONDS if key in self.foreign else CLAIM_AGAIN_SECONDS
        body = claimed
        try:
            resource = self._read(body, memory)
        except InvalidConfig as error:
            value = ConditionValue("True", ConditionReason.INVALID_SPEC, "; ".join(error.problems)[:1000])
            wait = await self._status.degraded(key, body, value, memory)
            return _first(wait, self.users.keep(key, body, self.context))
        try:
            obstacle = await self._blocked(key, body, resource)
            users, wider = self._users(key, body, resource, memory)
        except Exception:
            self.users.keep(key, body, self.context)
            raise
        again = self.users.keep(key, body, self.context) if obstacle is not None else None
        if obstacle is None or obstacle.reason is ConditionReason.NO_REDIS_USER:
            self.users.widen(key, users, wider)
        if obstacle is not None:
            wait = await self._status.degraded(key, body, obstacle, memory)
            if obstacle.reason is ConditionReason.SECRET_NOT_ALLOWED:
                again = self._grants.least_seconds
            return _first(wait, NAME_AGAIN_SECONDS if obstacle.reason in PASSING else again)
        return await self._converge(key, body, resource, memory, users)

    async def _converge(
        self, key: Key, body: Body, resource: InferenceDeployment, memory: ResourceMemory, users: tuple[RedisUser, ...]
    ) -> float | None:
        """Read, plan, apply, and report. Return the seconds after which to do so again.

        Only the users in `users` stay when no pod of an earlier spec works any more.
        """
        poll = self._poll(key, resource)
        await self._secrets.check_while_pods_wait(key, resource, self.context, memory)
        made = Given(resource, self._snapshot(key, memory), ChildrenPlan(), poll, time.monotonic())
        first = self._replicas.first(body, made, memory)
        scaling: ScalingStatus | None = None
        if first is None:
            scaling, unscaled = await self._replicas.scale(key, body, made, memory)
        else:
            because = "scaling begins with the replicas that are there"
            unscaled = await self._replicas.write(key, body, resource, replicas=first, because=because)
            if unscaled is None:
                return None  # the children stay as they are until the change returns as an event
            resource = computed(read, {**body, "spec": {**body["spec"], "replicas": first}})
        wanted = self._plan(key, resource, poll, memory)
        refused, failed = await self._writer.write(key, resource.metadata, wanted, memory)
        failed = failed or unscaled
        if failed is not None and refused is None:
            raise failed
        wait = LEFT_OVER_AGAIN_SECONDS if memory.lost else None
        if refused is not None:
            wait = AGAIN_SECONDS.get(refused.reason, REFUSED_AGAIN_SECONDS)
        elif wanted.held:
            refused = Problem(ConditionReason.NOT_APPLIED, wanted.held[0])
            wait = _first(wait, RESTORE_AGAIN_SECONDS)
        given = Given(resource, self._snapshot(key, memory), wanted, poll, time.monotonic(), refused)
        given = replace(given, unchanged=self._unchanged(given, memory))
        if not given.has_older_pods:
            self.users.use(key, users)
        again = await self._status.report(key, body, given, scaling, memory)
        if failed is not None:
            memory.is_reported = True
            raise failed
        return _first(again, wait, PROGRESS_AGAIN_SECONDS if memory.progress is not None else None)

    def _unchanged(self, given: Given, memory: ResourceMemory) -> float:
        """Return for how many seconds the children have made no progress; 0 if none is expected."""
        figures = computed(ray_progress, given)
        if figures is None:
            memory.progress = None
        elif memory.progress is None:
            memory.progress = figures, given.now - computed(reported_lack, given)
        elif memory.progress[0] != figures:
            memory.progress = figures, given.now
        return given.now - memory.progress[1] if memory.progress is not None else 0.0

    async def _claim(self, key: Key, body: Body) -> Body | None:
        """Return the resource with this release in its status; None if it could not be claimed."""
        status = Status.model_validate(body.get("status") or {})
        if status.operator != self._releases.own:
            if not await self._releases.may_claim(status.operator):
                if self.foreign.get(key) != status.operator:
                    log.warning("another release reconciles the resource", resource=str(key), release=status.operator)
                self._forget(key)
                self._poller.forget(key)
                self.foreign[key] = status.operator
                return None
            metadata = Metadata.model_validate(body["metadata"])
            wanted = status.model_copy(update={"operator": self._releases.own})
            manifest = report.status_manifest(metadata, wanted)
            manifest["metadata"]["resourceVersion"] = body["metadata"]["resourceVersion"]
            try:
                body = trimmed(key.kind, await self._cluster.apply_status(key, manifest))
            except (Conflict, ObjectNotFound):
                return None  # the resource has changed
            self._cache.put(key.kind, body)
        self.foreign.pop(key, None)
        return body

    async def _blocked(self, key: Key, body: Body, resource: InferenceDeployment) -> ConditionValue | None:
        """Return why the children of a resource stay as they are for now; None if nothing holds them back."""
        refusal = await self._grants.refusal(key.namespace, computed(named_secrets, resource))
        others = self._cache.sharing(queue_of(body))
        found = refusal or computed(blocked, resource, self.context, others)
        if found is not None and found.reason in NOT_POLLED:
            self._poller.forget(key)
        return found

    def _users(
        self, key: Key, body: Body, resource: InferenceDeployment, memory: ResourceMemory
    ) -> tuple[tuple[RedisUser, ...], tuple[RedisUser, ...]]:
        """Return the users that the spec needs, and the same with the rights of pods of an earlier spec."""
        served = self.users.served(key, body, self.context)
        found = [computed(redis_users, resource, self.context, queues) for queues in ((), served)]
        self._secrets.note_outdated_users(resource, self._snapshot(key, memory), self.context, memory)
        old = memory.outdated
        users, wider = (tuple(replace(user, keeps_passwords=user.name in old) for user in each) for each in found)
        return users, wider

    def _poll(self, key: Key, resource: InferenceDeployment) -> PollResult:
        """Return the last poll of the workers of a resource."""
        source = computed(queue_source, resource, self.context)
        return self._poller.last(key, source).only_workers_in(self._cache.pods(key))

    def _snapshot(self, key: Key, memory: ResourceMemory) -> ClusterSnapshot:
        children, pods = self._cache.children(key), self._cache.pods(key)
        heads = self._cache.heads(key)
        return ClusterSnapshot(memory.uid, children, pods, memory.tolerated, frozenset(memory.lost), heads)

    def _plan(self, key: Key, resource: InferenceDeployment, poll: PollResult, memory: ResourceMemory) -> ChildrenPlan:
        """Return what must be written.

        An empty plan stays valid until one of its inputs changes. The poll does not affect an empty plan.
        """
        if memory.lost:
            memory.lost.intersection_update(computed(own_secrets, resource, self.context))
        version = memory.parsed[0] if memory.parsed is not None else ""
        inputs = version, self._cache.revision(key), self.context
        if memory.settled is not None and memory.settled[0] == inputs and not memory.lost:
            return memory.settled[1]
        wanted = computed(plan, resource, self._snapshot(key, memory), self.context, poll)
        memory.settled = None if wanted else (inputs, wanted)
        return wanted

    async def audit_secrets(self) -> list[Key]:
        """Check the Secrets of every resource. Return the resources to reconcile."""
        found = []
        for key, memory in list(self._memories.items()):
            if memory.parsed is not None and await self._secrets.check(memory.parsed[1], self.context, memory):
                found.append(key)
        return found

    @property
    def figures(self) -> Mapping[Key, Figures]:
        """Return the figures of each resource."""
        return self._status.figures

    def _known(self, key: Key) -> tuple[Body, ResourceMemory] | None:
        body, memory = self._cache.resources.get(key), self._memories.get(key)
        return None if body is None or memory is None else (body, memory)

    def _memory(self, key: Key, uid: str) -> ResourceMemory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = ResourceMemory(uid)
        return memory

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._status.figures.pop(key, None)
        self.foreign.pop(key, None)
        self.users.forget(key)

    def _read(self, body: Body, memory: ResourceMemory) -> InferenceDeployment:
        version = body["metadata"]["resourceVersion"]
        if memory.parsed is None or memory.parsed[0] != version:
            memory.parsed = (version, computed(read, whole(body)))
        return memory.parsed[1]


def _first(*waits: float | None) -> float | None:
    """Return the shortest of the times after which to reconcile again; None if each event does."""
    return min((wait for wait in waits if wait is not None), default=None)
