"""Whatever a queue holds as the statuses of workers, the operator plans, scales and reports."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from resources import make_resource

from ballast_operator.children.config import VERSION
from ballast_operator.conditions.chains import conditions
from ballast_operator.conditions.given import Given
from ballast_operator.context import OperatorContext
from ballast_operator.deletion_costs import DELETION_COST
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import DEPLOYMENT, Key
from ballast_operator.plan import ClusterSnapshot
from ballast_operator.poll_result import PollResult
from ballast_operator.resource_status import status as build_status
from ballast_operator.scaling import Fleet, History, scale
from ballast_operator.unneeded_workers import unneeded_workers
from ballast_queue.errors import UnreadableValue
from ballast_queue.job import Job, JobState, RequestCounts
from ballast_queue.records import stats_of
from ballast_queue.status import WorkerStatus

CONTEXT = OperatorContext(image="worker:1")
RESOURCE = make_resource(
    gpu={"count": 0},
    slo={"ttftMilliseconds": 500},
    scaling={"minReplicas": 1, "maxReplicas": 9, "offlineMaxReplicas": 3},
)
POD = {
    "metadata": {"name": "p", "namespace": "ns", "annotations": {VERSION: "v"}},
    "status": {"phase": "Running", "podIP": "10.0.0.1"},
}
DEPLOYED = {
    "metadata": {"uid": "d", "generation": 1, "ownerReferences": [{"uid": "u"}]},
    "spec": {"replicas": 3, "template": {"metadata": {}}},
}
SNAPSHOT = ClusterSnapshot("u", {Key(DEPLOYMENT, "ns", "llm"): DEPLOYED}, (POD,))
JOB = Job(
    id="j", tenant="t", state=JobState.IN_PROGRESS, created=0, deadline=1000, output_left=9,
    counts=RequestCounts(waiting=9),
)  # fmt: skip
LOAD = ("running", "parked", "waiting", "reserved", "borrowed")
numbers = st.sampled_from([0, 1, 8, -1, -(10**18), 10**9, 2**31, 2**63, 10**400])
rates = st.sampled_from([0.0, -1.0, 1e308, float("inf"), float("nan")])
loads = st.fixed_dictionaries(dict.fromkeys(LOAD, numbers) | {"requests_per_second": rates})
statuses = st.fixed_dictionaries(
    {
        "worker_id": st.text(max_size=5),
        "address": st.just("http://10.0.0.1:8000")
        | st.sampled_from(["http://[", "http://10.0.0.1:x", "", "x", "http://10.0.0.1:99999999"]),
        "at": rates,
        "model": st.text(max_size=5),
        "slots": numbers,
        "batch_ceiling": numbers,
        "kv_blocks_total": numbers,
        "kv_blocks_free": numbers,
        "online": loads,
        "offline": loads,
        "offline_reserved": numbers,
        "offline_most": numbers,
        "offline_items_per_second": rates,
        "offline_tokens_per_second": rates,
        "can_claim": st.booleans(),
        "slo": st.fixed_dictionaries(dict.fromkeys(("ttft_judged", "ttft_met", "tpot_judged", "tpot_met"), numbers)),
        "reservation": st.fixed_dictionaries(
            dict.fromkeys(("slots", "blocks", "chunk", "in_use"), numbers) | {"is_met": st.booleans()}
        ),
    }
)
PLAIN: dict[str, Any] = {
    "worker_id": "p",
    "address": "http://10.0.0.1:8000",
    "at": 0,
    "model": "m",
    **dict.fromkeys(("slots", "batch_ceiling", "kv_blocks_total", "kv_blocks_free"), 8),
    **{name: {} for name in ("online", "offline", "slo")},
    "reservation": dict.fromkeys(("slots", "blocks", "chunk", "in_use"), 1) | {"is_met": True},
    **dict.fromkeys(("offline_reserved", "offline_most"), 1),
}
FIGURES = b"waiting", b"leased", b"dead", b"at_risk", b"unclaimable", b"unclaimable_at_risk", b"jobs:in_progress"


@given(statuses, st.lists(numbers, min_size=len(FIGURES), max_size=len(FIGURES)))
@example(PLAIN | {"address": "http://["}, [1] * len(FIGURES))
@example(PLAIN | {"address": "http://10.0.0.1:x"}, [1] * len(FIGURES))
@example(PLAIN | {"slots": 0}, [1] * len(FIGURES))
@example(PLAIN | {"offline_tokens_per_second": float("inf")}, [1] * len(FIGURES))
@example(PLAIN | {"online": {"running": 10**400}}, [1] * len(FIGURES))
@example(PLAIN | {"online": {"running": 2**31}, "offline": {"reserved": -1}}, [10**400] * len(FIGURES))
def test_no_status_and_no_figure_of_a_queue_stops_the_operator(status: dict[str, Any], figures: list[int]) -> None:
    try:
        workers: tuple[WorkerStatus, ...] = (WorkerStatus.model_validate_json(json.dumps(status)),)
    except ValidationError:
        workers = ()  # it is left out
    totals = [part for name, figure in zip(FIGURES, figures, strict=True) for part in (name, str(figure).encode())]
    try:
        queue = stats_of([b"1000.0", figures[0], b"", b"", totals])
    except UnreadableValue:
        queue = None
    poll = PollResult(100.0, workers, queue).only_workers_in((POD,))

    planned = plan(RESOURCE, SNAPSHOT, CONTEXT, poll)
    assert RESOURCE.spec.scaling is not None
    decision = scale(RESOURCE.spec.scaling, Fleet(1, 1), poll=poll, now=100.0, history=History())
    made = Given(RESOURCE, SNAPSHOT, planned, poll, 100.0, None)
    values = conditions(made)
    reported = build_status(made, (), None)

    assert 1 <= decision.replicas <= 9
    assert 0 <= unneeded_workers([JOB], workers * 3, 100.0, {}) <= 3
    assert all(-(2**31) <= int(step.annotations[DELETION_COST]) < 2**31 for step in planned.costs)
    assert reported.slots is None or (0 <= reported.slots.online < 2**63 and 0 <= reported.slots.offline < 2**63)
    assert all(len(value.message) < 1000 for value in values.values())
