"""Replicas from the last poll: enough, bounded, steady, and never fewer because something is unknown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil, exp
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_objects import make_status

from ballast_api.conditions import ConditionReason
from ballast_api.replicas import Scaling
from ballast_operator.kinds import Body
from ballast_operator.pod_problem import fetches
from ballast_operator.poll_result import UNPOLLED, PollResult, Problem
from ballast_operator.scaling import Decision, Fleet, History, scale
from ballast_operator.unneeded_workers import unneeded_workers
from ballast_queue.job import Job, Outlook, RequestCounts
from ballast_queue.status import LEAST_RATE, ClassLoad, QueueStats, WorkerStatus
from ballast_worker.forecast import Forecast


def make_worker(number: int = 0, *, running: int = 0, waiting: int = 0, **more: Any) -> WorkerStatus:
    load = ClassLoad(running=running, waiting=waiting)
    sizes = {"slots": 16, "batch_ceiling": 10, "kv_blocks_total": 10, "kv_blocks_free": 10}
    return make_status(f"w-{number}", **{"address": f"http://10.0.0.{number}:8000", "online": load} | sizes | more)


def make_poll(
    at: float, *workers: WorkerStatus, depth: int = 0, leased: int = 0, at_risk: int = 0, **paused: int
) -> PollResult:
    items = RequestCounts(total=depth + leased, waiting=depth, leased=leased)
    queue = QueueStats(
        at=at, items=items, inbox=0, oldest_waiting_seconds=0, dead_letters=0, jobs_at_risk=at_risk, jobs={}, **paused
    )
    return PollResult(at, workers=workers, queue=queue)


class Run:
    """Decisions over time, each of which is obeyed at once."""

    def __init__(self, replicas: int = 1, **scaling: Any) -> None:
        self.scaling = Scaling(**{"max_replicas": 20} | scaling)
        self.replicas = replicas
        self.history = History()
        self.now = 0.0
        self.seen: list[int] = []

    def poll(self, requests: int = 0, *, seconds: float = 10.0, **queue: int) -> Decision:
        """Poll that many online requests, spread over the replicas."""
        workers = [
            make_worker(i, running=requests // self.replicas + (i < requests % self.replicas))
            for i in range(self.replicas)
        ]
        return self.take(make_poll(self.now + seconds, *workers, **queue), seconds=seconds)

    def take(
        self,
        poll: PollResult,
        *,
        seconds: float = 10.0,
        ready: int | None = None,
        startup: float = 600.0,
        **fleet: Any,
    ) -> Decision:
        self.now += seconds
        ready = self.replicas if ready is None else ready
        now = Fleet(self.replicas, ready, startup_seconds=startup, **fleet)
        decision = scale(self.scaling, now, poll=poll, now=self.now, history=self.history)
        self.history, self.replicas = decision.history, decision.replicas
        self.seen.append(decision.replicas)
        return decision


def test_load_that_lasts_brings_replicas_and_says_why() -> None:
    run = Run(replicas=1, scale_up_seconds=30)
    found = [run.poll(40).replicas for _ in range(4)]

    assert found == [1, 1, 1, 5], "40 requests with 20 % headroom at 10 to a replica, once that has lasted 30 s"
    assert "40 online requests" in run.poll(40).because


def test_a_peak_shorter_than_the_window_brings_none() -> None:
    run = Run(replicas=2, scale_up_seconds=30)

    assert [run.poll(n).replicas for n in (10, 90, 90, 10, 90, 90, 10)] == [2] * 7


def test_replicas_leave_only_when_none_was_needed_for_the_whole_window() -> None:
    run = Run(replicas=5, scale_down_seconds=60, scale_up_seconds=0)
    run.poll(40)
    held = [run.poll(5).replicas for _ in range(6)]

    assert held == [5] * 6, "40 requests were there in the last 60 s"
    assert run.poll(5).replicas == 1


def test_offline_work_waits_for_idle_slots_unless_a_deadline_is_at_risk() -> None:
    assert [Run(scale_up_seconds=0).poll(0, depth=10_000).replicas for _ in range(3)] == [1, 1, 1]
    assert Run(scale_up_seconds=0).poll(0, depth=10_000, at_risk=1).replicas == 2


def test_a_paused_job_adds_no_replica() -> None:
    run = Run(scale_up_seconds=0, offline_max_replicas=8)
    paused = [run.poll(0, depth=10_000, at_risk=1, unclaimable=10_000, unclaimable_at_risk=1) for _ in range(3)]

    assert [decision.replicas for decision in paused] == [1, 1, 1]
    assert run.poll(0, depth=10_000, at_risk=2, unclaimable=9_990, unclaimable_at_risk=1).replicas == 2


def test_a_paused_job_does_not_keep_the_last_replica_and_starts_none() -> None:
    run = Run(min_replicas=0, scale_down_seconds=0, idle_seconds=30)
    leased = [run.poll(0, depth=5, leased=1, unclaimable=5).replicas for _ in range(5)]
    idle = [run.poll(0, depth=5, unclaimable=5).replicas for _ in range(5)]

    def at_zero(**queue: int) -> Decision:
        return run.take(make_poll(run.now + 10, **queue))

    assert (leased, idle) == ([1] * 5, [1, 1, 1, 0, 0])
    assert at_zero(depth=5, at_risk=1, unclaimable=5, unclaimable_at_risk=1).because == (
        "only work that no worker can claim waits"
    )
    assert run.replicas == 0
    assert at_zero(depth=5).replicas == 1, "it was resumed"


def test_a_deadline_at_risk_adds_no_replica_while_the_last_one_loads_its_model() -> None:
    run = Run(replicas=2, scale_up_seconds=30)

    def at_risk(ready: int) -> Decision:
        workers = map(make_worker, range(ready))
        return run.take(make_poll(run.now + 10, *workers, depth=10_000, at_risk=1), ready=ready)

    assert [at_risk(2).replicas for _ in range(4)] == [2, 2, 2, 3]
    assert [at_risk(2).replicas for _ in range(30)] == [3] * 30
    assert at_risk(2).because == (
        "1 job would be late at the present rate; no replica is added before all are ready, and 2 of 3 are"
    )
    assert [at_risk(3).replicas for _ in range(4)] == [3, 3, 3, 4]


def test_a_replica_that_never_becomes_ready_blocks_a_deadline_for_its_startup_seconds_only() -> None:
    run = Run(replicas=2, scale_up_seconds=0)

    def at_risk() -> int:
        workers = map(make_worker, range(2))
        poll = make_poll(run.now + 10, *workers, depth=10_000, at_risk=1)
        return run.take(poll, ready=2, startup=60).replicas

    assert [at_risk() for _ in range(15)] == [3] * 7 + [4] * 7 + [5]


def test_a_poll_that_failed_does_not_begin_the_wait_for_a_replica_again() -> None:
    run = Run(replicas=2, scale_up_seconds=0)
    for _ in range(6):
        run.take(UNPOLLED, ready=1)
    poll = make_poll(run.now + 10, make_worker(), depth=10_000, at_risk=1)

    assert run.take(poll, ready=1, startup=60).replicas == 3


@pytest.mark.parametrize("ready", [1, 2])
def test_a_deadline_at_risk_never_brings_fewer_replicas_than_the_same_queue_without_one(ready: int) -> None:
    runs = [Run(replicas=2, scale_up_seconds=0, offline_max_replicas=5) for _ in range(2)]
    found = [
        run.take(make_poll(10, make_worker(), depth=10_000, at_risk=at_risk), ready=ready)
        for at_risk, run in enumerate(runs)
    ]

    assert [decision.replicas for decision in found] == [5, 5]
    assert "offlineMaxReplicas is 5" in found[1].because


def test_offline_work_raises_replicas_up_to_its_budget() -> None:
    run = Run(scale_up_seconds=0, offline_max_replicas=4)

    assert run.poll(0, depth=10_000).replicas == 4


def test_items_beyond_the_slots_of_their_worker_keep_no_other_replica() -> None:
    """No other replica would get them."""
    run = Run(replicas=3, scale_down_seconds=0, offline_max_replicas=4)
    full = make_worker(0, offline=ClassLoad(running=16, waiting=32))

    assert run.take(make_poll(10, full, make_worker(1), make_worker(2), leased=48)).replicas == 1


def test_replicas_that_are_not_ready_do_not_count_as_those_that_a_deadline_needs() -> None:
    run = Run(replicas=4, scale_down_seconds=0)
    poll = make_poll(10, *map(make_worker, range(3)), depth=10)

    assert run.take(replace(poll, unneeded=1), ready=3).replicas == 2


def test_the_queue_wakes_a_deployment_at_zero_and_an_idle_one_goes_to_sleep() -> None:
    run = Run(replicas=1, min_replicas=0, scale_down_seconds=20, idle_seconds=60)
    idle = [run.poll(0).replicas for _ in range(8)]

    assert idle == [1, 1, 1, 1, 1, 1, 0, 0]
    assert run.take(make_poll(run.now + 10)).replicas == 0
    assert run.take(make_poll(run.now + 10, depth=1)).replicas == 1


def test_items_under_way_and_requests_between_two_polls_keep_the_last_replica() -> None:
    run = Run(replicas=1, min_replicas=0, scale_down_seconds=0, idle_seconds=0)

    assert run.poll(0, leased=1).replicas == 1
    between = make_worker(online=ClassLoad(requests_per_second=0.001))
    assert run.take(make_poll(run.now + 10, between)).because.endswith("online requests arrived in the last minute")
    assert run.replicas == 1
    assert run.poll(0).replicas == 0


def test_what_is_unknown_is_not_idle() -> None:
    silence = Problem(ConditionReason.REDIS_UNREACHABLE, "no Redis")
    for nothing in (
        UNPOLLED,
        PollResult(0),
        PollResult(0, problem=silence),
        make_poll(-1000.0, *map(make_worker, range(7))),
    ):
        run = Run(replicas=7, min_replicas=0, scale_down_seconds=0, idle_seconds=0)
        assert [run.take(nothing).replicas for _ in range(5)] == [7] * 5


def test_workers_of_other_versions_are_understood() -> None:
    """As in an upgrade: one that says the least that is required, one that says more than this version knows."""
    least = (
        '{"worker_id": "w", "address": "http://10.0.0.1:8000", "at": 0, "model": "m", "slots": 16, "batch_ceiling": 10,'
        ' "kv_blocks_total": 9, "kv_blocks_free": 9, "online": {"running": 40, "fromTheFuture": 1}, "offline": {},'
        ' "reservation": {"slots": 1, "blocks": 1, "chunk": 1, "in_use": 0, "is_met": true},'
        ' "offline_reserved": 1, "offline_most": 16, "slo": {}'
    )
    workers = [WorkerStatus.model_validate_json(least + more) for more in ("}", ', "fromTheFuture": {"a": 1}}')]
    run = Run(replicas=2, scale_up_seconds=0)

    assert run.take(make_poll(10, *workers)).replicas == 10


def test_a_gap_in_the_polls_starts_the_window_again() -> None:
    run = Run(replicas=5, scale_down_seconds=30)
    for _ in range(3):
        run.poll(0)
    run.take(UNPOLLED)

    assert [run.poll(0).replicas for _ in range(4)] == [5, 5, 5, 1]


def test_workers_that_are_ready_and_silent_count_as_full() -> None:
    run = Run(replicas=4, scale_down_seconds=0)
    one = make_poll(10, make_worker(0))

    assert run.take(one, ready=4).replicas == 4


def test_a_bound_that_moved_is_followed_at_once() -> None:
    assert Run(replicas=1, min_replicas=3).poll(0).replicas == 3
    assert Run(replicas=30, max_replicas=20).poll(0).replicas == 20


def test_nothing_is_added_for_items_that_no_worker_may_run() -> None:
    run = Run(scale_up_seconds=0, offline_max_replicas=8)
    worker = make_worker(offline_most=0)

    assert run.take(make_poll(10, worker, depth=10_000, at_risk=1)).replicas == 1
    assert run.take(make_poll(20, make_worker(offline_most=1), depth=10_000)).replicas == 8


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.integers(0, 60),
    st.integers(0, 120),
    st.integers(0, 3),
    st.integers(1, 15),
)
def test_replicas_never_flap(loads: list[int], up: int, down: int, least: int, most: int) -> None:
    """However noisy the load: bounded, a rise only after `up`, a fall only after `down` seconds of that need."""
    run = Run(
        replicas=max(1, least), min_replicas=least, max_replicas=max(least, most, 1), scale_up_seconds=up,
        scale_down_seconds=down, idle_seconds=down,
    )  # fmt: skip
    needed: list[tuple[float, int]] = []
    for requests in loads:
        before = run.replicas
        decision = run.poll(requests) if before else run.take(make_poll(run.now + 10))
        needed.append((run.now, run.history.needs[-1].replicas))
        assert least <= decision.replicas <= max(least, most, 1)
        window = up if decision.replicas > before else down
        if decision.replicas != before:
            recent = [n for at, n in needed if at > run.now - window] or [needed[-1][1]]
            assert run.now >= window
            if decision.replicas > before:
                assert min(recent) >= decision.replicas
            else:
                assert max(recent) <= decision.replicas


def test_the_first_replica_shows_how_many_items_one_takes_unless_the_spec_does() -> None:
    unknown, known = (Run(replicas=0, min_replicas=0, scale_up_seconds=0, offline_max_replicas=4) for _ in range(2))
    found = [
        [run.take(make_poll(run.now + 10, depth=40), ready=0, slots=slots).replicas for _ in range(3)]
        for run, slots in ((unknown, None), (known, 16))
    ]

    assert found == [[1, 1, 1], [1, 3, 3]]
    assert unknown.take(make_poll(40, make_worker(), depth=40), ready=1).replicas == 3


def test_offline_work_adds_no_replica_while_a_pod_finds_no_node() -> None:
    def found(running: int = 0, **queue: int) -> list[int]:
        poll = make_poll(10, make_worker(running=running), **queue)
        runs = [Run(replicas=2, scale_up_seconds=0, offline_max_replicas=8) for _ in range(2)]
        return [run.take(poll, ready=1, startup=0, lacks_node=lacks).replicas for lacks, run in enumerate(runs)]

    assert found(depth=10_000) == [8, 2]
    assert found(depth=10, at_risk=1) == [3, 2]
    assert found(running=90) == [11, 11], "online requests do"


def test_replicas_of_which_none_ever_served_leave_with_their_work() -> None:
    def left(*, served: bool) -> int:
        run = Run(replicas=4, min_replicas=0, scale_down_seconds=60, idle_seconds=60)
        run.poll(0, depth=9) if served else run.take(make_poll(10, depth=9), ready=0, startup=300)
        waiting = [run.take(make_poll(run.now + 10, depth=9), ready=0, startup=300).replicas for _ in range(60)]
        assert waiting == [4] * 60
        return [run.take(make_poll(run.now + 10), ready=0, startup=300).replicas for _ in range(60)][-1]

    assert left(served=False) == 0
    assert left(served=True) == 4, "they may be full and silent"


@pytest.mark.parametrize("wait", ["is_fetching", "lacks_node"])
def test_replicas_that_make_progress_do_not_leave_before_they_had_time_to_load(wait: str) -> None:
    run = Run(replicas=2, min_replicas=0, scale_down_seconds=0, idle_seconds=0)

    def rounds(number: int, **fleet: bool) -> list[int]:
        return [run.take(make_poll(run.now + 10), ready=0, startup=100, **fleet).replicas for _ in range(number)]

    assert rounds(9, **{wait: True}) + rounds(9) == [2] * 18
    assert rounds(2)[-1] == 0
    run.replicas = 2
    assert (rounds(60, **{wait: True})[-1] == 2) is (wait == "is_fetching"), "a wait for a node counts only at first"


@pytest.mark.parametrize(
    ("name", "state", "restarts", "expected"),
    [
        ("fetch", "running", 0, True),
        ("fetch-a-lora", "running", 0, True),
        ("fetch", "running", 1, False),
        ("fetch", "terminated", 0, False),
        ("a-sidecar", "running", 0, False),
    ],
)
def test_only_the_first_fetch_of_a_pod_is_progress(name: str, state: str, restarts: int, expected: bool) -> None:
    container = {"name": name, "state": {state: {}}, "restartCount": restarts}

    assert fetches({"status": {"initContainerStatuses": [container]}}) is expected


def make_pod(address: str) -> Body:
    return {"metadata": {"name": address}, "status": {"phase": "Running", "podIP": address}}


def test_a_pod_that_ended_counts_no_worker_twice() -> None:
    def pod(name: str, phase: str, created: str) -> Body:
        metadata = {"name": name, "creationTimestamp": f"2026-01-0{created}T00:00:00Z"}
        return {"metadata": metadata, "status": {"phase": phase, "podIP": "10.0.0.1"}}

    pods = (pod("a-new", "Running", "2"), pod("evicted", "Failed", "3"), pod("lost", "Running", "1"))
    poll = make_poll(0, make_worker(1), make_worker(9)).only_workers_in(pods)

    assert [worker.worker_id for worker in poll.workers] == ["w-1"]
    assert set(poll.by_pod(pods)) == {"a-new"}


def make_job(items: int, deadline: float | None, **more: Any) -> Job:
    counts = RequestCounts(total=items, waiting=items)
    return Job(
        **{"id": "j", "tenant": "t", "state": "in_progress", "created": 0, "deadline": deadline, "counts": counts}
        | more
    )


UNNEEDED: dict[str, tuple[list[Job], float, int]] = {
    "no deadline": ([make_job(10**6, None)], 1, 3),
    "one worker is enough": ([make_job(800, 1000)], 1, 2),
    "two workers are enough": ([make_job(800, 1000), make_job(800, 1000, id="k")], 1, 1),
    "two workers would just be enough": ([make_job(900, 1000), make_job(1000, 1000, id="k")], 1, 0),
    "it needs all of them": ([make_job(2500, 1000)], 1, 0),
    "it is at risk with all of them": ([make_job(2500, 1000), make_job(9000, 1000, id="k", outlook="no")], 1, 0),
    "only a paused job has a deadline": ([make_job(2500, 1000, state="paused")], 1, 3),
    "no worker serves the model of the job": ([make_job(2500, 1000, reason="no worker serves it")], 1, 3),
    "it keeps nothing beside a job of another model": (
        [make_job(10**9, 10**7, reason="no worker serves it"), make_job(800, 1000, id="k")],
        1,
        2,
    ),
    "no rate is known, and items wait": ([make_job(9, 1000)], 0, 0),
    "no rate is known, and all items run": ([make_job(9, 1000, counts=RequestCounts(total=9, leased=9))], 0, 3),
    "no rate is known, and all items that wait are delayed": ([make_job(9, 1000, delayed=9)], 0, 3),
}


@pytest.mark.parametrize("case", UNNEEDED)
def test_workers_without_which_no_job_is_late_are_not_needed(case: str) -> None:
    jobs, rate, expected = UNNEEDED[case]
    workers = [make_worker(i, offline_items_per_second=rate) for i in range(3)]

    assert unneeded_workers(jobs, [*workers, make_worker(9, is_draining=True)], 0.0, {}) == expected


def test_a_job_needs_the_workers_that_the_weights_of_tenants_and_its_online_requests_leave_it() -> None:
    def unneeded(*jobs: Job, busy: int = 0, **weights: float) -> int:
        workers = [make_worker(i, running=busy, offline_items_per_second=1.0) for i in range(8)]
        return unneeded_workers(jobs, workers, 0.0, weights)

    job, beside = make_job(800, 1000), make_job(10**6, None, id="k", tenant="u")

    assert unneeded(job) == 7
    assert unneeded(job, beside) == 6, "half of the rate is for the other tenant"
    assert unneeded(job, beside, t=1.0, u=3.0) == 4
    assert unneeded(job, busy=5) == 3, "with 5 workers, online requests leave 10 of 40 slots"


def test_small_jobs_of_a_tenant_do_not_hide_the_deadline_of_another() -> None:
    small = [make_job(1, 500.0 + i, id=f"s{i}", tenant="x") for i in range(100)]
    workers = [make_worker(i, offline_items_per_second=1.0) for i in range(8)]

    assert unneeded_workers([*small, make_job(6000, 1000)], workers, 0.0, {}) == 1


class Cluster(Run):
    """A queue and replicas that start slowly, in simulated time. A replica that leaves gives its items back."""

    def __init__(self, startup: float, *, items: int = 0, seconds: float = 0.0, **scaling: Any) -> None:
        super().__init__(**scaling)
        self.startup = startup
        self.left = [seconds] * items
        """Seconds in a slot that each item still needs."""
        self.held: dict[float, list[int]] = {}
        """The items that each replica runs. A replica is named after its start."""
        self.lost = 0
        """Items that found no free slot after their replica left."""

    @property
    def working(self) -> list[float]:
        return [name for name in self.held if self.now - name >= self.startup]

    @property
    def waiting(self) -> list[int]:
        held = {item for items in self.held.values() for item in items}
        return [item for item, left in enumerate(self.left) if left > 0 and item not in held]

    def step(self, **queue: int) -> None:
        for name in self.working:
            self.left = [left - 10 * (item in self.held[name]) for item, left in enumerate(self.left)]
            self.held[name] = [item for item in self.held[name] if self.left[item] > 0]
            self.held[name] += self.waiting[: 16 - len(self.held[name])]
        workers = [
            make_worker(i, offline=ClassLoad(running=len(self.held[name]))) for i, name in enumerate(self.working)
        ]
        depth, leased = len(self.waiting), sum(map(len, self.held.values()))
        poll = make_poll(self.now + 10, *workers, **{"depth": depth, "leased": leased} | queue)
        self.take(poll, ready=len(workers), startup=1800)
        for number in range(len(self.held), self.replicas):
            self.held[self.now + number / 1000] = []
        # As the deletion costs ask: those that are not ready, then those with the least load.
        for name in sorted(self.held, key=lambda name: (name in self.working, len(self.held[name])))[: -self.replicas]:
            del self.held[name]
        self.lost += max(0, len(self.waiting) - depth - sum(16 - len(self.held[name]) for name in self.working))

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in pairwise(self.seen))


@settings(max_examples=20)
@given(
    st.integers(1, 150), st.sampled_from([20.0, 300.0, 1200.0, 3600.0]), st.sampled_from([0.0, 60.0, 900.0]),
    st.integers(0, 1),
)  # fmt: skip
def test_replicas_follow_a_batch_of_items_up_and_down_once(items: int, each: float, startup: float, least: int) -> None:
    """From zero, no more replicas than the items fill. No item loses its slot, and no replica starts twice."""
    run = Cluster(
        startup, items=items, seconds=each, replicas=least, min_replicas=least, offline_max_replicas=4, idle_seconds=600
    )
    if least:
        run.held[-startup] = []
    while any(left > 0 for left in run.left):
        run.step()
        assert run.now < 150 * (each + startup + 60), "no progress"
    for _ in range(150):
        run.step()

    assert run.lost == 0
    assert max(run.seen) <= max(1, min(4, ceil(items / 16)))
    assert run.replicas == least
    assert run.changes <= 3 + 4, "up from zero to one and to all, and down one by one"


@settings(max_examples=25)
@given(
    st.floats(0.1, 4.0), st.sampled_from([30.0, 600.0, 1200.0]), st.sampled_from([0, 12, 24]),
    st.sampled_from([0, 0.05]), st.integers(1, 2),
)  # fmt: skip
def test_a_deadline_brings_replicas_in_time_and_keeps_them_while_they_are_needed(
    needed: float, startup: float, online: int, noise: float, resources: int
) -> None:
    """A job needs that many replicas for four hours, and much more work without a deadline waits behind it.

    Online requests take slots, the rate varies by some percent, and the resources share the queue.
    """
    random, drift, left, end = Random(0), 0.0, needed * 4 * 3600, 4 * 3600.0
    runs = [Run(scale_up_seconds=60) for _ in range(resources)]
    starts = [[-startup] for _ in runs]
    while runs[0].now < end + 1800:
        now = runs[0].now + 30
        ready = [sum(now - 30 - start >= startup for start in each) for each in starts]
        drift = 0.9 * drift + random.gauss(0, noise * 0.436)
        rate = max(0.0, sum(ready) - online / 10) * exp(drift)
        left = max(0.0, left - 30 * rate) if now <= end else left
        workers = [
            make_worker(i, running=online // sum(ready), offline_items_per_second=max(LEAST_RATE, rate / sum(ready)))
            for i in range(sum(ready))
        ]
        jobs = [make_job(items=ceil(left), deadline=end)] if left else []
        forecast = Forecast(jobs, workers, now, {})
        is_late = any(forecast.of(job)[0] is not Outlook.YES for job in jobs)
        poll = make_poll(now, *workers, depth=10_000, leased=16, at_risk=is_late)
        poll = replace(poll, unneeded=None if is_late else unneeded_workers(jobs, workers, now, {}))
        for number, run in enumerate(runs):
            own = range(sum(ready[:number]), sum(ready[: number + 1]))
            pods = tuple(make_pod(f"10.0.0.{i}") for i in own)
            run.take(poll.only_workers_in(pods), seconds=30, ready=ready[number], startup=1800)
            starts[number] = [*starts[number][: run.replicas], *[now] * (run.replicas - len(starts[number]))]

    rises = sum(max(0, after - before) for run in runs for before, after in pairwise(run.seen))
    assert left == 0
    assert [run.replicas for run in runs] == [max(1, ceil(online * 1.2 / 10 / resources))] * resources, "none is held"
    assert rises <= sum(max(run.seen) - 1 for run in runs) + 2, "hardly a replica comes twice"
