"""Replicas from the last poll: enough, bounded, steady, and never fewer because something is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_objects import make_status

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import Scaling
from ballast_operator.poll_result import PollResult, Problem
from ballast_operator.scaling import Decision, History, scale
from ballast_queue.job import RequestCounts
from ballast_queue.status import ClassLoad, QueueStats, WorkerStatus


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
        self, poll: PollResult | None, *, seconds: float = 10.0, ready: int | None = None, startup: float = 600.0
    ) -> Decision:
        self.now += seconds
        ready = self.replicas if ready is None else ready
        decision = scale(
            self.scaling,
            replicas=self.replicas,
            ready=ready,
            poll=poll,
            now=self.now,
            history=self.history,
            startup_seconds=startup,
        )
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
        "1 job would miss its deadline at the present rate; no replica is added before all are ready, and 2 of 3 are"
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
        run.take(None, ready=1)
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
        None,
        PollResult(0),
        PollResult(0, problem=silence),
        make_poll(-1000.0, *map(make_worker, range(7))),
    ):
        run = Run(replicas=7, min_replicas=0, scale_down_seconds=0, idle_seconds=0)
        assert [run.take(nothing).replicas for _ in range(5)] == [7] * 5


def test_workers_of_other_versions_are_understood() -> None:
    """As in an upgrade: one that says the least that any version said, one that says more than this one knows."""
    least = (
        '{"worker_id": "w", "address": "http://10.0.0.1:8000", "at": 0, "model": "m", "slots": 16, "batch_ceiling": 10,'
        ' "kv_blocks_total": 9, "kv_blocks_free": 9, "online": {"running": 40, "fromTheFuture": 1}, "offline": {}'
    )
    workers = [WorkerStatus.model_validate_json(least + more) for more in ("}", ', "fromTheFuture": {"a": 1}}')]
    run = Run(replicas=2, scale_up_seconds=0)

    assert run.take(make_poll(10, *workers)).replicas == 10


def test_a_gap_in_the_polls_starts_the_window_again() -> None:
    run = Run(replicas=5, scale_down_seconds=30)
    for _ in range(3):
        run.poll(0)
    run.take(None)

    assert [run.poll(0).replicas for _ in range(4)] == [5, 5, 5, 1]


def test_workers_that_are_ready_and_silent_count_as_full() -> None:
    run = Run(replicas=4, scale_down_seconds=0)
    one = make_poll(10, make_worker(0))

    assert run.take(one, ready=4).replicas == 4


def test_a_bound_that_moved_is_followed_at_once() -> None:
    assert Run(replicas=1, min_replicas=3).poll(0).replicas == 3
    assert Run(replicas=30, max_replicas=20).poll(0).replicas == 20


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
