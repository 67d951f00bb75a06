"""Values that cannot be read, defects, and an engine or a thread that ends: other offline work goes on."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import redis
from queue_objects import make_line, wait_for

from ballast_engine.build import build_engine
from ballast_policy.request import RequestClass
from ballast_policy.step.planner import plan
from ballast_queue import unused
from ballast_queue.errors import QueueFull, RefusedCall
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_worker.feeder_tasks import FULL, FeederTasks
from ballast_worker.requests import RequestOutcome


def records_of(queue: Queue, job_id: str) -> tuple[str, str]:
    """Return the keys of a job's record and of its items."""
    keys = queue.store.keys
    return keys.job(job_id), keys.job(job_id) + b":items"


@pytest.mark.parametrize("field", [b"tenant", b"priority", b"waiting", b"created", b"token", b"deadline", b"stored"])
def test_a_job_that_cannot_be_read_stops_no_other_and_runs_when_it_can_be(fed, queue, desk, eventually, field) -> None:
    bad = queue.submissions.submit([make_line(index) for index in range(3)]).job_id
    record, _ = records_of(queue, bad)
    sound = desk.hget(record, field)
    desk.hset(record, field, b"\xff\xfe")
    with fed() as serving, serving.client() as client:
        feeder = serving.worker.feeder
        eventually(lambda: feeder.stats is not None, "the first round")
        good = queue.submissions.submit([make_line(index) for index in range(3)]).job_id
        job = wait_for(queue, good, eventually)
        health = client.get("/health").status_code
        eventually(lambda: "ballast_redis_up 1.0" in client.get("/metrics").text, "the worker to see Redis")
        desk.hdel(record, field) if sound is None else desk.hset(record, field, sound)
        repaired = eventually(lambda: (job := queue.jobs.get(bad)).state.is_over and job, "the repaired job")

    assert job.counts.succeeded == 3
    assert health == 200
    assert repaired.counts.succeeded == 3


def test_an_item_that_cannot_be_read_fails_with_a_sentence_and_the_others_run(fed, queue, desk, eventually) -> None:
    job_id = queue.submissions.submit([make_line(index) for index in range(4)]).job_id
    _, items = records_of(queue, job_id)
    custom_id, _, _ = desk.hget(items, 1).partition(b"\n")
    desk.hset(items, 1, custom_id + b"\n\xff\xfe{")
    with fed():
        job = wait_for(queue, job_id, eventually)
    results = {result.custom_id: result for result in queue.results.read(job_id)}

    assert (job.counts.succeeded, job.counts.failed) == (3, 1)
    assert results["item-1"].error["code"] == "unreadable_item"
    assert "Submit the item again." in results["item-1"].error["message"]


@pytest.mark.parametrize("name", ["held", "service", "statuses", "groups", "ready", "totals"])
def test_a_shared_value_that_cannot_be_read_stops_no_job(fed, queue, desk, eventually, name) -> None:
    keys = queue.store.keys
    match name:
        case "groups":
            desk.sadd(keys.groups, b"\xff\xfe")
        case "ready":
            desk.zadd(keys.ready, {b"1000|t|\xff\xfe": 0})
            desk.sadd(keys.groups, b"1000|t|")
        case "statuses":
            desk.zadd(keys.workers, {b"\xff": 2**40})
            desk.hset(keys.statuses, b"\xff", b"\xff\xfe")
        case _:
            desk.hset(getattr(keys, name), b"\xff\xfe", b"\xff\xfe")
    job_id = queue.submissions.submit([make_line(0)]).job_id
    with fed() as serving:
        job = wait_for(queue, job_id, eventually)
        is_dead = serving.worker.feeder.is_dead
    unused.remove(queue)  # the bytes would not be in balance

    assert job.counts.succeeded == 1
    assert not is_dead


def test_prefixes_that_cannot_be_read_keep_no_cancelled_item_in_the_engine(fed, queue, valkey, eventually) -> None:
    with fed(slots=2) as serving, redis.Redis.from_url(valkey.url) as raw:
        kept, cancelled = (
            queue.submissions.submit([make_line(0, max_tokens=1500, ignore_eos=True)]).job_id for _ in range(2)
        )
        prefixes = queue.store.keys.part(kept, "prefixes")
        raw.set(prefixes, "no hash")
        outcomes = serving.worker.feeder.recorder.outcomes
        eventually(lambda: serving.worker.engine.stats().offline.running == 2, "both items to run")
        queue.jobs.cancel(cancelled)
        eventually(lambda: outcomes[RequestClass.OFFLINE, RequestOutcome.ABORTED], "one item to be aborted")
        raw.delete(prefixes)
        queue.jobs.cancel(kept)
        eventually(serving.is_idle, "the other item to be aborted")

    assert outcomes[RequestClass.OFFLINE, RequestOutcome.LENGTH] == 0


