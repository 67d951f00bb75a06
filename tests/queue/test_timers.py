"""Timers run when they are due, and take turns, whatever the size of the jobs."""

from __future__ import annotations

import pytest
from queue_objects import submit

from ballast_queue.job import JobState
from ballast_queue.outcome import Outcome
from ballast_queue.settings import QueueSettings
from ballast_queue.timers import BATCH, MOST_TIMERS, Timers
from ballast_queue.unused import run_timers


def test_a_timer_of_a_newer_version_is_left_alone(queue, desk):
    desk.raw.zadd(queue.store.keys.timers, {"later:job-1": 1})
    moved = queue.timers.run_due()

    assert (moved, desk.raw.zcard(queue.store.keys.timers)) == (0, 1)


def test_time_alone_ends_leases_backoffs_and_jobs(queue, line, result):
    queue.settings.apply(QueueSettings(lease_seconds=1e-6, backoff_seconds=1e-6, results_seconds=1e-6))
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "w1")
    expired = queue.timers.run_due()
    (again,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.retry(again, "oops", "x")
    woken = queue.timers.run_due()
    (last,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", last, result(last))
    deleted = queue.timers.run_due()
    left = queue.store.call(queue.store.functions.due(10))

    assert (expired, woken, deleted, left) == (1, 1, 1, [])
    assert last.attempt == 3
    assert queue.jobs.all() == []


def end(queue, line):
    """Begin the end of a job with more waiting items than two calls move."""
    job_id = submit(queue, line, 3 * BATCH)
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    return job_id


def back_off(queue, line):
    """Let the backoff of more items end than two calls move."""
    job_id = submit(queue, line, 3 * BATCH)
    functions = queue.store.functions
    calls = [
        functions.retry(job_id, c.index, c.token, code="x", message="x", again=True, status=500, jitter=0)
        for _ in range(3)
        for c in queue.leases.claim(job_id, BATCH, "w1")
    ]
    queue.store.connection.call_many(calls)
    return job_id


@pytest.mark.parametrize("fill", [end, back_off])
def test_a_large_job_holds_up_no_expired_lease_of_another(queue, line, fill):
    queue.settings.apply(QueueSettings(backoff_seconds=1e-6))
    job_id = fill(queue, line)
    queue.settings.apply(QueueSettings(generation=1, lease_seconds=1e-6))
    other = submit(queue, line, 1)
    queue.leases.claim(other, 1, "w1")
    moved = [queue.timers.run_due(), queue.timers.run_due()]
    counts, large = queue.jobs.get(other).counts, queue.jobs.get(job_id)

    assert (counts.waiting, counts.leased) == (1, 0)
    assert moved == [BATCH, BATCH + 1]
    assert large.counts.cancelled + (large.counts.waiting - large.delayed) * (fill is back_off) == 2 * BATCH


def test_several_large_jobs_end_in_turns(queue, line):
    job_ids = [end(queue, line) for _ in range(3)]
    for _ in range(3):
        queue.timers.run_due()

    assert [queue.jobs.get(job_id).counts.cancelled for job_id in job_ids] == [BATCH] * 3


def test_timers_go_on_with_a_large_job_until_their_time_is_over(queue, line):
    job_id = end(queue, line)
    times = iter([10.0, 10.5, 11.0])
    moved = Timers(queue.store, lambda: next(times)).run_due(1.0)
    half = queue.jobs.get(job_id).counts.cancelled
    rest = queue.timers.run_due(3600.0)

    assert (moved, half, rest) == (2 * BATCH, 2 * BATCH, BATCH)
    assert queue.jobs.get(job_id).state is JobState.CANCELLED


def test_a_large_job_and_an_expired_lease_take_turns_within_one_time(queue, line):
    job_id = end(queue, line)
    queue.settings.apply(QueueSettings(lease_seconds=1e-6))
    other = submit(queue, line, 1)
    queue.leases.claim(other, 1, "w1")
    times = iter([0.0, 0.5, 1.0])
    Timers(queue.store, lambda: next(times)).run_due(1.0)

    assert queue.jobs.get(other).counts.waiting == 1
    assert queue.jobs.get(job_id).counts.cancelled == 2 * BATCH


def test_one_call_ends_many_small_jobs(queue, line):
    job_ids = [submit(queue, line, 2) for _ in range(20)]
    for job_id in job_ids:
        queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    moved = queue.timers.run_due()

    assert moved == 40
    assert {queue.jobs.get(job_id).state for job_id in job_ids} == {JobState.CANCELLED}


def test_a_cancel_ends_a_large_job_in_one_call(queue, line):
    job_id = submit(queue, line, 3 * BATCH)

    assert queue.jobs.cancel(job_id).state is JobState.CANCELLED
    assert queue.store.call(queue.store.functions.due(10)) == []


def test_timers_that_cannot_run_hold_up_no_expired_lease(queue, desk, line):
    keys = queue.store.keys
    for number in range(MOST_TIMERS):
        desk.raw.set(keys.job(f"bad{number}"), "no record")
    desk.raw.zadd(keys.timers, {f"lease:bad{number}": 1 for number in range(MOST_TIMERS)})
    desk.raw.zadd(keys.timers, {f"kind-of-a-newer-version:{number}": 2 for number in range(MOST_TIMERS)})
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "w1")
    desk.end_lease(job_id, 0)
    desk.raw.zadd(keys.timers, {f"lease:{job_id}": 3})
    moved = [queue.timers.run_due() for _ in range(3)]
    num_left = desk.raw.zcount(keys.timers, "-inf", queue.now())
    for number in range(MOST_TIMERS):
        desk.raw.delete(keys.job(f"bad{number}"))

    assert moved == [0, 0, 1]
    assert num_left == 2 * MOST_TIMERS, "they stay due"


def lost(queue, claimed):
    return queue.leases.heartbeat([each.lease for each in claimed])


def test_after_a_gap_living_workers_keep_their_leases_and_dead_ones_lose_theirs(queue, desk, line, result):
    job_id = submit(queue, line, 4)
    first, second, dead = (queue.leases.claim(job_id, n, worker) for n, worker in ((1, "w1"), (2, "w2"), (1, "dead")))
    queue.timers.run_due()
    for index in range(4):
        desk.end_lease(job_id, index)
    desk.leave_timers(3600)
    moved = [queue.timers.run_due()]  # whoever is first: a worker before its own heartbeat, or the operator
    due = queue.store.call(queue.store.functions.due(10))
    outcomes = [lost(queue, first), queue.leases.finish("w2", second[0], result(second[0])), lost(queue, second[1:])]
    moved += [queue.timers.run_due() for _ in range(2)]
    desk.end_grace(job_id)
    moved.append(queue.timers.run_due())
    (again,) = queue.leases.claim(job_id, 9, "w1")

    assert due == [], "a spared lease keeps no worker busy"
    assert outcomes == [[], Outcome.DONE, []]
    assert moved == [0, 0, 0, 1]
    assert (again.index, again.attempt) == (dead[0].index, 2)


def test_the_grace_ends_by_itself_within_seconds(queue, desk, line):
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "dead")
    queue.timers.run_due()
    desk.end_lease(job_id, 0)
    desk.leave_timers(3600)
    queue.timers.run_due()
    until = desk.raw.zscore(queue.store.keys.timers, f"lease:{job_id}")

    assert 5 < until - queue.now() < 13


