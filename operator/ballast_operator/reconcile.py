"""The reconciliation of a resource: read -> plan -> apply -> report. Create, update, resume and repair are the same."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import Generic, ParamSpec, TypeVar

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import Metadata
from ballast_api.names import SPEC_HASH
from ballast_api.status import ResourceStatus, ScalingStatus
from ballast_log import Log
from ballast_operator import report
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.context import OperatorContext
from ballast_operator.drift import additions, drift
from ballast_operator.errors import (
    ClusterRefused,
    ClusterUnavailable,
    Conflict,
    Invalid,
    NameTaken,
    ObjectNotFound,
    Unplannable,
)
from ballast_operator.events import event
from ballast_operator.kinds import CONFIG_MAP, SECRET, Body, Key
from ballast_operator.plan import Apply, ChildrenPlan, ClusterSnapshot, is_live, is_made_for, is_owned
from ballast_operator.poll_result import PollResult, Problem
from ballast_operator.poller import Poller
from ballast_operator.queue_users import QueueUsers
from ballast_operator.releases import Releases
from ballast_operator.resource_type import ConditionInput, ConditionValue, R, ResourceType
from ballast_operator.scaling import History, scale
from ballast_operator.secret_grants import SecretGrants

log = Log(__name__)

REFUSED_AGAIN_SECONDS = 300.0
"""A manifest that the API server refused is sent again after this time, or when it changes."""
NAME_AGAIN_SECONDS = 10.0
"""The same time if an object of another owner has the name. No watch shows the deletion of this object."""
POLL_WITHIN_SECONDS, HURRY_SECONDS = 5.0, 0.5
"""A resource becomes ready with the figures of its workers, or without them after the first time."""
MOUNTED = frozenset({SECRET, CONFIG_MAP})
"""Kinds of children that pods mount by name."""
PASSING = frozenset({ConditionReason.QUEUE_CONFLICT, ConditionReason.QUEUE_NOT_ALLOWED})
"""Reasons that another resource can end. No event shows that."""
UNPOLLED = frozenset({ConditionReason.SECRET_NOT_ALLOWED, ConditionReason.QUEUE_NOT_ALLOWED})
"""Reasons for which the queue of a resource is not read."""
CLAIM_AGAIN_SECONDS = 1.0
"""A resource that changed while this release claimed it is read again after this time."""
PASSWORD_BYTES = 32
PATIENCE = 2
"""A write that failed this number of times in a row is reported."""
WAITING = frozenset({"ContainerCreating", "PodInitializing", "CreateContainerConfigError"})
SECRETS_AGAIN_SECONDS = 15.0
"""Interval of checks of the resource's Secrets while a pod cannot start."""


Failure = ClusterUnavailable | ClusterRefused
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Memory(Generic[R]):
    """The state of a resource that one process keeps. Losing it does no harm."""

    uid: str
    history: History = field(default_factory=History)
    unsettled: report.Unsettled = field(default_factory=dict)
    tolerated: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: dict[str, tuple[float, Problem]] = field(default_factory=dict)
    """By the hash of a manifest: when to send it again, and the problem."""
    failures: Counter[str] = field(default_factory=Counter)
    """By the hash of a manifest, or empty for the whole reconciliation: failures in a row."""
    secrets: dict[Key, str] = field(default_factory=dict)
    """The resourceVersion of each Secret as it was written."""
    lost: set[Key] = field(default_factory=set)
    """Secrets that must be written again."""
    awaited: float = 0.0
    """When the resource became ready without the figures of its workers."""
    checked: float = 0.0
    """When its Secrets were last checked."""
    unplannable: int | None = None
    """The last generation whose children could not be computed."""
    parsed: tuple[str, R] | None = None
    """The resource at a resourceVersion."""
    settled: tuple[tuple[str, int, OperatorContext], ChildrenPlan] | None = None
    """The last plan if it was empty, and the versions of its inputs."""
    since: float = field(default_factory=time.monotonic)
    """When this process first saw the resource."""
    written: float = 0.0
    """When its status was last written."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a resource in the operator's metrics."""

    phase: str
    desired: int | None
    """None: the resource has no replicas."""
    ready: int
    conditions: tuple[tuple[str, str, str], ...] = ()
    """Type, status and reason of each."""


