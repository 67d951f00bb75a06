"""What a queue states of its work: figures, outlooks, work for other workers, and the workers themselves."""

from __future__ import annotations

import json

import pytest
from queue_objects import make_status, submit

from ballast_queue.job import PARTLY_UNSERVED, UNSERVED, JobState, Outlook, output_left
from ballast_queue.status import ClassLoad


def test_in_an_empty_queue_nothing_waits_and_no_entry_is_read(queue, desk):
    before = desk.raw.info("commandstats").get("cmdstat_xrange")
    stats = queue.stats()

    assert desk.raw.info("commandstats").get("cmdstat_xrange") == before
    assert (stats.depth, stats.oldest_waiting_seconds, stats.dead_letters, stats.jobs_at_risk) == (0, 0, 0, 0)


def test_the_statistics_count_items_jobs_and_age(queue, desk, line, result):
    job_id = submit(queue, line, 3)
    submit(queue, line, 1)
    claimed, *_ = queue.leases.claim(job_id, 2, "w1")
    queue.leases.finish("w1", claimed, result(claimed))
    desk.raw.xadd(queue.store.keys.inbox, {"item": line("x")}, id="1000-1")
    stats = queue.stats()
    desk.raw.delete(queue.store.keys.inbox)

    assert (stats.items.waiting, stats.items.leased, stats.items.succeeded, stats.items.total) == (2, 1, 1, 4)
    assert (stats.inbox, stats.depth) == (1, 3)
    assert stats.jobs[JobState.IN_PROGRESS] == 2
    assert stats.oldest_waiting_seconds == stats.at - 1
    assert queue.stats().oldest_waiting_seconds < 60


RUNS = {
    "a heartbeat": lambda queue, claimed, result: queue.leases.heartbeat([claimed.lease]),
    "a result": lambda queue, claimed, result: queue.leases.finish("w2", claimed, result(claimed)),
    "a failure": lambda queue, claimed, result: queue.leases.retry(claimed, "oops", "x"),
    "a resume": lambda queue, claimed, result: queue.jobs.resume(claimed.job_id),
}


@pytest.mark.parametrize("is_older", [False, True], ids=["this version", "an older version"])
@pytest.mark.parametrize("how", RUNS)
def test_a_job_whose_model_no_worker_serves_is_no_work_until_an_item_runs(desk, line, result, how, is_older):
    queue = desk.queue
    job_id, seen = submit(queue, line, 2), []
    queue.jobs.record_outlooks([(job_id, Outlook.NO, "too late")])
    for _ in range(2):
        for item in queue.leases.claim(job_id, 2, "w1"):
            name, keys, values = queue.store.functions.give_back(*item.lease, "", unserved_model=item.model_number)
            queue.store.call((name, keys, values[:5] if is_older else values))
        stats = queue.stats()
        abandoned = desk.raw.zscore(queue.store.keys.timers, f"abandon:{job_id}")
        seen.append((abandoned, queue.jobs.get(job_id).reason, stats.claimable_depth, stats.claimable_at_risk))
    (claimed,) = queue.leases.claim(job_id, 1, "w2")
    RUNS[how](queue, claimed, result)
    stats = queue.stats()

    assert seen == [(seen[0][0], UNSERVED, 0, 0)] * 2
    assert seen[0][0] > queue.now()
    assert (stats.claimable_depth, stats.claimable_at_risk) == (stats.depth, 1)
    assert queue.jobs.get(job_id).reason == ""
    assert desk.raw.zscore(queue.store.keys.timers, f"abandon:{job_id}") is None


def test_items_of_a_model_that_no_worker_serves_hold_up_no_other_items(queue, desk, line, result):
    lines = [line(f"r{i}", model="missing" if i < 3 else "small") for i in range(5)]
    job_id, seen = queue.submissions.submit(lines).job_id, []

    def record() -> None:
        abandoned = desk.raw.zscore(queue.store.keys.timers, f"abandon:{job_id}")
        seen.append((queue.jobs.get(job_id).reason, abandoned is not None, queue.stats().claimable_depth))

    claimed = queue.leases.claim(job_id, 3, "w1")
    missing = claimed[0].model_number
    queue.leases.give_back_many([(item, None) for item in claimed], {item.lease for item in claimed})
    record()
    served = queue.leases.claim_served(job_id, 3, "w1", [missing])
    queue.leases.heartbeat([item.lease for item in served])
    record()
    queue.leases.finish_many("w1", [(item, result(item)) for item in served])
    record()
    queue.jobs.resume(job_id)
    record()
    desk.raw.hset(queue.store.keys.job(job_id), "set_aside", 0)  # a wrong number keeps no item for good
    nothing = [queue.leases.claim_served(job_id, 3, "w1", skipped) for skipped in ([missing], [0])]
    record()
    other = queue.leases.claim_served(job_id, 3, "w2", [served[0].model_number])

    some, wholly = (PARTLY_UNSERVED, False), (UNSERVED, True)
    assert seen == [(*wholly, 0), (*some, 0), (*wholly, 0), ("", False, 3), (*wholly, 0)]
    assert ([item.index for item in served], nothing) == ([3, 4], [None, None])
    assert [(item.index, item.attempt) for item in other] == [(0, 1), (1, 1), (2, 1)]
    queue.leases.give_back_many([(item, None) for item in other], {item.lease for item in other})
    assert queue.jobs.cancel(job_id).counts.cancelled == 3


