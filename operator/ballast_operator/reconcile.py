"""One turn of one resource: observe -> plan -> apply -> report. Create, update, resume and repair differ in nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ballast_api.conditions import ConditionType, Reason
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment, Metadata
from ballast_api.names import SPEC_HASH
from ballast_api.status import ScalingStatus, Status
from ballast_log import Log
from ballast_operator import report
from ballast_operator.cache import Cache
from ballast_operator.children.config import redis_of
from ballast_operator.cluster import Cluster
from ballast_operator.conditions import Input, Verdict, conditions
from ballast_operator.drift import drift
from ballast_operator.errors import ClusterUnavailable, Conflict, Invalid, NotFound, OperatorError
from ballast_operator.events import event
from ballast_operator.kinds import DEPLOYMENT, INFERENCE_DEPLOYMENT, SECRET, Body, Key
from ballast_operator.load import Load, Trouble
from ballast_operator.loads import Loads
from ballast_operator.plan import Apply, Plan, Snapshot, Surroundings, plan
from ballast_operator.scaling import History, scale

log = Log(__name__)

OWNED_BY_OTHERS = "Apply failed with"
"""How the API server begins where other managers own fields; other conflicts pass."""
REFUSED_AGAIN_SECONDS = 300.0
"""What the API server refused is not sent again before this, unless it changed."""


@dataclass(slots=True)
class _Memory:
    """What one process remembers of a resource; nothing breaks when it is lost."""

    uid: str
    history: History = field(default_factory=History)
    unsettled: report.Unsettled = field(default_factory=dict)
    tolerated: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: dict[str, tuple[float, Trouble]] = field(default_factory=dict)
    """By the hash of a manifest: when, and why."""
    parsed: tuple[str, InferenceDeployment] | None = None
    """The resource at a resourceVersion."""
    settled: tuple[tuple[str, int, Surroundings], Plan] | None = None
    """The last plan where it was empty, and what it was made from."""
    since: float = field(default_factory=time.monotonic)
    """When this process first saw the resource."""
    written: float = 0.0
    """When its status was last written."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the metrics say of a resource."""

    phase: str
    desired: int
    ready: int