class Reconciler(Generic[R]):
    """Makes the cluster match the resources of one type."""

    def __init__(
        self,
        resource_type: ResourceType[R],
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
        self.figures: dict[Key, Figures] = {}
        self.foreign: dict[Key, str] = {}
        """Resources that another release reconciles, and the name of this release."""
        self.users = QueueUsers(resource_type, cache, changed=users_changed)
        self._type = resource_type
        self._cluster = cluster
        self._cache = cache
        self._poller = poller
        self._grants = grants
        self._releases = releases
        self._memories: dict[Key, _Memory[R]] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one resource. Return the seconds after which to do so again; None: each event or poll does."""
        try:
            again = await self._reconcile(key)
        except Unplannable as error:
            await self._report_unplannable(key, error)
            again = NAME_AGAIN_SECONDS
        except (ClusterUnavailable, ClusterRefused) as error:
            await self._report_failure(key, error)
            raise
        if key in self._memories:
            self._memories[key].failures.clear()
        return again

    async def _reconcile(self, key: Key) -> float | None:
        body = self._cache.resources.get(key)
        if body is None:
            self._forget(key)
            if not self._cache.pods(key):
                self._poller.leave(key)
            return None
        if self.users.is_refused(
            key, self._type.own_queue(body), self.context
        ):  # before anything that may fail or block
            self._poller.forget(key)
            self.users.use(key, ())
        if body["metadata"].get("deletionTimestamp"):
            return self.users.keep(
                key, body, self.context
            )  # Kubernetes deletes its children, and the operator sets no finalizers
        claimed = await self._claim(key, body)
        if claimed is None:
            return None if key in self.foreign else CLAIM_AGAIN_SECONDS
        body = claimed
        memory = self._memory(key, body["metadata"]["uid"])
        try:
            resource = self._read(body, memory)
        except InvalidConfig as error:
            message = "; ".join(error.problems)[:1000]
            await self._report_degraded(key, body, ConditionValue("True", ConditionReason.INVALID_SPEC, message))
            return self.users.keep(key, body, self.context)
        try:
            blocked = await self._blocked(key, resource)
            users = _computed(self._type.redis_users, resource, self.context)
        except Exception:
            self.users.keep(key, body, self.context)
            raise
        again = self.users.keep(key, body, self.context) if blocked is not None else None
        if blocked is None or blocked.reason is ConditionReason.NO_REDIS_USER:
            self.users.use(key, users)
        if blocked is not None:
            await self._report_degraded(key, body, blocked)
            if blocked.reason is ConditionReason.SECRET_NOT_ALLOWED:
                return self._grants.least_seconds
            return NAME_AGAIN_SECONDS if blocked.reason in PASSING else again
        source = _computed(self._type.source, resource, self.context)
        poll = None
        if source is not None:
            poll = self._poller.last(key, source).only_workers_in(self._cache.pods(key))
        await self._check_secrets_of_waiting_pods(key, resource, memory)
        scaling = await self._scale(key, body, resource, poll, memory)
        wanted = self._plan(key, resource, poll, memory)
        refused, failed = await self._execute(key, resource.metadata, wanted, memory)
        if failed is not None and refused is None:
            raise failed
        given = ConditionInput(resource, self._snapshot(key, memory), wanted, poll, time.monotonic(), refused)
        again = await self._report(key, body, given, scaling, memory)
        if failed is not None:
            raise failed
        if refused and again is None:
            return NAME_AGAIN_SECONDS if refused.reason is ConditionReason.NAME_TAKEN else REFUSED_AGAIN_SECONDS
        return again

    async def _claim(self, key: Key, body: Body) -> Body | None:
        """Return the resource with this release in its status; None if it could not be claimed."""
        status = self._type.read_status(body.get("status") or {})
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
            manifest = report.status_manifest(key.kind, metadata, wanted)
            manifest["metadata"]["resourceVersion"] = body["metadata"]["resourceVersion"]
            try:
                body = await self._cluster.apply_status(key, manifest)
            except (Conflict, ObjectNotFound):
                return None  # the resource has changed
            self._cache.put(key.kind, body)
        self.foreign.pop(key, None)
        return body

    async def _blocked(self, key: Key, resource: R) -> ConditionValue | None:
        """Return why the children of a resource stay as they are for now; None if nothing holds them back."""
        refusal = await self._grants.refusal(key.namespace, _computed(self._type.named_secrets, resource))
        others = self._cache.resources.values()
        blocked = refusal or _computed(self._type.blocked, resource, self.context, others)
        if blocked is not None and blocked.reason in UNPOLLED:
            self._poller.forget(key)
        return blocked

    def _snapshot(self, key: Key, memory: _Memory[R]) -> ClusterSnapshot:
        children, pods = self._cache.children(key), self._cache.pods(key)
        heads = self._cache.heads(key)
        return ClusterSnapshot(memory.uid, children, pods, memory.tolerated, frozenset(memory.lost), heads)

    def _plan(self, key: Key, resource: R, poll: PollResult | None, memory: _Memory[R]) -> ChildrenPlan:
        """Return what must be written.

        An empty plan stays valid until one of its inputs changes. The poll does not affect an empty plan.
        """
        version = memory.parsed[0] if memory.parsed is not None else ""
        read = version, self._cache.revision(key), self.context
        if memory.settled is not None and memory.settled[0] == read and not memory.lost:
            return memory.settled[1]
        wanted = _computed(self._type.plan, resource, self._snapshot(key, memory), self.context, poll)
        memory.settled = None if wanted else (read, wanted)
        return wanted

    async def _scale(
        self, key: Key, body: Body, resource: R, poll: PollResult | None, memory: _Memory[R]
    ) -> ScalingStatus | None:
        """Write the replicas that scaling decides on. The change returns as an event."""
        scaling = _computed(self._type.scaling, resource)
        if scaling is None:
            memory.history = History()
            return None
        replicas = _replicas(body) or 0
        given = ConditionInput(resource, self._snapshot(key, memory), ChildrenPlan(), None, time.monotonic())
        ready = given.count("readyReplicas")
        decision = scale(
            scaling, replicas=replicas, ready=ready, poll=poll, now=time.monotonic(), history=memory.history
        )
        memory.history = decision.history
        if decision.replicas != replicas:
            log.info("scaled", resource=str(key), replicas=decision.replicas, before=replicas, because=decision.because)
            await self._cluster.scale(key, decision.replicas)
            message = f"Scaled from {replicas} to {decision.replicas} replicas: {decision.because}"
            self._post(resource.metadata, "Scaled", message)
        return ScalingStatus(replicas=decision.replicas, because=decision.because[:1024])

    async def _execute(
        self, key: Key, metadata: Metadata, wanted: ChildrenPlan, memory: _Memory[R]
    ) -> tuple[Problem | None, Failure | None]:
        """Write the plan. Return the first problem to report, and the first failure, after which to try again."""
        for step in wanted.costs:
            await self._cluster.annotate(step.key, step.annotations)
        refused: Problem | None = None
        failed: Failure | None = None
        done: list[str] = []
        for apply in wanted.apply:
            try:
                problem = await self._apply(apply, memory)
            except (ClusterUnavailable, ClusterRefused) as error:
                if isinstance(error, ClusterUnavailable) and not error.is_about_one:
                    raise
                failed = failed or error  # the other children do not depend on this one
                refused = refused or _failure(error, apply.manifest["metadata"]["annotations"][SPEC_HASH], memory)
            else:
                refused = refused or problem
                if problem is None:
                    done.append(apply.because)
                    continue
            if apply.key.kind == SECRET:
                memory.lost.add(apply.key)
            if apply.key.kind in MOUNTED:
                break  # no pod may start with an object of another owner, or with an old one
        for size in wanted.resize:
            try:
                await self._cluster.resize(size.key, size.replicas, size.leaving, owner=size.owner)
            except Invalid as error:
                message = f"the API server refused the size of {size.key}, or another object owns it: {error.message}"
                refused = refused or Problem(ConditionReason.NOT_APPLIED, message)
            else:
                done.append(size.because)
        for gone in wanted.delete:
            await self._cluster.delete(gone.key, gone.uid)
            done.append(gone.because)
        for step in wanted.annotate:
            await self._cluster.annotate(step.key, step.annotations)
        if done:
            log.info("applied", resource=str(key), because=done)
            self._post(metadata, "Applied", "; ".join(done))
        return refused, failed

    async def _apply(self, step: Apply, memory: _Memory[R]) -> Problem | None:
        marker = step.manifest["metadata"]["annotations"][SPEC_HASH]
        known = memory.refused.get(marker)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        kind, name = step.key.kind, step.key.name
        again = REFUSED_AGAIN_SECONDS
        try:
            answer = await self._write_child(step, memory.uid)
        except Invalid as error:
            problem = Problem(
                ConditionReason.INVALID_POD, f"the API server refused {kind.name} {name}: {error.message}"
            )
        except ObjectNotFound:
            if not kind.is_optional:
                raise
            return None  # the kind was deleted, and the next audit finds that
        except NameTaken as error:
            problem, again = Problem(ConditionReason.NAME_TAKEN, str(error)), NAME_AGAIN_SECONDS
        else:
            memory.refused.pop(marker, None)
            memory.failures.pop(marker, None)
            if kind == SECRET:
                memory.secrets[step.key] = answer["metadata"]["resourceVersion"]
                memory.lost.discard(step.key)
            else:
                self._cache.put(kind, answer)
                self._tolerate(step, answer, marker, memory)
            return None
        memory.refused[marker] = (time.monotonic() + again, problem)
        log.warning("refused by the API server", kind=kind.name, name=name, because=problem.message)
        return problem

    async def _write_child(self, step: Apply, owner: str) -> Body:
        """Create an object, or change the resource's own.

        Raises:
            NameTaken: the object exists, and the resource does not own it. Or another controller would change an
                object of another owner for it.
        """
        for key in self._type.written_with(step.key):
            found = await self._cluster.metadata(key)
            if found is not None and not is_made_for(found, step.key):
                raise NameTaken(f"{key.kind.name} {key.name}")
        uid = step.uid
        if uid is None:
            new = {"stringData": {step.generates: token_urlsafe(PASSWORD_BYTES)}} if step.generates else {}
            try:
                return await self._cluster.apply(step.key, step.manifest | new, uid=None)
            except Conflict:
                # The cache does not show an object that was created just now, or that lost its labels.
                found = await self._cluster.metadata(step.key)
                if found is None or found["metadata"].get("deletionTimestamp"):
                    raise
                if not is_owned(found, owner):
                    raise NameTaken(f"{step.key.kind.name} {step.key.name}") from None
                if step.generates:
                    return found
                uid = str(found["metadata"]["uid"])
        if step.patch is not None:
            return await self._cluster.overwrite(step.key, step.patch, uid=uid)
        try:
            return await self._cluster.apply(step.key, step.manifest, uid=uid)
        except Invalid:
            # A Service whose port was changed would get two ports of the same name, so its lists are replaced.
            if not step.is_repair:
                raise
        return await self._cluster.overwrite(step.key, step.manifest, uid=uid)

    @staticmethod
    def _tolerate(step: Apply, answer: Body, marker: str, memory: _Memory[R]) -> None:
        """Remember which fields the cluster changes after an apply, so that they are not restored indefinitely."""
        kept = additions(step.manifest, answer) if step.patch is not None else ()
        paths = frozenset((*drift(step.manifest, answer), *kept))
        if paths and memory.tolerated.get(marker) != paths:
            log.warning("the cluster changes applied fields", kind=step.key.kind.name, fields=sorted(paths)[:8])
            memory.tolerated[marker] = paths

    async def _report(
        self, key: Key, body: Body, given: ConditionInput[R], scaling: ScalingStatus | None, memory: _Memory[R]
    ) -> float | None:
        """Write the status if it changed. Return the seconds that a small change may wait."""
        metadata, before = given.resource.metadata, given.resource.status
        values, memory.unsettled = report.settle(self._type.conditions(given), before, memory.unsettled, given.now)
        reported = report.conditions(values, before, generation=metadata.generation, now=time.time())
        status = self._type.status(given, reported, scaling).model_copy(update={"operator": self._releases.own})
        self._count(key, body, status)
        if status == before:
            return None
        if self._type.awaits_poll(given, status):
            memory.awaited = memory.awaited or given.now
            if given.now - memory.awaited < POLL_WITHIN_SECONDS:
                self._poller.hurry(key)
                return HURRY_SECONDS
        wait = report.delay(
            before, status, given.poll, seen=given.now - memory.since, written=given.now - memory.written
        )
        if wait > 0:
            return wait
        memory.written = given.now
        await self._write(key, metadata, before, status)
        return None

    async def _write(self, key: Key, metadata: Metadata, before: ResourceStatus, status: ResourceStatus) -> None:
        try:
            answer = await self._cluster.apply_status(key, report.status_manifest(key.kind, metadata, status))
        except ObjectNotFound:
            return  # the resource was deleted
        self._cache.put(key.kind, answer)
        for condition in report.news(before, status):
            message = f"{condition.type} is {condition.status}: {condition.message}"
            self._post(metadata, condition.reason, message, is_warning=report.is_bad(condition))

    async def _report_degraded(self, key: Key, body: Body, value: ConditionValue) -> None:
        """Report why a resource cannot be reconciled, and leave its children unchanged."""
        metadata = Metadata.model_validate(body["metadata"])
        before = self._type.read_status(body.get("status") or {})
        status = report.with_condition(
            before, ConditionType.DEGRADED, value, generation=metadata.generation, now=time.time()
        )
        self._count(key, body, status)
        if status != before:
            await self._write(key, metadata, before, status)

    async def _report_unplannable(self, key: Key, error: Unplannable) -> None:
        """Report a spec from which the children cannot be computed. Log the cause once for each generation."""
        memory, body = self._memories.get(key), self._cache.resources.get(key)
        if memory is None or body is None:
            return
        generation = body["metadata"].get("generation")
        if memory.unplannable != generation:
            memory.unplannable = generation
            trace = "".join(traceback.format_exception(error.__cause__))
            log.error("the children of a resource cannot be computed", resource=str(key), trace=trace)
        await self._report_degraded(key, body, ConditionValue("True", ConditionReason.INVALID_SPEC, str(error)))

    async def _report_failure(self, key: Key, error: Failure) -> None:
        """Report a reconciliation that failed several times in a row, unless the failure of a child is reported."""
        memory, body = self._memories.get(key), self._cache.resources.get(key)
        if memory is None or body is None or (isinstance(error, ClusterUnavailable) and not error.is_about_one):
            return
        problem = _failure(error, "", memory)
        if problem is not None:
            with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                await self._report_degraded(key, body, ConditionValue("True", problem.reason, problem.message))

    async def audit_secrets(self) -> list[Key]:
        """Check the Secrets of every resource. Return the resources to reconcile."""
        found = []
        for key, memory in list(self._memories.items()):
            if memory.parsed is not None and await self._check_secrets(memory.parsed[1], memory):
                found.append(key)
        return found

    async def _check_secrets(self, resource: R, memory: _Memory[R]) -> bool:
        """Find out which Secrets of a resource must be written again. Return whether there are any."""
        memory.checked = time.monotonic()
        for secret in self._type.secrets(resource, self.context):
            found = await self._cluster.metadata(secret)
            # A former process may have written it. To write it again changes nothing then.
            if found is None or found["metadata"]["resourceVersion"] != memory.secrets.get(secret):
                memory.lost.add(secret)
        return bool(memory.lost)

    async def _check_secrets_of_waiting_pods(self, key: Key, resource: R, memory: _Memory[R]) -> None:
        """Check the Secrets without waiting for an audit while a pod cannot start: it may wait for one of them."""
        is_waiting = any(map(_is_waiting, self._cache.pods(key)))
        if is_waiting and time.monotonic() - max(memory.checked, memory.since) >= SECRETS_AGAIN_SECONDS:
            await self._check_secrets(resource, memory)

    def _count(self, key: Key, body: Body, status: ResourceStatus) -> None:
        conditions = tuple((each.type, each.status, each.reason) for each in status.conditions)
        self.figures[key] = Figures(phase(status), _replicas(body), getattr(status, "ready_replicas", 0), conditions)

    def _post(self, metadata: Metadata, reason: str, message: str, *, is_warning: bool = False) -> None:
        kind = self._type.kind
        body = event(kind, metadata, reason=reason, message=message, now=time.time(), is_warning=is_warning)
        self._cluster.post_event(body)

    def _memory(self, key: Key, uid: str) -> _Memory[R]:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = _Memory(uid)
        return memory

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self.figures.pop(key, None)
        self.foreign.pop(key, None)
        self.users.forget(key)

    def _read(self, body: Body, memory: _Memory[R]) -> R:
        version = body["metadata"]["resourceVersion"]
        if memory.parsed is None or memory.parsed[0] != version:
            memory.parsed = (version, _computed(self._type.read, body))
        return memory.parsed[1]


def _computed(function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """Call a pure function of the resource type.

    Raises:
        InvalidConfig: the spec is invalid.
        Unplannable: the function failed on any other error.
    """
    try:
        return function(*arguments, **more)
    except InvalidConfig:
        raise
    except Exception as error:
        raise Unplannable(error) from error


def _failure(error: Failure, marker: str, memory: _Memory[R]) -> Problem | None:
    """Count a failure. Return a problem if it is to be reported."""
    memory.failures[marker] += 1
    return Problem(ConditionReason.NOT_APPLIED, str(error)) if memory.failures[marker] >= PATIENCE else None


def _is_waiting(pod: Body) -> bool:
    """Return whether a container of a pod waits to be created."""
    status = pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    waiting = ((each.get("state") or {}).get("waiting") or {} for each in containers)
    return is_live(pod) and any(each.get("reason") in WAITING for each in waiting)


def _replicas(body: Body) -> int | None:
    found = (body.get("spec") or {}).get("replicas")
    return found if isinstance(found, int) else None


def phase(status: ResourceStatus) -> str:
    """Return one word for the metrics."""
    found = {ConditionType(condition.type): condition.status for condition in status.conditions}
    if found.get(ConditionType.DEGRADED) == "True":
        return "Degraded"
    if found.get(ConditionType.READY) != "True":
        return "NotReady"
    return "Progressing" if found.get(ConditionType.PROGRESSING) == "True" else "Ready"