def test_what_is_left_of_a_job_is_guessed_from_limits_and_then_from_results(queue, line, result):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    without_limit = json.dumps({"custom_id": "c", "url": "/v1/chat/completions", "body": body}).encode()
    bounded = [line(f"r{i}", max_tokens=100) for i in range(10)]
    job_id = queue.submissions.submit([*bounded, line("r0"), b"bad"]).job_id
    unbounded, mixed = (
        queue.submissions.submit(lines).job_id for lines in ([without_limit], [line("a"), without_limit])
    )
    at_first = queue.jobs.get(job_id).output_left
    head = next(head for head in queue.claimable.heads() if head.job_id == job_id)
    for claimed in queue.leases.claim(job_id, 8, "w1"):
        while_leased = queue.jobs.get(job_id).output_left
        queue.leases.finish("w1", claimed, result(claimed, tokens_out=10))

    assert while_leased == 3 * 100, "until eight results are known"
    assert (at_first, head.output_left) == (1000, 1000)
    assert [queue.jobs.get(name).output_left for name in (unbounded, mixed)] == [0, 0]
    assert queue.jobs.get(job_id).output_left == 2 * 10


@pytest.mark.parametrize(
    ("asked", "succeeded", "expected"),
    [(None, 0, 0), (None, 7, 30), (800, 0, 240), (800, 7, 240), (800, 8, 26)],
    ids=["nothing known", "few results", "limits", "limits and few results", "limits and enough results"],
)
def test_few_results_predict_only_where_no_limit_does(asked: int | None, succeeded: int, expected: int):
    assert output_left(3, stored=10, asked=asked, succeeded=succeeded, generated=70) == expected


def test_an_outlook_stands_in_the_job_until_it_ends(queue, line):
    job_id = submit(queue, line, 1, deadline=queue.now() + 60)
    before = queue.jobs.get(job_id)
    queue.jobs.record_outlooks([(job_id, Outlook.NO, "it needs 2m of the 1m left")])
    told, at_risk = queue.jobs.get(job_id), queue.stats().jobs_at_risk
    (held,) = queue.leases.claim(job_id, 1, "w1")
    queue.jobs.cancel(job_id)
    while_it_ends = queue.stats().jobs_at_risk
    queue.leases.heartbeat([held.lease])
    queue.jobs.record_outlooks([(job_id, Outlook.YES, "too late to say")])

    assert (before.outlook, before.appraised, before.is_at_risk) == (None, None, False)
    assert (told.outlook, told.because, told.is_at_risk) == (Outlook.NO, "it needs 2m of the 1m left", True)
    assert told.appraised == pytest.approx(queue.now(), abs=5)
    assert (at_risk, while_it_ends) == (1, 0)
    assert (queue.jobs.get(job_id).outlook, queue.jobs.get(job_id).is_at_risk) == (Outlook.NO, False)
    assert queue.stats().jobs_at_risk == 0


def needs(queue) -> tuple[int, int]:
    """Return the numbers of items and of jobs at risk for which another worker would help."""
    stats = queue.stats()
    return stats.claimable_depth, stats.claimable_at_risk


def test_a_paused_job_is_no_need_of_workers_until_it_is_resumed(queue, line):
    open_id = submit(queue, line, 1)
    job_id = submit(queue, line, 5, deadline=queue.now() + 60)
    queue.jobs.record_outlooks([(job_id, Outlook.NO, "it needs 2m of the 1m left")])
    (held,) = queue.leases.claim(job_id, 1, "w1")
    before = needs(queue)
    queue.jobs.pause(job_id)
    paused = needs(queue)
    queue.leases.give_back(held)
    queue.jobs.record_outlooks([(job_id, Outlook.AT_RISK, "after other work")])
    told = queue.stats()
    queue.jobs.resume(job_id)
    resumed = needs(queue)
    queue.jobs.pause(open_id)

    assert (before, paused, resumed, needs(queue)) == ((5, 1), (1, 0), (6, 1), (5, 1))
    assert (told.depth, told.jobs_at_risk) == (6, 1), "its owner still sees them"


def test_items_that_a_cancel_has_not_ended_yet_are_no_need_of_workers(queue, line):
    paused, running = submit(queue, line, 2), submit(queue, line, 3)
    queue.jobs.pause(paused)
    for job_id in (paused, running):
        queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    stats = queue.stats()
    queue.timers.run_due()

    assert (stats.depth, stats.claimable_depth) == (5, 0)
    assert (queue.stats().depth, queue.stats().unclaimable) == (0, 0)


def test_active_jobs_are_those_not_over_with_the_nearest_deadlines_first(queue, line, result):
    plain = submit(queue, line, 1)
    far, near = (submit(queue, line, 1, deadline=queue.now() + seconds) for seconds in (2000, 1000))
    over = submit(queue, line, 1)
    queue.leases.finish("w1", (claimed := queue.leases.claim(over, 1, "w1")[0]), result(claimed))
    paused = submit(queue, line, 1)
    queue.jobs.pause(paused)

    assert [job.id for job in queue.jobs.active(2)] == [near, far]
    assert {job.id for job in queue.jobs.active(limit=None)} == {plain, far, near, paused}


def test_a_status_holds_until_it_expires_or_is_withdrawn(queue, desk):
    for worker in ("w2", "w1", "w3"):
        queue.workers.publish(make_status(worker, online=ClassLoad(running=1)), 60)
    all_three = [found.worker_id for found in queue.workers.statuses()]
    desk.raw.zadd(queue.store.keys.workers, {"w1": 1})
    queue.workers.withdraw("w3")

    assert all_three == ["w1", "w2", "w3"]
    assert queue.workers.statuses() == [make_status("w2", online=ClassLoad(running=1))]
    desk.raw.hset(queue.store.keys.statuses, "w2", '{"version": 9}')
    assert queue.workers.statuses() == []
    queue.workers.publish(make_status("w2", online=ClassLoad(running=1)), 60)
    assert desk.raw.hlen(queue.store.keys.statuses) == 1