def test_a_list_of_declared_tenants_that_cannot_be_read_stops_no_work(fed, queue, valkey, eventually) -> None:
    with redis.Redis.from_url(valkey.url) as raw:
        raw.set(queue.store.keys.declared, "no sorted set")
        job_id = queue.submissions.submit([make_line(0)], tenant="acme").job_id
        with fed(offline={"tenants": [{"name": "acme"}]}) as serving:
            eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to complete")
            failures = serving.worker.feeder.tasks.failures

    assert failures["unread inboxes"]


def test_a_defect_in_one_task_is_counted_and_offline_work_goes_on(fed, queue, eventually, monkeypatch) -> None:
    monkeypatch.setattr("ballast_worker.feeder.update_outlooks", lambda *_: 1 / 0)
    with fed() as serving, serving.client() as client:
        feeder = serving.worker.feeder
        feeder.recorder.ended = None  # another defect: every settled item raises
        job_id = queue.submissions.submit([make_line(0)]).job_id
        eventually(lambda: feeder.tasks.failures["outlooks"] > 1, "the failures to be counted")
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded == 1, "the result")
        before = client.get("/metrics").text
        monkeypatch.setattr(Queue, "stats", lambda _: 1 / 0)
        eventually(lambda: feeder.tasks.failures["figures"], "the figures to fail")
        shown = client.get("/metrics").text

    tasks = ("outlooks", "settle", "figures")
    assert all(f'ballast_feeder_failures_total{{task="{task}"}}' in shown for task in tasks)
    assert ("ballast_queue_items" in before, "ballast_queue_items" in shown) == (True, False), "no old figures"


def test_each_time_that_redis_is_full_for_a_task_is_in_the_log(caplog):
    def fails():
        raise QueueFull("no memory left")

    tasks = FeederTasks()
    for task in (fails, fails, bool, fails):
        tasks.run("some", task)
    full = [record for record in caplog.records if record.message == FULL]

    assert len(full) == 2


def test_the_log_names_a_new_kind_of_error_at_once_and_repeats_each_later(caplog, monkeypatch):
    def refuses():
        raise RefusedCall("a record cannot be read")

    tasks = FeederTasks()
    for task in (refuses, refuses, bool, partial(len, 3)):
        tasks.run("some", task)
    monkeypatch.setattr("ballast_worker.feeder_tasks.REPEAT_SECONDS", 0.0)
    tasks.run("some", refuses)
    logged = [bool(record.exc_info) for record in caplog.records if record.message.startswith("feeder task failed")]

    assert logged == [False, True, False], "a trace for a defect"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_feeder_that_ended_makes_the_worker_unhealthy(fed, eventually) -> None:
    with fed() as serving, serving.client() as client:
        feeder, loop = serving.worker.feeder, serving.worker.loop
        before, was_dead = client.get("/health").status_code, feeder.is_dead

        def end(_: float) -> None:
            raise SystemExit

        loop.wait_as_feeder = end  # no handler of errors catches this
        loop.wake_feeder()
        eventually(lambda: feeder.is_dead, "the thread to end")
        health = client.get("/health")

    assert (before, was_dead) == (200, False)
    assert health.status_code == 503
    assert "offline" in health.json()["reason"]
    assert not feeder.is_up
    assert feeder.drained.is_set(), "no drain waits for it"


def test_items_go_back_to_the_queue_at_once_if_the_engine_dies(fed, queue, eventually) -> None:
    broken = threading.Event()

    def decide(snapshot):
        if broken.is_set():
            raise ZeroDivisionError
        return plan(snapshot)

    job_id = queue.submissions.submit([make_line(index, max_tokens=1900, ignore_eos=True) for index in range(3)]).job_id
    with fed(partial(build_engine, planner=decide), offline={"leaseSeconds": 600}) as serving:
        eventually(lambda: serving.worker.engine.stats().offline.running == 3, "the items to run")
        broken.set()
        counts = eventually(lambda: (found := queue.jobs.get(job_id).counts).leased == 0 and found, "no lease")

    assert (counts.waiting, counts.failed) == (3, 0)


def test_a_feeder_waits_between_its_rounds_while_the_engine_is_unhealthy(fed, eventually) -> None:
    waits: list[float] = []

    with fed() as serving:
        feeder, loop = serving.worker.feeder, serving.worker.loop
        wait = loop.wait_as_feeder

        def record(seconds: float) -> bool:
            if loop.failure is not None:
                waits.append(seconds)
            return wait(seconds)

        eventually(lambda: feeder.stats, "the first look")
        loop.failure = "The engine failed."
        loop.wait_as_feeder = record
        eventually(lambda: len(waits) > 12, "some rounds")

    assert sum(waits[2:12]) > 0.5