class Reconciler:
    """Makes the cluster what each resource says."""

    def __init__(self, cluster: Cluster, cache: Cache, loads: Loads, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        """Replaced as a whole when something of it changes; every resource then gets a turn."""
        self.figures: dict[Key, Figures] = {}
        """For the metrics."""
        self._cluster = cluster
        self._cache = cache
        self._loads = loads
        self._memories: dict[Key, _Memory] = {}

    async def turn(self, key: Key) -> float | None:
        """Look at one resource and do what is to be done; looks at Redis bring further turns by themselves."""
        body = self._cache.resources.get(key)
        if body is None:
            self._forget(key)
            return None
        if body["metadata"].get("deletionTimestamp"):
            return None  # what it owns goes with it; nothing of ours holds it up
        memory = self._memory(key, body["metadata"]["uid"])
        try:
            resource = _parse(body, memory)
        except InvalidConfig as error:
            await self._report_degraded(body, Reason.INVALID_SPEC, "; ".join(error.problems)[:1000])
            return None
        if self.surroundings.lacks_redis and resource.spec.redis is None:
            missing = f"the operator's own Redis Secret {self.surroundings.redis_key} with the key url is not there"
            await self._report_degraded(body, Reason.NO_SECRET, f"{missing}: create it; until then nothing is changed")
            return None
        redis = redis_of(resource, own_keys=self.surroundings.redis_keys)
        own = self.surroundings.redis if resource.spec.redis is None else None
        load = self._loads.last(key, redis, resource.queue_name, own).own(self._cache.pods(key))
        scaling = await self._scale(resource, load, memory)
        wanted = self._plan(key, resource, load, memory)
        refused = await self._execute(resource, wanted, memory)
        world = self._world(resource, wanted, load, refused)
        again = await self._report(world, wanted.files[wanted.version], scaling, memory)
        return REFUSED_AGAIN_SECONDS if refused and again is None else again

    def _plan(self, key: Key, resource: InferenceDeployment, load: Load, memory: _Memory) -> Plan:
        """What is to be written. A plan that was empty is so while nothing changed that it was made from: with nothing
        to write, the load has no say in it.
        """
        version = memory.parsed[0] if memory.parsed is not None else ""
        read = version, self._cache.revision(key), self.surroundings
        if memory.settled is not None and memory.settled[0] == read:
            return memory.settled[1]
        snapshot = Snapshot(
            uid=resource.metadata.uid,
            children=self._cache.children(key),
            pods=self._cache.pods(key),
            tolerated=memory.tolerated,
        )
        wanted = plan(resource, snapshot, self.surroundings, load)
        memory.settled = None if wanted else (read, wanted)
        return wanted

    async def _scale(self, resource: InferenceDeployment, load: Load, memory: _Memory) -> ScalingStatus | None:
        """Write the replicas that scaling asks for; the change comes back as an event."""
        scaling, replicas = resource.spec.scaling, resource.spec.replicas
        if scaling is None:
            memory.history = History()
            return None
        key = Key(resource.metadata.namespace, resource.metadata.name)
        deployment = self._cache.children(key).get((DEPLOYMENT.name, key.name))
        ready = int(((deployment or {}).get("status") or {}).get("readyReplicas") or 0)
        decision = scale(
            scaling, replicas=replicas, ready=ready, load=load, now=time.monotonic(), history=memory.history
        )
        memory.history = decision.history
        if decision.replicas != replicas:
            log.info("scaled", resource=str(key), replicas=decision.replicas, before=replicas, because=decision.because)
            await self._cluster.scale(key, decision.replicas)
            sentence = f"Scaled from {replicas} to {decision.replicas} replicas: {decision.because}"
            self._cluster.post_event(event(resource.metadata, "Scaled", sentence, now=time.time()))
        return ScalingStatus(replicas=decision.replicas, because=decision.because[:1024])

    async def _execute(self, resource: InferenceDeployment, wanted: Plan, memory: _Memory) -> Trouble | None:
        """Write what the plan says; give what the API server refused for good."""
        for touch in wanted.costs:
            await self._cluster.annotate_pod(touch.key, touch.annotations)
        refused: Trouble | None = None
        failed: OperatorError | None = None
        done: list[str] = []
        for step in wanted.apply:
            try:
                trouble = await self._apply(step, memory)
            except (ClusterUnavailable, Conflict) as error:
                if isinstance(error, ClusterUnavailable) and not error.is_about_one:
                    raise
                failed = failed or error  # the other children need not wait for this one
                continue
            refused = refused or trouble
            if trouble is None:
                done.append(step.because)
        for gone in wanted.delete:
            await self._cluster.delete(gone.kind, gone.key, gone.uid)
            done.append(gone.because)
        for touch in wanted.touch:
            await self._cluster.annotate_pod(touch.key, touch.annotations)
        if done:
            log.info("applied", resource=f"{resource.metadata.namespace}/{resource.metadata.name}", because=done)
            self._cluster.post_event(event(resource.metadata, "Applied", "; ".join(done), now=time.time()))
        if failed is not None:
            raise failed
        return refused

    async def _apply(self, step: Apply, memory: _Memory) -> Trouble | None:
        marker = step.manifest["metadata"]["annotations"][SPEC_HASH]
        known = memory.refused.get(marker)
        if known is not None and time.monotonic() - known[0] < REFUSED_AGAIN_SECONDS:
            return known[1]
        name = step.manifest["metadata"]["name"]
        try:
            answer = await self._write_child(step)
        except Invalid as error:
            trouble = Trouble(Reason.INVALID_POD, f"{step.kind.name} {name} was refused: {error.message}")
        except NotFound:
            if not step.kind.is_optional:
                raise
            return None  # the kind went away; the next audit sees that
        except Conflict as error:
            if step.force or OWNED_BY_OTHERS not in error.message:
                raise
            said = f"{step.kind.name} {name} exists and is not Ballast's: rename it or this resource ({error.message})"
            trouble = Trouble(Reason.NAME_TAKEN, said)
        else:
            memory.refused.pop(marker, None)
            if step.kind != SECRET:
                self._cache.put(step.kind, answer)
                self._tolerate(step, answer, marker, memory)
            return None
        memory.refused[marker] = (time.monotonic(), trouble)
        log.warning("refused by the API server", kind=step.kind.name, name=name, because=trouble.message)
        return trouble

    async def _write_child(self, step: Apply) -> Body:
        try:
            return await self._cluster.apply(step.kind, step.manifest, force=step.force)
        except Invalid:
            # A Service whose port somebody changed would have two ports of one name: the lists are set as a whole.
            if not step.is_repair:
                raise
        return await self._cluster.overwrite(step.kind, step.manifest)

    @staticmethod
    def _tolerate(step: Apply, answer: Body, marker: str, memory: _Memory) -> None:
        """Remember what the cluster makes of a manifest whatever is applied, so that nobody applies it for ever."""
        paths = frozenset(drift(step.manifest, answer))
        if paths and memory.tolerated.get(marker) != paths:
            log.warning("the cluster changes what is applied", kind=step.kind.name, fields=sorted(paths)[:8])
            memory.tolerated[marker] = paths

    def _world(self, resource: InferenceDeployment, wanted: Plan, load: Load, refused: Trouble | None) -> Input:
        """What conditions are judged by: the caches as they are after the writes."""
        key = Key(resource.metadata.namespace, resource.metadata.name)
        deployment = self._cache.children(key).get((DEPLOYMENT.name, key.name))
        now = time.monotonic()
        return Input(resource, deployment, self._cache.pods(key), load, now, wanted.files, refused)

    async def _report(
        self, world: Input, config_hash: str, scaling: ScalingStatus | None, memory: _Memory
    ) -> float | None:
        """Write the status where it says something new; gives the seconds that something small may wait."""
        resource = world.resource
        verdicts, memory.unsettled = report.settle(conditions(world), resource.status, memory.unsettled, world.now)
        status = report.status(world, verdicts, config_hash=config_hash, scaling=scaling, now=time.time())
        key = Key(resource.metadata.namespace, resource.metadata.name)
        self.figures[key] = Figures(phase(status), resource.spec.replicas, status.ready_replicas)
        if status == resource.status:
            return None
        wait = report.patience(
            resource.status, status, world.load, seen=world.now - memory.since, written=world.now - memory.written
        )
        if wait > 0:
            return wait
        memory.written = world.now
        await self._write(resource.metadata, resource.status, status)
        return None

    async def _write(self, metadata: Metadata, before: Status, status: Status) -> None:
        try:
            answer = await self._cluster.apply_status(report.status_manifest(metadata, status))
        except NotFound:
            return  # it was deleted meanwhile
        self._cache.put(INFERENCE_DEPLOYMENT, answer)
        for condition in report.news(before, status):
            sentence = f"{condition.type} is {condition.status}: {condition.message}"
            is_bad = report.is_bad(condition)
            self._cluster.post_event(event(metadata, condition.reason, sentence, now=time.time(), is_bad=is_bad))

    async def _report_degraded(self, body: Body, reason: Reason, message: str) -> None:
        """Say why a resource cannot be worked on, as one that this version does not take, and leave its pods alone."""
        verdict = Verdict("True", reason, message)
        metadata, before = Metadata.model_validate(body["metadata"]), Status.model_validate(body.get("status") or {})
        status = report.with_condition(
            before, ConditionType.DEGRADED, verdict, generation=metadata.generation, now=time.time()
        )
        desired = int(body["spec"].get("replicas", 1))
        self.figures[Key(metadata.namespace, metadata.name)] = Figures(phase(status), desired, status.ready_replicas)
        if status != before:
            await self._write(metadata, before, status)

    def _memory(self, key: Key, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = _Memory(uid)
        return memory

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self.figures.pop(key, None)
        self._loads.forget(key)


def _parse(body: Body, memory: _Memory) -> InferenceDeployment:
    version = body["metadata"]["resourceVersion"]
    if memory.parsed is None or memory.parsed[0] != version:
        memory.parsed = (version, InferenceDeployment.read(body, body["metadata"]["name"]))
    return memory.parsed[1]


def phase(status: Status) -> str:
    """One word for the metrics."""
    says = {ConditionType(condition.type): condition.status for condition in status.conditions}
    if says.get(ConditionType.DEGRADED) == "True":
        return "Degraded"
    if says.get(ConditionType.READY) != "True":
        return "NotReady"
    return "Progressing" if says.get(ConditionType.PROGRESSING) == "True" else "Ready"
