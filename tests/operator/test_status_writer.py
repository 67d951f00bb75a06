"""What is written into the status of a resource that cannot be reconciled, or that is gone when it is written."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from queue_objects import make_status
from reconciled import UNPLANNABLE, make_reconciler

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.metadata import Metadata
from ballast_api.names import INSTANCE_LABEL, NAME_LABEL, RAY_HEAD_LABEL, RAY_LABEL, WORKER
from ballast_api.status import ClassSlots, Condition, Status
from ballast_operator import report
from ballast_operator.cache import Cache
from ballast_operator.conditions.given import ConditionValue
from ballast_operator.context import OperatorContext
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, Conflict, Forbidden, Invalid
from ballast_operator.kinds import DEPLOYMENT, INFERENCE_DEPLOYMENT, POD, RAY_SERVICE, SERVICE, Body, Key, Kind
from ballast_operator.poll_result import PollResult, Problem
from ballast_queue.job import RequestCounts
from ballast_queue.status import ClassLoad, QueueStats, WorkerStatus

LLM = Key(INFERENCE_DEPLOYMENT, "ns", "llm")
CONTEXT = OperatorContext(image="worker:1", kinds=frozenset({"RayService"}))
QUEUE = QueueStats(
    at=0, items=RequestCounts(), inbox=0, oldest_waiting_seconds=0, dead_letters=0, jobs_at_risk=0, jobs={}
)
VERSIONS = itertools.count(1)
GITOPS = Path(__file__).parents[2] / "docs" / "how-to" / "gitops.md"
SLOTS = ClassSlots(online=7, offline=1)
READY = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
GONE = {"namespace": "ns", "name": "llm", "uid": "u"}


def make_object(kind: Kind, name: str, **content: Any) -> Body:
    """Return an object of the resource `llm`, newer than all others."""
    labels = {NAME_LABEL: WORKER, INSTANCE_LABEL: "llm", RAY_LABEL: "llm"}
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(next(VERSIONS)), "labels": labels}
    metadata |= {"ownerReferences": [{"uid": "u"}], "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content}


def newer(body: Body, about: Body | None = None, /, **content: Any) -> Body:
    """Return another version of an object, with changes of its metadata and its content."""
    return body | content | {"metadata": body["metadata"] | (about or {}) | {"resourceVersion": str(next(VERSIONS))}}


@dataclass
class FakeCluster:
    """Accepts every write, except of children of the kind `broken`. It keeps no child."""

    cache: Cache
    statuses: list[Status] = field(default_factory=list)
    broken: Kind | None = None
    meanwhile: Callable[[], None] = lambda: None
    """Called while a child is written."""
    may_scale: bool = False
    may_report: bool = True
    events: list[Body] = field(default_factory=list)

    async def apply_status(self, key: Key, manifest: Body) -> Body:
        if not self.may_report:
            raise Forbidden("apply_status", 403, "cannot patch inferencedeployments/status")
        self.statuses.append(Status.model_validate(manifest["status"]))
        return newer(self.cache.resources[key], status=manifest["status"])

    async def apply(self, key: Key, manifest: Body, *, uid: str | None) -> Body:
        if key.kind == self.broken:
            raise ClusterUnavailable("the API server answered 500", is_about_one=True)
        self.meanwhile()
        about = {"uid": key.name, "resourceVersion": str(next(VERSIONS)), "creationTimestamp": "2026-01-01T00:00:00Z"}
        return manifest | {"metadata": manifest["metadata"] | about}

    async def scale(self, _key: Key, replicas: int, *, version: str) -> None:
        found = self.cache.resources[LLM]
        if version != found["metadata"]["resourceVersion"]:
            raise Conflict("scale", 409, "the object has been modified")
        if not self.may_scale:
            raise ClusterRefused("scale", 403, "a webhook refuses it")
        self.cache.put(INFERENCE_DEPLOYMENT, newer(found, spec=found["spec"] | {"replicas": replicas}))

    async def delete(self, *_: object) -> None:
        raise Forbidden("delete", 403, "no verb delete")

    async def annotate(self, *_: object) -> None:
        raise ClusterRefused("annotate", 403, "a webhook refuses it")

    async def metadata(self, _: Key) -> None:
        return None

    def post_event(self, body: Body) -> None:
        self.events.append(body)


@dataclass
class FakeGrants:
    """Refuses the Secrets of the resource while `is_refusing`, and cannot read them while `is_failing`."""

    is_refusing: bool = False
    is_failing: bool = False
    least_seconds = 15.0

    async def refusal(self, *_: object) -> ConditionValue | None:
        if self.is_failing:
            raise ClusterUnavailable("the API server answered 500", is_about_one=True)
        reason = ConditionReason.SECRET_NOT_ALLOWED
        return ConditionValue("True", reason, "no label") if self.is_refusing else None


class FakePoller:
    """No worker reports, unless a test sets a result."""

    result = PollResult(0.0, problem=Problem(ConditionReason.NO_REDIS, "no Redis is configured"))
    num_hurried = 0

    def last(self, *_: object) -> PollResult:
        return self.result

    def forget(self, _: Key) -> None:
        pass

    def hurry(self, _: Key) -> None:
        self.num_hurried += 1


class Bench:
    """A reconciler with one resource, which is reported as ready before it is held."""

    def __init__(self, **spec: Any) -> None:
        self.cache = Cache()
        self.cluster, self.grants, self.poller = FakeCluster(self.cache), FakeGrants(), FakePoller()
        self.start()
        self.spec = {"model": {"uri": "file:///m"}, "gpu": {"count": 0}, "replicas": 2} | spec
        self.generation = 0

    def start(self) -> None:
        """Start the operator."""
        self.reconciler = make_reconciler(
            self.cache, self.cluster, poller=self.poller, grants=self.grants, context=CONTEXT
        )

    def put(self, uid: str = "u", **spec: Any) -> None:
        """Change the spec."""
        self.generation += 1
        self.spec |= spec
        body = make_object(INFERENCE_DEPLOYMENT, "llm", spec=self.spec)
        body["metadata"] |= {"uid": uid, "generation": self.generation}
        body["status"] = (self.cache.resources.get(LLM) or {}).get("status") or {"operator": "r"}
        self.cache.put(INFERENCE_DEPLOYMENT, body)

    def count(self, ready: int, *, total: int = 2) -> None:
        """Let the Deployment report that it has `total` pods of its newest version, of which `ready` are ready."""
        figures = {"replicas": total, "updatedReplicas": total, "readyReplicas": ready, "availableReplicas": ready}
        status = figures | {"observedGeneration": 1, "unavailableReplicas": total - ready}
        self.cache.put(DEPLOYMENT, newer(self.deployment, {"generation": 1}, status=status))

    @property
    def deployment(self) -> Body:
        return self.cache.children(LLM)[Key(DEPLOYMENT, "ns", "llm")]

    def poll(self, *workers: WorkerStatus, problem: Problem | None = None, age: float = 0.0) -> None:
        """Let the last poll have this result."""
        queue = QUEUE if problem is None else None
        self.poller.result = PollResult(time.monotonic() - age, workers=workers, queue=queue, problem=problem)

    def fail(self, times: int = 3) -> list[Status]:
        """Reconcile while the API server refuses a call. Return the statuses that are written meanwhile."""
        before = len(self.cluster.statuses)
        for _ in range(times):
            with pytest.raises((ClusterUnavailable, ClusterRefused)):
                asyncio.run(self.reconciler.reconcile(LLM))
        return self.cluster.statuses[before:]

    def reconcile(self) -> Status:
        """Reconcile twice. Return the reported status, which the second time does not write again."""
        asyncio.run(self.reconciler.reconcile(LLM))
        before = len(self.cluster.statuses)
        asyncio.run(self.reconciler.reconcile(LLM))
        assert len(self.cluster.statuses) == before, "nothing changed, so nothing is written"
        return Status.model_validate(self.cache.resources[LLM]["status"])

    def serve_with_slots(self) -> None:
        """Let one worker be ready and report its slots, after a poll without it."""
        self.poll()
        self.reconcile()
        self.count(1, total=1)
        self.reconcile()
        self.cache.put(POD, make_object(POD, "p", spec={}, status=READY))
        learned = ClassLoad(reserved=0)  # by the batch ceiling, which changes from poll to poll
        self.poll(make_status(address="http://10.0.0.1:8000", offline=learned, offline_reserved=1))

    def serve(self) -> Status:
        """Create the resource, and let two workers serve."""
        self.put()
        self.reconcile()
        self.count(2)
        return self.reconcile()


UNREACHABLE = Problem(ConditionReason.REDIS_UNREACHABLE, "Redis does not answer")
NO_WORKER: dict[str, tuple[dict[str, Any], int, dict[str, Any], bool]] = {
    "scaled to zero": ({"replicas": 0}, 0, {}, False),
    "scaled to zero, Redis is down": ({"replicas": 0}, 0, {"problem": UNREACHABLE}, False),
    "all crashed": ({}, 0, {}, False),
    "all crashed, Redis is down": ({}, 0, {"problem": UNREACHABLE}, True),
    "all crashed, the poll is old": ({}, 0, {"age": 1000.0}, True),
    "a ready pod is silent": ({}, 1, {}, True),
}


@pytest.mark.parametrize("case", NO_WORKER)
def test_the_slots_of_workers_that_are_gone_are_not_reported(case: str) -> None:
    spec, ready, poll, is_kept = NO_WORKER[case]
    bench = Bench(replicas=1)
    bench.put()
    bench.serve_with_slots()
    assert bench.reconcile().slots == SLOTS

    bench.put(**spec)
    bench.cache.drop(POD, bench.cache.pods(LLM)[0])
    bench.poll(**poll)
    bench.count(ready)
    found = bench.reconcile()

    assert found.slots == (SLOTS if is_kept else None)
    assert ("slots" in bench.cache.resources[LLM]["status"]) == is_kept


def test_a_resource_that_returns_from_zero_waits_again_for_the_figures_of_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(replicas=1)
    bench.put()
    bench.serve_with_slots()
    assert said(bench.reconcile())["Ready"] == ("True", "Serving")
    bench.put(replicas=0)
    bench.cache.drop(POD, bench.cache.pods(LLM)[0])
    bench.poll()
    bench.count(0, total=0)
    assert said(bench.reconcile())["Ready"] == ("True", "ScaledToZero")
    bench.put(replicas=1)
    bench.count(0, total=1)
    assert said(bench.reconcile())["Ready"] == ("False", "Starting")
    before, hurried = time.monotonic, bench.poller.num_hurried
    monkeypatch.setattr(time, "monotonic", lambda: before() + 60)  # a minute passes

    bench.poll()
    bench.count(1, total=1)
    waits = bench.reconcile()
    bench.serve_with_slots()
    found = bench.reconcile()

    assert (said(waits)["Ready"], bench.poller.num_hurried > hurried) == (("False", "Starting"), True)
    assert (said(found)["Ready"], found.slots) == (("True", "Serving"), SLOTS)


def said(status: Status) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in status.conditions}


STALE = ("Unknown", "Stale")
HELD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "a Secret that is not allowed": ({}, True, "SecretNotAllowed"),
    "an account that is not permitted": ({"template": {"serviceAccountName": "x"}}, False, "NotPermitted"),
    "an invalid spec": ({"slots": "many"}, False, "InvalidSpec"),
    "a spec without children": (UNPLANNABLE, False, "InvalidSpec"),
}


@pytest.mark.parametrize("case", HELD)
def test_the_status_of_a_resource_that_is_not_reconciled_follows_its_pods(case: str) -> None:
    spec, is_refusing, reason = HELD[case]
    bench = Bench()
    served = bench.serve()
    assert (said(served)["Ready"], served.workers) == (("True", "Serving"), "2/2")

    bench.grants.is_refusing = is_refusing
    bench.put(**spec)
    held = bench.reconcile()
    bench.count(0)
    gone = bench.reconcile()

    assert (said(held)["Ready"], held.workers, held.ready_replicas) == (("True", "Serving"), "2/2", 2)
    assert said(gone) == {
        "Ready": ("False", "Starting"),
        "Progressing": ("True", "Starting"),
        "Degraded": ("True", reason),
        "ConfigApplied": STALE,
        "OfflineReservationSatisfied": STALE,
        "SLOMet": STALE,
        "DeadlineAtRisk": STALE,
    }
    assert (gone.workers, gone.replicas, gone.ready_replicas, gone.updated_replicas) == ("0/2", 2, 0, 2)
    assert bench.reconciler.figures[LLM].ready == 0, "the metric that an alert reads"
    assert gone.observed_generation == bench.generation


@pytest.mark.parametrize("case", HELD)
def test_what_describes_the_pods_of_a_held_resource_does_not_describe_its_new_spec(case: str) -> None:
    """`kubectl wait` compares the observedGeneration of the condition with the generation of the resource."""
    spec, is_refusing, _ = HELD[case]
    bench = Bench()
    assert said(bench.serve())["Progressing"] == ("False", "Complete")

    bench.grants.is_refusing = is_refusing
    bench.put(**spec, replicas=3, rollout={"maxUnavailable": 1})
    held = bench.reconcile()

    assert (said(held)["Ready"], said(held)["Progressing"]) == (("True", "Serving"), STALE)
    generations = {each.type: each.observed_generation for each in held.conditions}
    assert generations.pop("Degraded") == bench.generation == 2
    assert set(generations.values()) == {1}


@pytest.mark.parametrize("case", HELD)
def test_the_pods_of_a_held_resource_that_become_ready_one_after_another_are_reported_together(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, is_refusing, _ = HELD[case]
    bench = Bench(replicas=4)
    bench.serve()
    bench.grants.is_refusing = is_refusing
    bench.put(**spec)
    bench.count(1, total=4)
    bench.reconcile()
    written = len(bench.cluster.statuses)

    for ready in (2, 3):
        bench.count(ready, total=4)
        again = asyncio.run(bench.reconciler.reconcile(LLM))
        assert 0 < (again or 0.0) <= report.STEP_SECONDS
    assert len(bench.cluster.statuses) == written
    monkeypatch.setattr(report, "STEP_SECONDS", 0.0)  # the time has passed
    assert bench.reconcile().ready_replicas == 3


REVIEWED = {
    "type": "Reviewed",
    "status": "True",
    "reason": "Policy",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
"""A condition of another program."""


@pytest.mark.parametrize("more", [{}, {"slots": "many"}], ids=["a reconciled resource", "a held resource"])
def test_what_others_add_to_the_status_is_neither_evaluated_nor_written(more: dict[str, Any]) -> None:
    """Server-side apply keeps it. An operator of a newer version may have added the field."""
    bench = Bench()
    bench.serve()
    bench.put(**more)
    bench.reconcile()
    body = bench.cache.resources[LLM]
    status = body["status"] | {"conditions": [*body["status"]["conditions"], REVIEWED | {"newer": 1}], "newer": 1}
    bench.cache.put(INFERENCE_DEPLOYMENT, newer(body, status=status))
    written = len(bench.cluster.statuses)

    assert asyncio.run(bench.reconciler.reconcile(LLM)) is None
    assert len(bench.cluster.statuses) == written
    assert bench.reconciler.figures[LLM].phase in {"Ready", "Degraded"}


def test_an_invalid_resource_is_ready_by_its_own_fields_as_far_as_they_are_valid() -> None:
    bench = Bench()
    bench.serve()
    bench.count(1)

    bench.put(slots="many", rollout={"maxUnavailable": 1})
    tolerant = bench.reconcile()
    bench.put(rollout={"maxUnavailable": "many"})
    strict = bench.reconcile()

    assert said(tolerant)["Ready"] == ("True", "Serving")
    assert said(strict)["Ready"] == ("False", "NotEnoughReady")


def kstatus(bench: Bench) -> str:
    """Return what kstatus finds, as its `checkGenericProperties` and then its `checkReadyCondition` do."""
    body = bench.cache.resources[LLM]
    found = {each["type"]: each["status"] for each in body["status"]["conditions"]}
    if body["status"]["observedGeneration"] != body["metadata"]["generation"] or found.get("Reconciling") == "True":
        return "InProgress"
    if found.get("Stalled") == "True":
        return "Failed"
    return "Current" if found["Ready"] == "True" else "InProgress"


def argo_cd(bench: Bench, lua: redis.Redis) -> str:
    """Return what Argo CD finds with the health check of the documentation. Valkey runs it, as it has Lua."""
    check = GITOPS.read_text().partition("InferenceDeployment: |\n")[2].partition("```")[0]
    body = json.dumps(bench.cache.resources[LLM])
    program = f"local obj = cjson.decode(ARGV[1])\nlocal function check()\n{check}\nend\nreturn check().status"
    return str(cast(bytes, lua.eval(program, 0, body)).decode())


def test_kstatus_and_argo_cd_see_a_rollout_and_its_failure_while_old_workers_serve(valkey: Any) -> None:
    bench, lua = Bench(), redis.Redis.from_url(valkey.url)
    found: list[tuple[str, str]] = []

    def look() -> None:
        found.append((kstatus(bench), argo_cd(bench, lua)))

    bench.serve()
    look()
    bench.put(template={"labels": {"a": "b"}})
    look()
    bench.reconcile()
    bench.count(2, total=3)
    bench.reconcile()
    look()
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    bench.cache.put(DEPLOYMENT, newer(bench.deployment, status=bench.deployment["status"] | {"conditions": [stuck]}))
    bench.reconcile()
    look()
    bench.count(2)
    bench.reconcile()
    look()
    bench.put(template={"serviceAccountName": "x"})
    bench.reconcile()
    look()

    lua.close()
    current, going, failed = ("Current", "Healthy"), ("InProgress", "Progressing"), ("Failed", "Degraded")
    assert found == [current, going, going, failed, current, failed]
    assert said(Status.model_validate(bench.cache.resources[LLM]["status"]))["Ready"][0] == "True"


COMPLETE, ROLLING = ("False", "Complete", 2), ("True", "RollingOut", 2)
FINE = ("False", "Healthy")
STANDARD: dict[str, tuple[tuple[str, str, int], tuple[str, str], list[tuple[str, str]]]] = {
    "nothing goes on": (COMPLETE, FINE, []),
    "a pod fails after the rollout": (COMPLETE, ("True", "Crashing"), []),
    "no report shows the versions of workers on Ray": (("Unknown", "Stale", 2), FINE, []),
    "a rollout": (ROLLING, FINE, [("Reconciling", "RollingOut")]),
    "a rollout waits for the quota, as for old pods that end": (
        ROLLING, ("True", "Quota"), [("Reconciling", "RollingOut")],
    ),
    "a rollout is stuck": (("False", "RolloutStuck", 2), ("True", "RolloutStuck"), [("Stalled", "RolloutStuck")]),
    "a child has the name of another object": (
        ("False", "NameTaken", 2), ("True", "NameTaken"), [("Stalled", "NameTaken")],
    ),
    "a write fails": (ROLLING, ("True", "NotApplied"), [("Reconciling", "NotApplied")]),
    "a write fails after the rollout": (COMPLETE, ("True", "NotApplied"), [("Reconciling", "NotApplied")]),
    "a new spec is blocked": (("False", "Complete", 1), ("True", "NotPermitted"), [("Stalled", "NotPermitted")]),
    "a new spec is blocked in a rollout": (
        ("True", "RollingOut", 1), ("True", "InvalidSpec"), [("Stalled", "InvalidSpec")],
    ),
    "a new spec waits for a Secret": (
        ("False", "Complete", 1), ("True", "SecretNotAllowed"), [("Reconciling", "SecretNotAllowed")],
    ),
    "the spec in force is blocked": (("Unknown", "Stale", 2), ("True", "NotPermitted"), [("Stalled", "NotPermitted")]),
    "the spec in force conflicts with another": (
        ("Unknown", "Stale", 2), ("True", "QueueConflict"), [("Reconciling", "QueueConflict")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STANDARD)
def test_the_standard_condition_follows_from_the_status(case: str) -> None:
    (status, reason, generation), degraded, wanted = STANDARD[case]
    found = [make_condition("Progressing", status, reason, generation), make_condition("Degraded", *degraded, 2)]
    reported = Status(observed_generation=2, conditions=tuple(found))

    content = report.status_manifest(Metadata(name="llm"), reported)["status"]

    assert [(each["type"], each["reason"]) for each in content["conditions"][2:]] == wanted
    assert all((each["status"], each["observedGeneration"]) == ("True", 2) for each in content["conditions"][2:])


def make_condition(kind: str, status: Any, reason: str, generation: int) -> Condition:
    at = "2026-01-01T00:00:00Z"
    return Condition(type=kind, status=status, reason=reason, last_transition_time=at, observed_generation=generation)


def test_a_resource_that_is_blocked_at_the_same_generation_has_a_standard_condition_also_after_an_upgrade() -> None:
    bench = Bench()
    bench.serve()
    bench.grants.is_refusing = True
    bench.reconcile()
    written, body = len(bench.cluster.statuses), bench.cache.resources[LLM]
    assert kstatus(bench) == "InProgress"

    older = [each for each in body["status"]["conditions"] if each["type"] != "Reconciling"]
    bench.cache.put(INFERENCE_DEPLOYMENT, newer(body, status=body["status"] | {"conditions": older}))
    bench.start()
    assert kstatus(bench) == "Current", "as an older operator wrote it"
    bench.reconcile()

    assert (kstatus(bench), len(bench.cluster.statuses)) == ("InProgress", written + 1)


def test_a_resource_that_was_never_reconciled_is_not_ready_and_rolls_nothing_out() -> None:
    bench = Bench(template={"serviceAccountName": "x"})
    bench.put()

    found = bench.reconcile()

    assert said(found)["Ready"] == ("False", "Starting")
    assert said(found)["Progressing"] == STALE
    assert found.workers == "0/2"
    assert {each.observed_generation for each in found.conditions if each.type != "Degraded"} == {0}


def test_the_workers_of_a_held_resource_on_ray_are_counted_and_their_versions_are_unknown() -> None:
    bench = Bench(runtime={"ray": {}}, template={"image": "ray:1"}, slots="many")
    bench.put()
    ray = {"rayClusterConfig": {"workerGroupSpecs": [{"groupName": "workers", "replicas": 2}]}}
    bench.cache.put(RAY_SERVICE, make_object(RAY_SERVICE, "llm", spec=ray))
    for name in "ab":
        bench.cache.put(POD, make_object(POD, name, spec={}, status=READY))
    bench.cache.resources[LLM]["status"]["updatedReplicas"] = 1

    found = bench.reconcile()

    assert said(found)["Ready"] == ("True", "Serving")
    assert said(found)["Progressing"] == STALE
    assert (found.workers, found.updated_replicas) == ("2/2", 1)


def test_a_head_that_goes_is_exported_while_degraded_shows_another_problem() -> None:
    bench = Bench(runtime={"ray": {}}, template={"image": "ray:1"}, slots="many")
    bench.put()
    ray: dict[str, Any] = {"rayClusterConfig": {}}
    active = {"rayClusterName": "llm-1", "rayClusterStatus": {"desiredWorkerReplicas": 2}}
    bench.cache.put(RAY_SERVICE, make_object(RAY_SERVICE, "llm", spec=ray, status={"activeServiceStatus": active}))
    head = make_object(POD, "head", spec={}, status={"conditions": [{"type": "Ready", "status": "True"}]})
    head["metadata"]["labels"] = {RAY_HEAD_LABEL: "llm", "ray.io/cluster": "llm-1"}
    bench.cache.put(POD, head)
    found: list[tuple[str, Any]] = []
    for _ in range(2):
        reason = said(bench.reconcile())["Degraded"][1]
        found.append((reason, bench.reconciler.figures[LLM].ray))
        bench.cache.drop(POD, head)

    assert found == [("InvalidSpec", {"head": True}), ("InvalidSpec", {"head": False})]


def test_a_resource_that_is_reconciled_again_is_evaluated_again() -> None:
    bench = Bench()
    served = said(bench.serve())
    bench.put(slots="many")
    assert said(bench.reconcile())["SLOMet"] == STALE

    bench.put(slots=4)
    bench.reconcile()
    bench.count(2)
    assert said(bench.reconcile()) == served


def test_a_deletion_that_is_refused_is_reported_and_the_status_follows_the_pods() -> None:
    bench = Bench(network={"policy": True})
    bench.serve()
    bench.put(network={"policy": False})
    bench.count(1)
    degraded = bench.fail()[-1].condition(ConditionType.DEGRADED)

    assert degraded is not None
    assert "no verb delete" in degraded.message
    assert said(bench.cluster.statuses[-1])["Progressing"] == ("True", "RollingOut")


@pytest.mark.parametrize("uid", ["u", "u2"], ids=["the same resource", "a new resource of its name"])
def test_a_child_that_hangs_in_deletion_is_reported_and_no_rollout_is_complete(uid: str) -> None:
    bench = Bench()
    bench.serve()
    more = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["backup.example/hold"]}
    bench.cache.put(DEPLOYMENT, newer(bench.deployment, more))
    bench.put(uid=uid, slots=7)
    status = bench.reconcile()
    degraded = status.condition(ConditionType.DEGRADED)

    assert degraded is not None
    assert degraded.message.startswith(
        "Deployment llm is being deleted and waits for its finalizers (backup.example/hold)"
    )
    assert said(status)["Degraded"] == ("True", "NotApplied")
    assert said(status)["Progressing"][1] != "Complete"


@pytest.mark.parametrize(
    ("before", "spec"),
    [(2, {"scaling": {"minReplicas": 3, "maxReplicas": 4}}), (4, {"replicas": 1, "scaling": {"maxReplicas": 4}})],
    ids=["a decision", "the first replicas"],
)
def test_children_are_restored_while_the_api_server_refuses_to_scale(before: int, spec: dict[str, Any]) -> None:
    bench = Bench(replicas=before)
    bench.serve()
    service = Key(SERVICE, "ns", "llm")
    bench.cache.drop(SERVICE, bench.cache.children(LLM)[service])
    bench.put(**spec)
    written = bench.fail(times=2)

    assert service in bench.cache.children(LLM)
    assert bench.deployment["spec"]["replicas"] == before
    assert said(written[-1])["Degraded"] == ("True", "NotApplied")

    bench.cluster.may_scale = True
    asyncio.run(bench.reconciler.reconcile(LLM))

    assert bench.cache.resources[LLM]["spec"]["replicas"] == max(before, 3)


@pytest.mark.parametrize(("on_ray", "most", "begun"), [(False, 9, 8), (False, 6, 6), (True, 9, 8)])
def test_scaling_begins_with_the_workers_that_are_there(on_ray: bool, most: int, begun: int) -> None:
    """`replicas: 8` leaves the file when `scaling` is added, and the API server sets the default."""
    ray = {"runtime": {"ray": {}}, "template": {"image": "ray:1"}} if on_ray else {}
    bench = Bench(replicas=8, **ray)
    bench.cluster.may_scale = True
    bench.put()
    asyncio.run(bench.reconciler.reconcile(LLM))

    def made() -> int:
        children = {key.kind: body["spec"] for key, body in bench.cache.children(LLM).items() if "spec" in body}
        if on_ray:
            return int(children[RAY_SERVICE]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"])
        return int(children[DEPLOYMENT]["replicas"])

    found = []
    for spec in ({"replicas": 1, "scaling": {"maxReplicas": most}}, {"replicas": begun}, {"replicas": 2}):
        if found:
            bench.start()  # an operator that starts continues with the replicas of the last decision
        bench.put(**spec)
        asyncio.run(bench.reconciler.reconcile(LLM))
        found.append((bench.cache.resources[LLM]["spec"]["replicas"], made()))

    assert found == [(begun, 8), (begun, begun), (2, 2)]


def test_the_reason_of_the_same_replicas_follows_what_is_found_and_not_each_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bench = Bench(replicas=1, scaling={"maxReplicas": 1})
    bench.put()
    bench.cache.put(POD, make_object(POD, "p", spec={}, status=READY))
    found = []
    polling = Problem(ConditionReason.PENDING, "workers and queue have not been polled yet")
    for seconds, requests in ((0, 3), (1000, 1), (0, 2), (400, 4), (10, 90), (10, 3), (400, 5), (400, None)):
        now += seconds
        if requests == 90:  # the operator restarts, and polls nothing before its first reconciliation
            bench.start()
            bench.poll(problem=polling)
            status = bench.reconcile()
            assert status.scaling is not None
            assert status.scaling.because == found[-1]
        if requests is None:
            bench.poll(problem=UNREACHABLE)
        else:
            load = ClassLoad(running=requests, requests_per_second=requests)
            bench.poll(make_status(address="http://10.0.0.1:8000", online=load))
        status = bench.reconcile()
        assert status.scaling is not None
        found.append(status.scaling.because)

    few, many = "3 online requests at 3/s", "90 online requests at 90/s"
    unknown = "Redis does not answer; an unknown load does not count as idle"
    begins = [few, few, few, few, many, many, "5 online requests at 5/s", unknown]
    assert all(map(str.startswith, found, begins)), found
    assert found[:4] == [found[0]] * 4, "other figures alone are not written"
    assert "within 1 to 1" in found[4]


def test_what_ray_lacks_is_named_without_progress_and_no_longer_once_a_worker_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KubeRay makes no Ray cluster at first. No event follows, so the operator asks again."""
    bench = Bench(runtime={"ray": {}}, template={"image": "ray:1"})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bench.put()
    bench.reconcile()
    found = []
    for ready in (0, 0, 0, 1, 1, 1, 2):
        now += 100
        if len(found) == 2:
            bench.start()
        for number in range(ready):
            bench.cache.put(POD, make_object(POD, f"p-{number}", spec={}, status=READY))
        again = asyncio.run(bench.reconciler.reconcile(LLM))
        status = Status.model_validate(bench.cache.resources[LLM]["status"])
        found.append((said(status)["Degraded"][1], again is not None))

    waits, lacks = ("Healthy", True), ("RayFailed", True)
    assert found == [waits, lacks, lacks, waits, waits, lacks, ("Healthy", False)]


