"""What the status says, and how rarely it changes."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import resources
from queue_objects import make_status

from ballast_api.conditions import HEALTHY
from ballast_api.conditions import ConditionReason as Reason
from ballast_api.conditions import ConditionType as Type
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.status import Status
from ballast_operator import conditions as checks
from ballast_operator import report
from ballast_operator.children.config import VERSION
from ballast_operator.conditions.chains import CHAINS, conditions
from ballast_operator.conditions.given import ConditionValue, Given
from ballast_operator.content import trimmed
from ballast_operator.kinds import DEPLOYMENT, POD, Body, Key
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot
from ballast_operator.pod_problem import NOT_SERVED_EXIT, TEMPLATE_HASH
from ballast_operator.poll_result import UNPOLLED, FormerQueue, PollResult, Problem
from ballast_operator.resource_status import status as build_status
from ballast_queue.job import RequestCounts
from ballast_queue.settings import InForce
from ballast_queue.status import ClassLoad, QueueStats, ReservationStatus, SloStatus, WorkerStatus
from ballast_worker.errors import NotServed


def make_resource(
    replicas: int = 2, generation: int = 1, gpus: int = 1, slo: dict[str, Any] | None = None, **more: Any
) -> InferenceDeployment:
    spec = {"replicas": replicas, "slo": slo or {"ttftMilliseconds": 500}, "gpu": {"count": gpus}} | more
    return resources.make_resource(about={"generation": generation}, **spec)


def make_deployment(total: int, updated: int, serving: int, **condition: str) -> Body:
    status = {
        "observedGeneration": 1,
        "replicas": total,
        "updatedReplicas": updated,
        "readyReplicas": serving,
        "availableReplicas": serving,
        "unavailableReplicas": total - serving,
        "conditions": [condition] if condition else [],
    }
    metadata = {"generation": 1, "ownerReferences": [{"uid": "u"}]}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": status}


def make_pod(name: str = "p", ip: str = "10.0.0.1", **status: Any) -> Body:
    metadata = {"name": name, "namespace": "ns", "annotations": {VERSION: "v"}}
    return {"metadata": metadata, "status": {"phase": "Running", "podIP": ip} | status}


def ending(pod: Body) -> Body:
    return pod | {"metadata": pod["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}


def make_gated(gate: str, name: str = "g") -> Body:
    """Return the pod as the cache of the operator keeps it."""
    body = make_pod(name, phase="Pending", podIP="") | {"spec": {"schedulingGates": [{"name": gate}], "containers": []}}
    return trimmed(POD, body)


def waiting(reason: str, message: str = "", **more: Any) -> Body:
    return {"name": "worker", "image": "worker:2", "state": {"waiting": {"reason": reason, "message": message}}} | more


def crashed(code: int, message: str = "", *, name: str = "worker", reason: str = "Error") -> Body:
    ended = {"exitCode": code, "reason": reason, "message": message}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"name": name, "restartCount": 3, "state": state, "lastState": {"terminated": ended}}


def at(minute: int, name: str, version: str = "a", **status: Any) -> Body:
    """Return a pod that was created in that minute."""
    found = make_pod(name, **status)
    found["metadata"] |= {"creationTimestamp": f"2026-01-01T00:{minute:02}:00Z", "labels": {TEMPLATE_HASH: version}}
    return found


def failed(minute: int, ended: int, version: str = "a") -> Body:
    """Return a pod that the kubelet evicted."""
    message = 'Usage of EmptyDir volume "models" exceeds the limit "10Gi". '
    times = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": f"2026-01-01T00:{ended:02}:00Z"}]
    return at(minute, f"f{minute}", version, phase="Failed", reason="Evicted", message=message, conditions=times)


def make_worker(**more: Any) -> WorkerStatus:
    values: dict[str, Any] = {
        "address": "http://10.0.0.1:8000", "offline": ClassLoad(running=1, reserved=1), "config_hash": "h",
        "slo": make_slo(100), "device": "cuda", "reservation": make_reservation(1, 1),
    }  # fmt: skip
    return make_status(**values | more)


def make_slo(met: int, judged: int = 100) -> SloStatus:
    return SloStatus(ttft_judged=judged, ttft_met=met, tpot_judged=judged, tpot_met=judged)


def make_reservation(slots: int, in_use: int, *, is_met: bool = True) -> ReservationStatus:
    return ReservationStatus(slots=slots, blocks=slots, chunk=slots, in_use=in_use, is_met=is_met)


DEPLOYED = make_deployment(2, 2, 2)
NOT_MET = make_worker(
    offline=ClassLoad(running=1, waiting=4, reserved=3), reservation=make_reservation(3, 1, is_met=False)
)
NEVER_CLAIMS = make_worker(offline=ClassLoad(reserved=3), reservation=make_reservation(3, 0), can_claim=True)
ENCODER = make_worker(
    offline=ClassLoad(running=1, waiting=2), can_claim=True,
    reservation=make_reservation(3, 1).model_copy(update={"is_met_by_tokens": True}),
)  # fmt: skip
READY_POD = {"conditions": [{"type": "Ready", "status": "True"}]}


def make_poll(*workers: WorkerStatus, depth: int = 0, at_risk: int = 0, **paused: int) -> PollResult:
    items = RequestCounts(total=depth, waiting=depth)
    queue = QueueStats(
        at=0, items=items, inbox=0, oldest_waiting_seconds=0, dead_letters=0, jobs_at_risk=at_risk, jobs={}, **paused
    )
    return PollResult(100.0, workers=workers, queue=queue)


def make_input(*, deployment: Body | None = DEPLOYED, pods: tuple[Body, ...] | None = None, **more: Any) -> Given:
    children = {} if deployment is None else {Key(DEPLOYMENT, "ns", "llm"): deployment}
    values: dict[str, Any] = {
        "resource": make_resource(),
        "snapshot": ClusterSnapshot("u", children, (make_pod(),) if pods is None else pods),
        "plan": ChildrenPlan(files={"v": "h"}, version="v"),
        "poll": make_poll(make_worker()),
        "now": 100.0,
    }
    return Given(**values | more)


DEADLINE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
EARLIER = make_deployment(3, 1, 2) | {"metadata": {"generation": 2, "ownerReferences": [{"uid": "u"}]}}
EARLIER["status"]["conditions"] = [DEADLINE, QUOTA]
"""The spec was corrected, and the Deployment controller has not seen it."""
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: gpu"}

CASES: dict[str, tuple[dict[str, Any], Type, str, Reason, str]] = {
    "all serve": ({}, Type.READY, "True", Reason.SERVING, "2 of 2"),
    "all serve, without the GPU asked for": (
        {"poll": make_poll(make_worker(device="cpu"))},
        Type.READY, "True", Reason.SERVING_ON_CPU,
        "2 of 2 workers are ready and run on the CPU although spec.gpu requests a GPU: the image of a worker has vLLM",
    ),
    "all serve on the CPU, as asked for": (
        {"resource": make_resource(gpus=0), "poll": make_poll(make_worker(device="cpu"))},
        Type.READY, "True", Reason.SERVING, "2 of 2",
    ),
    "none yet": ({"deployment": make_deployment(2, 2, 0)}, Type.READY, "False", Reason.STARTING, "0 of 2 workers"),
    "no deployment": ({"deployment": None}, Type.READY, "False", Reason.STARTING, "0 of 2"),
    "one of two": ({"deployment": make_deployment(2, 2, 1)}, Type.READY, "False", Reason.NOT_ENOUGH_READY, "1 of 2"),
    "asked for none": (
        {"resource": make_resource(0), "deployment": make_deployment(0, 0, 0)},
        Type.READY, "True", Reason.SCALED_TO_ZERO, "spec.replicas is 0",
    ),
    "rolled out": ({}, Type.PROGRESSING, "False", Reason.COMPLETE, "2 workers"),
    "rolled out, but for an object that is not written": (
        {"refused": Problem(Reason.INVALID_POD, "the API server refused Deployment llm: no")},
        Type.PROGRESSING, "False", Reason.INVALID_POD, "refused Deployment llm",
    ),
    "more replicas, and the Deployment is not written": (
        {"resource": make_resource(3), "refused": Problem(Reason.INVALID_POD, "the API server refused it: no")},
        Type.PROGRESSING, "False", Reason.INVALID_POD, "refused it",
    ),
    "a new resource whose Deployment is not written": (
        {"deployment": None, "pods": (), "refused": Problem(Reason.NAME_TAKEN, "taken")},
        Type.PROGRESSING, "False", Reason.NAME_TAKEN, "taken",
    ),
    "rolling, and an object is not written": (
        {"deployment": make_deployment(3, 1, 2), "refused": Problem(Reason.NAME_TAKEN, "taken")},
        Type.PROGRESSING, "True", Reason.ROLLING_OUT, "1 of 2",
    ),
    "rolling": ({"deployment": make_deployment(3, 1, 2)}, Type.PROGRESSING, "True", Reason.ROLLING_OUT, "1 of 2"),
    "stuck": (
        {"deployment": make_deployment(3, 1, 2, **DEADLINE)}, Type.PROGRESSING, "False", Reason.ROLLOUT_STUCK, "1 of 2",
    ),
    "stuck is degraded": (
        {"deployment": make_deployment(3, 1, 2, **DEADLINE)}, Type.DEGRADED, "True", Reason.ROLLOUT_STUCK, "1800 s",
    ),
    "stuck at an earlier spec": (
        {"deployment": EARLIER}, Type.PROGRESSING, "True", Reason.ROLLING_OUT, "1 of 2",
    ),
    "a rollout of an earlier spec is not degraded": (
        {"deployment": EARLIER}, Type.DEGRADED, "False", Reason.HEALTHY, "no problem",
    ),
    "held back by Kueue": (
        {"deployment": make_deployment(2, 2, 1), "pods": (make_pod(), make_gated("kueue.x-k8s.io/admission"))},
        Type.READY, "False", Reason.SCHEDULING_GATED,
        "1 of 2 workers are ready; pod g waits until Kueue admits it within its quota: see kubectl get workloads -n ns",
    ),
    "held back, and enough serve": (
        {
            "resource": make_resource(rollout={"maxUnavailable": 1}),
            "deployment": make_deployment(2, 2, 1),
            "pods": (make_pod(), make_gated("kueue.x-k8s.io/admission")),
        },
        Type.READY, "True", Reason.SERVING, "1 of 2 workers are ready; pod g waits until Kueue admits it",
    ),
    "held back by another gate": (
        {"deployment": make_deployment(2, 2, 0), "pods": (make_gated("a.b/c"), make_gated("a.b/c", name="h"))},
        Type.READY, "False", Reason.SCHEDULING_GATED, "2 pods wait, such as g, until the scheduling gate a.b/c is",
    ),
    "a pod held back is not stuck": (
        {"deployment": make_deployment(2, 2, 1, **DEADLINE), "pods": (make_gated("kueue.x-k8s.io/admission"),)},
        Type.PROGRESSING, "True", Reason.SCHEDULING_GATED, "1 is ready in all; pod g waits until Kueue",
    ),
    "a pod held back is not degraded": (
        {"deployment": make_deployment(2, 2, 1, **DEADLINE), "pods": (make_gated("kueue.x-k8s.io/admission"),)},
        Type.DEGRADED, "False", Reason.HEALTHY, "no problem",
    ),
    "well": ({}, Type.DEGRADED, "False", Reason.HEALTHY, "no problem"),
    "image": (
        {"pods": (make_pod(containerStatuses=[waiting("ImagePullBackOff", "no such tag")]),)},
        Type.DEGRADED, "True", Reason.IMAGE_PULL, "worker:2: no such tag",
    ),
    "no node": (
        {"pods": (make_pod(conditions=[UNSCHEDULABLE]),)}, Type.DEGRADED, "True", Reason.UNSCHEDULABLE, "0/3 nodes",
    ),
    "memory": (
        {"pods": (make_pod(containerStatuses=[crashed(137, reason="OOMKilled")]),)},
        Type.DEGRADED, "True", Reason.OUT_OF_MEMORY,
        "pod p: memory limit exceeded (3 restarts); raise the limit or lower spec.slots",
    ),
    "memory of a sidecar": (
        {"pods": (make_pod(containerStatuses=[crashed(137, name="istio-proxy", reason="OOMKilled")]),)},
        Type.DEGRADED, "True", Reason.OUT_OF_MEMORY,
        "pod p: container istio-proxy: memory limit exceeded (3 restarts); raise the limit",
    ),
    "an init container of others": (
        {"pods": (make_pod(initContainerStatuses=[crashed(78, "no model of secrets", name="vault-agent-init")]),)},
        Type.DEGRADED, "True", Reason.CRASHING, "pod p: container vault-agent-init: exit code 78, 3 restarts: no model",
    ),
    "no model": (
        {"pods": (make_pod(containerStatuses=[crashed(78, "ballast-worker: model.uri /m: there is no directory")]),)},
        Type.DEGRADED, "True", Reason.MODEL_NOT_FOUND, "there is no directory",
    ),
    "fetch": (
        {"pods": (make_pod(initContainerStatuses=[crashed(1, "ballast: hf://a/b: not found\nleaked", name="fetch")]),)},
        Type.DEGRADED, "True", Reason.MODEL_NOT_FOUND, "hf://a/b: not found",
    ),
    "crash": (
        {"pods": (make_pod(containerStatuses=[crashed(1, "a\nKeyError: x")]),)},
        Type.DEGRADED, "True", Reason.CRASHING, "KeyError: x",
    ),
    "secret of the pod": (
        {"pods": (make_pod(containerStatuses=[waiting("CreateContainerConfigError", 'secret "k" not found')]),)},
        Type.DEGRADED, "True", Reason.NO_SECRET, 'secret "k"',
    ),
    "quota": (
        {"deployment": make_deployment(0, 0, 0, **QUOTA)}, Type.DEGRADED, "True", Reason.QUOTA, "exceeded quota",
    ),
    "refused": (
        {"refused": Problem(Reason.NAME_TAKEN, "Service llm exists")},
        Type.DEGRADED, "True", Reason.NAME_TAKEN, "Service llm",
    ),
    "secret of Redis": (
        {"poll": PollResult(100, problem=Problem(Reason.NO_SECRET, "Secret r does not exist"))},
        Type.DEGRADED, "True", Reason.NO_SECRET, "Secret r",
    ),
    "a former queue with work, and without a worker": (
        {"poll": replace(make_poll(make_worker()), former=(FormerQueue("ns/q", 3),))},
        Type.DEGRADED, "True", Reason.QUEUE_LEFT, "ns/q, which the workers served before, has 3 unfinished items",
    ),
    "a former queue that another worker serves": (
        {"poll": replace(make_poll(make_worker()), former=(FormerQueue("ns/q", 3, is_served=True),))},
        Type.DEGRADED, "False", Reason.HEALTHY, "no problem",
    ),
    "older functions": (
        {"poll": replace(make_poll(make_worker()), has_older_functions=True)},
        Type.DEGRADED, "True", Reason.OLDER_FUNCTIONS, "raise maxmemory",
    ),
    "applied": ({}, Type.CONFIG_APPLIED, "True", Reason.APPLIED, "the worker uses the settings"),
    "not applied": (
        {"poll": make_poll(make_worker(config_hash="old"))}, Type.CONFIG_APPLIED, "False", Reason.PENDING, "0 of 1",
    ),
    "an invalid file of API keys": (
        {"poll": make_poll(make_worker(config_hash="old", has_invalid_file=True))},
        Type.CONFIG_APPLIED, "False", Reason.INVALID_FILE, "1 of 1 workers found an invalid or missing file",
    ),
    "a pod that cannot start": (
        {"pods": (make_pod(), make_pod("q", "", phase="Pending"))},
        Type.CONFIG_APPLIED, "True", Reason.APPLIED, "the worker uses the settings",
    ),
    "only a worker that ends": (
        {"pods": (ending(make_pod()),)}, Type.CONFIG_APPLIED, "Unknown", Reason.NO_WORKERS, "only workers that are",
    ),
    "newer functions": (
        {"poll": replace(make_poll(make_worker()), has_newer_functions=True)},
        Type.CONFIG_APPLIED, "True", Reason.NEWER_FUNCTIONS, "upgrade the release",
    ),
    "settings of this generation": (
        {"poll": replace(make_poll(make_worker()), settings=InForce("ns/llm", 0, 1))},
        Type.CONFIG_APPLIED, "True", Reason.APPLIED, "the worker uses the settings",
    ),
    "settings of another resource": (
        {"poll": replace(make_poll(make_worker()), settings=InForce("ns/other"))},
        Type.CONFIG_APPLIED, "False", Reason.OTHER_SETTINGS, "follows the settings of another resource: that of its",
    ),
    "settings of a generation that was lost": (
        {"poll": replace(make_poll(make_worker()), settings=InForce("ns/llm", 0, 7))},
        Type.CONFIG_APPLIED, "False", Reason.OTHER_SETTINGS, "follows the settings of generation 7 of this resource",
    ),
    "nobody said": ({"poll": make_poll()}, Type.CONFIG_APPLIED, "Unknown", Reason.NO_WORKERS, "no worker"),
    "old poll": ({"now": 1000.0}, Type.CONFIG_APPLIED, "Unknown", Reason.STALE, "60 s"),
    "never polled": ({"poll": UNPOLLED}, Type.SLO_MET, "Unknown", Reason.PENDING, "not been polled"),
    "no Redis": (
        {"poll": PollResult(100, problem=Problem(Reason.REDIS_UNREACHABLE, "no answer"))},
        Type.DEADLINE_AT_RISK, "Unknown", Reason.REDIS_UNREACHABLE, "no answer",
    ),
    "mended": (
        {"pods": (make_pod(containerStatuses=[crashed(1, "once") | {"ready": True, "state": {"running": {}}}]),)},
        Type.DEGRADED,
        "False",
        Reason.HEALTHY,
        "no problem",
    ),
    "no worker knows": ({"poll": make_poll(depth=9)}, Type.DEADLINE_AT_RISK, "Unknown", Reason.NO_WORKERS, "no worker"),
    "no job has a deadline": (
        {"poll": replace(make_poll(depth=9), has_deadlines=False)}, Type.DEADLINE_AT_RISK, "False", Reason.ON_TIME, "",
    ),
    "no worker is needed to know": ({"poll": make_poll()}, Type.DEADLINE_AT_RISK, "False", Reason.ON_TIME, "no job"),
    "late, and no worker is left": (
        {"poll": make_poll(depth=9, at_risk=1)}, Type.DEADLINE_AT_RISK, "True", Reason.LATE, "1 job",
    ),
    "on time": ({}, Type.DEADLINE_AT_RISK, "False", Reason.ON_TIME, "no job"),
    "late": ({"poll": make_poll(make_worker(), at_risk=2)}, Type.DEADLINE_AT_RISK, "True", Reason.LATE, "2 jobs"),
    "late, because of a pause": (
        {"poll": make_poll(make_worker(), at_risk=2, unclaimable_at_risk=1)},
        Type.DEADLINE_AT_RISK, "True", Reason.LATE, "at the present rate, including 1 job whose items no",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_condition_says_what_is_and_why(case: str) -> None:
    given, kind, status, reason, words = CASES[case]
    found = conditions(make_input(**given))[kind]

    assert (found.status, found.reason) == (status, reason)
    assert words in found.message
    assert "spec.slots" not in found.message or "spec.slots" in words


RESERVATION: dict[str, tuple[dict[str, Any], str, Reason, str]] = {
    "in use": ({"poll": make_poll(make_worker(), depth=9)}, "True", Reason.SATISFIED, "all 1 reserved slots; 9 more"),
    "no work": (
        {"poll": make_poll(make_worker(offline=ClassLoad(reserved=3), reservation=make_reservation(3, 0)))},
        "True", Reason.NO_WORK, "no offline work waits; 3 slots are reserved",
    ),
    "Redis is full": (
        {"poll": make_poll(make_worker(reservation=make_reservation(3, 0)), depth=4384, is_exhausted=True)},
        "True", Reason.REDIS_FULL, "gives out none of the 4384 that wait; offline requests run in 0 of 3 reserved",
    ),
    "parked requests hold no slot": (
        {
            "poll": make_poll(
                make_worker(
                    slots=16, online=ClassLoad(running=16), offline=ClassLoad(parked=2, reserved=2),
                    reservation=make_reservation(2, 0, is_met=False),
                ),
                depth=1000,
            )
        },
        "False", Reason.RESERVATION_NOT_MET, "0 of 2 reserved slots, while 2 wait there and 1000 wait in the queue",
    ),
    "too few run": (
        {"poll": make_poll(NOT_MET)}, "False", Reason.RESERVATION_NOT_MET, "p runs offline requests in 1 of 3",
    ),
    "too few run on one of two": (
        {"poll": make_poll(make_worker(), NOT_MET, NOT_MET)},
        "False",
        Reason.RESERVATION_NOT_MET,
        "2 workers are in this state",
    ),
    "the last step fell short, and its requests are gone": (
        {"poll": make_poll(make_worker(offline=ClassLoad(), reservation=make_reservation(3, 1, is_met=False)))},
        "True", Reason.NO_WORK, "no offline work waits",
    ),
    "as many run as the caps of tenants allow": (
        {
            "poll": make_poll(
                make_worker(offline=ClassLoad(running=1, waiting=2, reserved=3), reservation=make_reservation(3, 1)),
                depth=1000,
            )
        },
        "True", Reason.SATISFIED, "1 of 3 reserved slots; the 1002 that wait are paused",
    ),
    "the tokens of an encoder meet it": (
        {"poll": make_poll(ENCODER, depth=9)}, "True", Reason.SATISFIED, "take their reserved tokens; 11 more wait",
    ),
    "a worker leaves items in the queue that it could run": (
        {"poll": make_poll(NEVER_CLAIMS, depth=1000)}, "False", Reason.RESERVATION_NOT_MET, "0 of 3 reserved slots",
    ),
    "items are left in the queue because the reservation is in use": (
        {"poll": make_poll(make_worker(can_claim=True), depth=1000)}, "True", Reason.SATISFIED, "all 1 reserved",
    ),
    "a worker on its way out claims nothing": (
        {"poll": make_poll(make_worker(), NEVER_CLAIMS.model_copy(update={"is_draining": True}), depth=9)},
        "True", Reason.SATISFIED, "all 1 reserved",
    ),
    "each worker is on its way out": (
        {"poll": make_poll(NEVER_CLAIMS.model_copy(update={"is_draining": True}), depth=9)},
        "Unknown", Reason.NOT_REPORTED, "each one is draining",
    ),
    "a worker serves and reports nothing": (
        {"pods": (make_pod(), make_pod("silent", "10.0.0.9", **READY_POD))},
        "Unknown", Reason.NOT_REPORTED, "1 of 2 workers did not report their reservation, such as silent",
    ),
    "a worker that starts has nothing to report": (
        {"pods": (make_pod(), make_pod("new", "10.0.0.9"))}, "True", Reason.NO_WORK, "no offline work waits",
    ),
    "no worker reports": ({"poll": make_poll(depth=9)}, "Unknown", Reason.NO_WORKERS, "no worker has reported"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESERVATION)
def test_the_reservation_is_satisfied_only_if_what_waits_cannot_use_it(case: str) -> None:
    given, status, reason, words = RESERVATION[case]
    found = conditions(make_input(**given))[Type.OFFLINE_RESERVATION_SATISFIED]

    assert (found.status, found.reason) == (status, reason)
    assert words in found.message


SLO: dict[str, tuple[tuple[WorkerStatus, ...], float, str, Reason, str]] = {
    "every request met it": (
        (make_worker(),), 99, "True", Reason.MET,
        "100 of 100 requests met TTFT 500 ms, 100 of 100 requests met TPOT 100 ms in the last minute; the objective is",
    ),
    "as many as the objective asks for": ((make_worker(slo=make_slo(99)),), 99, "True", Reason.MET, "99 of 100"),
    "one too few": ((make_worker(slo=make_slo(98)),), 99, "False", Reason.MISSED, "too few requests meet TTFT"),
    "enough for a lower objective": ((make_worker(slo=make_slo(98)),), 95, "True", Reason.MET, "the objective is 95 %"),
    "too few for a higher objective": ((make_worker(slo=make_slo(99)),), 99.9, "False", Reason.MISSED, "99.9 %"),
    "another worker makes up for it": (
        (make_worker(slo=make_slo(98)), make_worker(slo=make_slo(900, 900))), 99, "True", Reason.MET, "998 of 1000",
    ),
    "requests of one token have no TPOT": (
        (make_worker(slo=SloStatus(ttft_judged=5, ttft_met=5)),), 99, "True", Reason.MET, "5 of 5 requests met TTFT",
    ),
    "no request": ((make_worker(slo=SloStatus()),), 99, "True", Reason.NO_TRAFFIC, "no online request"),
}  # fmt: skip


@pytest.mark.parametrize("case", SLO)
def test_the_slo_is_met_if_the_objectives_share_of_requests_met_it(case: str) -> None:
    workers, objective, status, reason, words = SLO[case]
    resource = make_resource(slo={"ttftMilliseconds": 500, "objectivePercent": objective})
    found = conditions(make_input(resource=resource, poll=make_poll(*workers)))[Type.SLO_MET]

    assert (found.status, found.reason) == (status, reason)
    assert words in found.message


def test_the_slo_of_a_model_that_returns_vectors_is_its_latency() -> None:
    resource = make_resource(slo={"latencyMilliseconds": 30, "objectivePercent": 95}, engine={"backend": "vllm"})
    poll = make_poll(make_worker(slo=SloStatus(latency_judged=200, latency_met=180, ttft_judged=9)))
    found = conditions(make_input(resource=resource, poll=poll))[Type.SLO_MET]

    assert (found.status, found.reason) == ("False", Reason.MISSED)
    assert found.message == (
        "too few requests meet latency: 180 of 200 requests met latency 30 ms in the last minute; the objective is 95 %"
    )


FAILING: dict[str, tuple[list[Body], int, str]] = {
    "each new pod is evicted": (
        [failed(0, 5), failed(5, 10), at(10, "new", phase="Pending")], 1,
        'Evicted: Usage of EmptyDir volume "models" exceeds the limit "10Gi"; raise spec.model.sizeLimitGibibytes',
    ),
    "the next pod is not made yet": ([at(0, "ready", **READY_POD), failed(1, 5), failed(5, 9)], 1, "2 pods of this"),
    "one pod was evicted": ([failed(0, 5), at(5, "new", phase="Pending")], 1, ""),
    "two pods were evicted with their node": ([failed(0, 9), failed(1, 9), at(9, "new", phase="Pending")], 1, ""),
    "two fresh pods were evicted with their node": (
        [failed(0, 1), failed(0, 1), at(1, "new", phase="Pending"), at(1, "newer", phase="Pending")], 1, "",
    ),
    "the next pod serves": ([failed(0, 5), failed(5, 10), at(10, "new", **READY_POD)], 2, ""),
    "enough others serve": ([failed(0, 5), failed(5, 10), at(10, "new", phase="Pending")], 2, ""),
    "another pod starts much later": (
        [failed(0, 5), failed(5, 10), ending(at(10, "old", **READY_POD)), at(50, "new", phase="Pending")], 1, "",
    ),
    "the spec was corrected": (
        [failed(0, 5, "old"), failed(5, 10, "old"), failed(10, 11), at(11, "new", phase="Pending")], 1, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_pods_that_fail_one_after_another_are_reported_and_one_that_fails_alone_is_not(case: str) -> None:
    pods, ready, words = FAILING[case]
    found = conditions(make_input(pods=tuple(pods), deployment=make_deployment(2, 2, ready)))[Type.DEGRADED]

    assert found.reason is (Reason.PODS_FAILING if words else Reason.HEALTHY)
    assert words in found.message


def test_every_condition_has_checks_a_healthy_status_and_a_way_to_change() -> None:
    assert set(CHAINS) == set(HEALTHY) == set(Type)
    assert set(Type) - {Type.CONFIG_APPLIED} == report.MEASURED | report.FOLLOWING, (
        "a condition is in MEASURED of ballast_operator.report if figures decide it, in COUNTING or FOLLOWING if its "
        "message changes alone, or among the exceptions of this test"
    )


def test_every_check_is_in_a_chain() -> None:
    signatures = (["Given", "ConditionValue | None"], ["Given", "ConditionValue"])
    modules = [import_module(f"{checks.__name__}.{found.name}") for found in iter_modules(checks.__path__)]
    written = {
        name
        for module in modules
        for name, each in vars(module).items()
        if list(getattr(each, "__annotations__", {}).values()) in signatures
    }

    assert written == {check.__name__ for chain in CHAINS.values() for check in chain}


def test_every_condition_and_reason_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conditions.md").read_text()
    named = set(re.findall("`([A-Za-z]+)`", page))

    assert {*Type, *Reason} <= named


def test_a_worker_ends_as_the_operator_takes_it_for_a_model_that_is_not_there() -> None:
    assert NotServed.exit_code == NOT_SERVED_EXIT


def test_a_pod_that_goes_says_nothing_any_more() -> None:
    pod = ending(make_pod(containerStatuses=[waiting("ImagePullBackOff")]))

    assert conditions(make_input(pods=(pod,)))[Type.DEGRADED].status == "False"


def reported(given: Given, now: float = 0.0) -> Status:
    settled, _ = report.settle(conditions(given), given.resource.status, {}, given.now)
    found = report.conditions(settled, given.resource.status, generation=given.resource.metadata.generation, now=now)
    return build_status(given, found, None)


def with_status(given: Given, status: Status, **more: Any) -> Given:
    return replace(given, resource=given.resource.model_copy(update={"status": status}), **more)


def test_a_status_that_was_reported_is_not_reported_again() -> None:
    status = reported(make_input(), now=1.0)

    assert reported(with_status(make_input(), status), now=500.0) == status


def test_new_figures_under_the_same_reason_are_no_news() -> None:
    status = reported(make_input())
    given = with_status(make_input(), status, poll=make_poll(make_worker(slo=make_slo(99))))

    assert reported(given) == status


def test_ready_counts_the_workers_that_are_ready_now() -> None:
    """A pod that Kueue holds back keeps the reason, while the other becomes ready."""
    gate, deployment = (make_gated("kueue.x-k8s.io/admission"),), make_deployment(2, 2, 0)
    before = reported(make_input(deployment=deployment, pods=gate))
    later = reported(with_status(make_input(deployment=make_deployment(2, 2, 1), pods=gate), before))

    assert before.condition(Type.READY).message.startswith("0 of 2 workers are ready; pod g waits until Kueue")
    assert later.condition(Type.READY).message.startswith("1 of 2 workers are ready; pod g waits until Kueue")
    assert later.condition(Type.PROGRESSING).message.startswith("2 of 2 workers have the newest version; 1 is ready")
    assert report.news(before, later) == []


SECRETS = tuple(Problem(Reason.SECRET_NOT_ALLOWED, f"Secret key-{i} lacks the label") for i in (1, 2))
PULLS = tuple(make_pod(f"llm-{i}", ip="", phase="Pending", containerStatuses=[waiting("ErrImagePull")]) for i in (1, 2))


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        pytest.param({"refused": SECRETS[0]}, {"refused": SECRETS[1]}, "Secret key-2", id="another Secret"),
        pytest.param({"pods": PULLS}, {"pods": PULLS[1:]}, "pod llm-2", id="another pod"),
    ],
)
def test_degraded_names_the_next_object_when_the_first_is_corrected(
    first: dict[str, Any], second: dict[str, Any], named: str
) -> None:
    before = reported(make_input(**first), now=0.0)
    later = reported(with_status(make_input(**second), before), now=60.0)

    assert named in later.condition(Type.DEGRADED).message
    assert later.condition(Type.DEGRADED).last_transition_time == before.condition(Type.DEGRADED).last_transition_time
    assert report.news(before, later) == []


def test_the_time_of_a_condition_is_that_of_its_status() -> None:
    status = reported(make_input(deployment=make_deployment(2, 2, 0)), now=0.0)
    later = reported(with_status(make_input(deployment=make_deployment(2, 2, 1)), status), now=60.0)
    served = reported(with_status(make_input(), later), now=120.0)
    times = [found.condition(Type.READY).last_transition_time for found in (status, later, served)]

    assert [time[14:19] for time in times] == ["00:00", "00:00", "02:00"]
    assert later.condition(Type.READY).reason == Reason.NOT_ENOUGH_READY


def test_what_workers_measure_must_last_before_it_is_reported() -> None:
    status = reported(make_input())
    bad = with_status(make_input(), status, poll=make_poll(make_worker(slo=make_slo(98))))
    held, unsettled = report.settle(conditions(bad), status, {}, 100.0)
    assert held[Type.SLO_MET] is None
    _, forgotten = report.settle(conditions(with_status(make_input(), status)), status, unsettled, 120.0)
    assert forgotten == {}

    lasting, _ = report.settle(conditions(bad), status, unsettled, 131.0)

    assert isinstance(lasting[Type.SLO_MET], ConditionValue)
    assert lasting[Type.SLO_MET].status == "False"


SETTLING: dict[str, tuple[PollResult, PollResult, bool]] = {
    "one poll finds the reservation not met": (make_poll(make_worker()), make_poll(NOT_MET), False),
    "the only worker is on its way out": (
        make_poll(make_worker()), make_poll(make_worker(is_draining=True)), False,
    ),
    "the first claim follows the first status": (make_poll(), make_poll(NEVER_CLAIMS, depth=9), False),
    "the first status is good": (make_poll(), make_poll(make_worker()), True),
    "the poll found no worker": (make_poll(make_worker()), make_poll(), True),
    "work comes": (make_poll(make_worker()), make_poll(make_worker(), depth=9), False),
    "Redis becomes full": (
        make_poll(make_worker(), depth=9), make_poll(make_worker(), depth=9, is_exhausted=True), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTLING)
def test_the_reservation_is_not_reported_on_one_poll_that_may_be_noise(case: str) -> None:
    before, after, is_at_once = SETTLING[case]
    status = reported(make_input(poll=before))
    given = with_status(make_input(), status, poll=after)
    kind = Type.OFFLINE_RESERVATION_SATISFIED

    held, unsettled = report.settle(conditions(given), status, {}, 100.0)
    lasting, _ = report.settle(conditions(given), status, unsettled, 131.0)

    assert (held[kind] is not None) is is_at_once
    assert lasting[kind] == conditions(given)[kind]


def test_another_reason_of_the_same_status_must_last_itself() -> None:
    kind = Type.OFFLINE_RESERVATION_SATISFIED
    status = reported(make_input(poll=make_poll(make_worker())))
    work, full = (
        with_status(make_input(), status, poll=make_poll(make_worker(), depth=9, is_exhausted=is_full))
        for is_full in (False, True)
    )
    assert {conditions(given)[kind].status for given in (work, full)} == {status.condition(kind).status}

    _, unsettled = report.settle(conditions(work), status, {}, 100.0)
    held, unsettled = report.settle(conditions(full), status, unsettled, 131.0)
    lasting, _ = report.settle(conditions(full), status, unsettled, 161.0)

    assert held[kind] is None
    assert lasting[kind] == conditions(full)[kind]


def test_another_status_is_reported_although_its_reasons_alternate() -> None:
    kind = Type.OFFLINE_RESERVATION_SATISFIED
    one, other = (ConditionValue("False", reason, "") for reason in (Reason.RESERVATION_NOT_MET, Reason.NO_WORK))
    status = reported(make_input(poll=make_poll(make_worker())))

    _, unsettled = report.settle({kind: one}, status, {}, 100.0)
    lasting, _ = report.settle({kind: other}, status, unsettled, 131.0)

    assert lasting[kind] == other


PATIENCE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "another pod is ready": ({"deployment": make_deployment(2, 2, 0)}, {"deployment": make_deployment(2, 2, 1)}, 4.0),
    "the last pod is ready": ({"deployment": make_deployment(2, 2, 1)}, {}, 0.0),
    "a pod broke": ({}, {"pods": (make_pod(containerStatuses=[waiting("ErrImagePull")]),)}, 0.0),
    "another version": (
        {"deployment": make_deployment(2, 2, 0)},
        {"deployment": make_deployment(2, 2, 0), "resource": make_resource(generation=2)},
        0.0,
    ),
    "workers report": ({"poll": make_poll()}, {}, 0.0),
    "another pod is broken": ({"pods": PULLS}, {"pods": PULLS[1:]}, 29.0),
    "another pod is broken, and one is ready": (
        {"pods": PULLS, "deployment": make_deployment(2, 2, 0)},
        {"pods": PULLS[1:], "deployment": make_deployment(2, 2, 1)},
        4.0,
    ),
}


@pytest.mark.parametrize("case", PATIENCE)
def test_pods_that_come_up_one_by_one_are_reported_in_steps_and_all_else_at_once(case: str) -> None:
    """The status was written a second ago."""
    before, after, wanted = PATIENCE[case]
    status = reported(make_input(**before))
    given = make_input(**after)
    given = replace(given, resource=given.resource.model_copy(update={"status": status}))
    said = reported(given)

    assert said != status
    assert report.delay(status, said, given.poll, seen=100.0, written=1.0) == wanted


def test_the_first_status_waits_a_moment_for_the_first_poll() -> None:
    pending = PollResult(0.0, problem=Problem(Reason.PENDING, "not polled yet"))
    said = reported(make_input(poll=pending))

    assert report.delay(Status(), said, pending, seen=0.25, written=9.0) == 0.75
    assert report.delay(Status(), said, pending, seen=1.5, written=9.0) == 0.0
    assert report.delay(Status(), said, make_poll(), seen=0.25, written=9.0) == 0.0


def test_an_event_tells_of_ready_and_not_of_each_step_to_it() -> None:
    steps = [reported(make_input(deployment=make_deployment(2, 2, count))) for count in (0, 1, 2)]
    told = [[found.type for found in report.news(*pair)] for pair in pairwise(steps)]

    assert told == [[], [Type.READY]]