def test_a_grace_does_not_outlast_a_clock_that_was_set_back(queue, desk, line):
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "dead")
    queue.timers.run_due()
    desk.end_lease(job_id, 0)
    desk.leave_timers(-3600)
    desk.raw.hset(queue.store.keys.totals, "spared_at", f"{(queue.now() + 3600) * 1000:.0f}")

    assert queue.timers.run_due() == 1


@pytest.mark.parametrize("num_due", [0, 30])
def test_leases_expire_also_if_timers_run_rarely(queue, desk, line, num_due):
    """As in a queue without workers, which the operator visits. It goes on while something is due."""
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "dead")
    queue.timers.run_due()
    desk.end_lease(job_id, 0)
    leased = []
    for _ in range(2):
        for _ in range(num_due):
            desk.pass_deadline(submit(queue, line, 1, deadline=queue.now() + 3600))
        desk.leave_timers(60)
        desk.raw.zadd(queue.store.keys.timers, {f"lease:{job_id}": 1}, xx=True)
        run_timers(queue)
        leased.append(queue.jobs.get(job_id).counts.leased)

    assert leased == [1, 0]


def test_each_gap_spares_the_leases_if_timers_run_between_them(queue, desk, line):
    job_id = submit(queue, line, 1)
    claimed = queue.leases.claim(job_id, 1, "w1")
    queue.timers.run_due()
    moved = []
    for _ in range(2):
        desk.end_grace(job_id)
        queue.timers.run_due()
        desk.end_lease(job_id, 0)
        desk.leave_timers(60)
        moved.append(queue.timers.run_due())
        lost(queue, claimed)

    assert moved == [0, 0]


@pytest.mark.parametrize("lease_seconds", [5, 10, 30, 3600])
def test_a_gap_that_leaves_living_workers_too_little_time_spares_their_leases(queue, desk, line, lease_seconds):
    """A worker renews its leases each third of their time, and returns within some seconds after an outage."""
    queue.settings.apply(QueueSettings(lease_seconds=lease_seconds))
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "w1")
    queue.timers.run_due()
    desk.end_lease(job_id, 0)
    desk.leave_timers(max(2.0, lease_seconds / 3) + 0.2)

    assert queue.timers.run_due() == 0


@pytest.mark.parametrize("text", ["no number", ""])
def test_a_broken_time_of_the_last_run_holds_up_no_timer(queue, desk, line, text):
    job_id = submit(queue, line, 1)
    queue.leases.claim(job_id, 1, "dead")
    desk.end_lease(job_id, 0)
    desk.raw.hset(queue.store.keys.totals, mapping={"timers_at": text, "spared_at": text})
    moved = queue.timers.run_due()
    desk.raw.hdel(queue.store.keys.totals, "timers_at", "spared_at")

    assert moved == 1


def test_timers_of_a_queue_without_jobs_leave_no_key(queue, desk):
    queue.timers.run_due()

    assert desk.raw.exists(queue.store.keys.totals) == 0