def test_a_pod_that_refuses_its_annotation_holds_up_no_child() -> None:
    bench = Bench()
    bench.serve()
    bench.cache.put(POD, make_object(POD, "p", spec={}, status={}))
    bench.put(replicas=1)
    written = bench.fail(times=2)

    assert bench.deployment["spec"]["replicas"] == 1
    assert said(written[-1])["Degraded"] == ("True", "NotApplied")


@pytest.mark.parametrize(("seconds", "num_tried"), [(0, 3), (60, 1)], ids=["at once", "late"])
def test_after_a_write_that_failed_late_no_other_object_of_its_kind_is_written(
    seconds: float, num_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook may delay each of them for a minute."""
    bench, now, tried = Bench(), time.monotonic(), []
    bench.serve()

    async def fails(key: Key, *_: object) -> None:
        nonlocal now
        tried.append(key.name)
        now += seconds
        raise ClusterUnavailable("the API server answered 504", is_about_one=True)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    bench.cluster.annotate = fails  # type: ignore[method-assign]
    for name in ("p", "q", "r"):
        bench.cache.put(POD, make_object(POD, name, spec={}, status={}))
    bench.put(replicas=1)
    for _ in range(2):
        tried.clear()
        bench.fail(times=1)

    assert len(tried) == num_tried
    assert bench.deployment["spec"]["replicas"] == 1


def test_a_child_that_fails_again_and_again_is_reported_with_the_measured_conditions() -> None:
    """The reconciliation reports it and fails then, which is no reason to report that nothing is evaluated."""
    bench = Bench()
    before = said(bench.serve())
    bench.cluster.broken = SERVICE
    bench.put(network={"metricsFrom": [{"podSelector": {}}]})
    after = [said(status) for status in bench.fail(times=4) if said(status)["Degraded"][0] == "True"]

    assert [status["Degraded"] for status in after] == [("True", "NotApplied")]
    assert after[0]["SLOMet"] == before["SLOMet"]


def test_a_failure_does_not_hide_the_problem_of_another_child_and_is_reported_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.serve()
    bench.cluster.broken, usual = DEPLOYMENT, bench.cluster.apply

    async def apply(key: Key, manifest: Body, *, uid: str | None) -> Body:
        if key.kind == SERVICE:
            raise Invalid("apply", 422, "no such field")
        return await usual(key, manifest, uid=uid)

    def fail() -> set[str]:
        return {said(status)["Degraded"][1] for status in bench.fail(times=5)}

    monkeypatch.setattr(bench.cluster, "apply", apply)
    bench.put(network={"metricsFrom": [{"podSelector": {}}]}, template={"labels": {"a": "b"}})
    assert fail() == {"InvalidPod"}
    bench.grants.is_failing = True
    assert fail() == {"NotApplied"}


def test_a_reconciliation_that_fails_again_and_again_leaves_the_measured_conditions_as_they_are() -> None:
    bench = Bench()
    before = said(bench.serve())
    bench.grants.is_failing = True
    assert said(bench.fail()[-1]) == before | {"Degraded": ("True", "NotApplied")}
    bench.count(0)
    gone = bench.fail()[-1]

    assert said(gone) == before | {"Degraded": ("True", "NotApplied"), "Ready": ("False", "Starting")}
    assert gone.workers == "0/2"


@pytest.mark.parametrize(
    ("status", "events"),
    [({}, ["NotApplied"]), ({"operator": "ballast/other"}, [])],
    ids=["its own", "of another release"],
)
def test_a_resource_that_cannot_be_claimed_is_shown_by_an_event_and_the_metrics_unless_another_release_may_have_it(
    status: dict[str, str], events: list[str]
) -> None:
    """Its status would show it, and cannot be written. It is not known whether the other release is gone."""
    bench = Bench()
    bench.put()
    bench.cache.put(
        INFERENCE_DEPLOYMENT, make_object(INFERENCE_DEPLOYMENT, "llm", spec=bench.spec) | {"status": status}
    )
    bench.cluster.may_report = False
    bench.fail(times=4)

    assert [event["reason"] for event in bench.cluster.events] == events
    assert all("cannot patch" in event["message"] for event in bench.cluster.events)
    assert {key: figures.phase for key, figures in bench.reconciler.figures.items()} == dict.fromkeys(
        [LLM] * len(events), "Degraded"
    )


def test_a_resource_that_hangs_in_deletion_has_no_figures() -> None:
    bench = Bench()
    bench.serve()
    body = make_object(INFERENCE_DEPLOYMENT, "llm", spec=bench.spec)
    body["metadata"] |= {"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    bench.cache.put(INFERENCE_DEPLOYMENT, body)
    assert LLM in bench.reconciler.figures
    asyncio.run(bench.reconciler.reconcile(LLM))

    assert LLM not in bench.reconciler.figures


@pytest.mark.parametrize("is_created_again", [False, True])
def test_a_slow_reconciliation_writes_no_status_to_a_resource_that_was_deleted_meanwhile(
    is_created_again: bool,
) -> None:
    """The API server ignores a uid in the status that it is sent, and would write it to a new resource of this name."""
    bench = Bench()
    bench.put()

    def delete() -> None:
        bench.cache.drop(INFERENCE_DEPLOYMENT, {"metadata": GONE})
        if is_created_again:
            bench.put(uid="u2")

    bench.cluster.meanwhile = delete
    asyncio.run(bench.reconciler.reconcile(LLM))

    assert bench.cluster.statuses == []
