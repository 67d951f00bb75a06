from __future__ import annotations

import json

import pytest
from queue_objects import ids, make_status, submit

from ballast_queue.errors import JobNotFound, JobStateConflict
from ballast_queue.job import PARTLY_UNSERVED, UNSERVED, JobState, Outlook, Prefix, Result, output_left
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.settings import UNCONFIGURED, InForce, QueueSettings
from ballast_queue.status import ClassLoad


def test_a_job_runs_from_submission_to_completion(queue, line, result):
    job_id = submit(queue, line)
    states = [queue.jobs.get(job_id).state]
    claimed = queue.leases.claim(job_id, 10, "w1")
    outcomes = queue.leases.finish_many("w1", [(c, result(c, tokens_in=2, tokens_out=5)) for c in reversed(claimed)])
    job = queue.jobs.get(job_id)

    assert states == [JobState.IN_PROGRESS]
    assert outcomes == [Outcome.DONE] * 3
    assert job.state is JobState.COMPLETED
    assert (job.counts.total, job.counts.succeeded, job.counts.done) == (3, 3, 3)
    assert (job.tokens_in, job.tokens_out) == (6, 15)
    assert ids(queue, job_id) == ["r2", "r1", "r0"]
    assert queue.claimable.heads() == []


def test_a_claim_carries_everything_an_attempt_needs(queue, desk, line):
    job_id = queue.submissions.submit(
        [line("r0", temperature=0.5), line("r1", seed=7)], tenant="acme", priority=3
    ).job_id
    first, second = queue.leases.claim(job_id, 2, "w1")
    expires = desk.raw.zscore(queue.store.keys.part(job_id, "leases"), "0")

    assert (first.custom_id, first.url, first.tenant, first.priority) == ("r0", "/v1/completions", "acme", 3)
    assert first.body == {"model": "small", "prompt": "Say r0", "temperature": 0.5}
    assert (first.attempt, first.index, first.prefix) == (1, 0, None)
    assert second.seed == 7
    assert second.token > first.token
    assert expires == pytest.approx(queue.now() + 30, abs=5)


def test_an_attempt_samples_with_the_same_seed_whoever_runs_it(queue, line):
    job_id = queue.submissions.submit([line(f"r{i}", **({"seed": -1} if i % 2 else {})) for i in range(20)]).job_id
    first = queue.leases.claim(job_id, 20, "w1")
    for claimed in first:
        queue.leases.give_back(claimed)
    second = queue.leases.claim(job_id, 20, "w2")

    assert [c.seed for c in first] == [c.seed for c in second]
    assert all(0 <= c.seed < 2**63 for c in first)
    assert len({c.seed for c in first}) == 20


def test_a_result_names_the_worker_that_finished_it(queue, line, result):
    job_id = submit(queue, line, 2)
    first, second = queue.leases.claim(job_id, 2, "w1")
    queue.leases.finish("w1", first, result(first))
    queue.leases.finish("w1", second, result(second, worker="its own name"))

    assert [found.worker for found in queue.results.read(job_id)] == ["w1", "its own name"]


def test_a_repeated_finish_changes_nothing(queue, line, result):
    job_id = submit(queue, line, 1)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    outcomes = [queue.leases.finish("w1", claimed, result(claimed)) for _ in range(3)]

    assert outcomes == [Outcome.DONE, Outcome.ALREADY_DONE, Outcome.ALREADY_DONE]
    assert ids(queue, job_id) == ["r0"]


def test_a_result_of_an_expired_lease_stays_invisible(queue, desk, line, result):
    job_id = submit(queue, line, 1)
    (late,) = queue.leases.claim(job_id, 1, "w1")
    desk.end_lease(job_id, 0)
    reaped = queue.timers.run_due()
    left = queue.store.call(queue.store.functions.due(10))
    (fresh,) = queue.leases.claim(job_id, 1, "w2")
    outcomes = [
        queue.leases.finish("w1", late, result(late, body={"text": "late"})),
        queue.leases.finish("w2", fresh, result(fresh, body={"text": "fresh"})),
        queue.leases.finish("w1", late, result(late, body={"text": "late"})),
    ]

    assert (reaped, left) == (1, [])
    assert fresh.attempt == 2
    assert fresh.token > late.token
    assert outcomes == [Outcome.LEASE_LOST, Outcome.DONE, Outcome.LEASE_LOST]
    assert [found.body for found in queue.results.read(job_id)] == [{"text": "fresh"}]


def test_a_lease_may_finish_after_its_expiry_until_its_timer_has_run(queue, desk, line, result):
    job_id = submit(queue, line, 2)
    first, second = queue.leases.claim(job_id, 2, "w1")
    for index in range(2):
        desk.end_lease(job_id, index)
    before = queue.leases.finish("w1", first, result(first))
    queue.timers.run_due()
    after = queue.leases.finish("w1", second, result(second))

    assert (before, after) == (Outcome.DONE, Outcome.LEASE_LOST)


def test_giving_back_spends_no_attempt_and_keeps_the_prefix(queue, line):
    job_id = submit(queue, line, 1)
    prefix = Prefix(token_ids=(5, 6), seed=9, model_revision="r1")
    (first,) = queue.leases.claim(job_id, 1, "w1")
    given = queue.leases.give_back(first, prefix)
    (second,) = queue.leases.claim(job_id, 1, "w2")
    queue.leases.give_back(second)
    (third,) = queue.leases.claim(job_id, 1, "w1")

    assert given is Outcome.DONE
    assert (second.attempt, second.prefix) == (1, prefix)
    assert (third.attempt, third.prefix) == (1, prefix)
    assert queue.leases.give_back(first) is Outcome.LEASE_LOST


def test_a_prefix_goes_with_its_item(queue, desk, line, result):
    job_id = submit(queue, line, 2)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.give_back(claimed, Prefix(token_ids=(5,)))
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", claimed, result(claimed))

    assert not desk.raw.exists(queue.store.keys.part(job_id, "prefixes"))


def test_a_failed_attempt_keeps_the_number_of_a_prefix_and_an_expired_one_keeps_all_of_it(impatient, desk, line):
    queue = impatient
    job_id = submit(queue, line, 1)
    prefix = Prefix(token_ids=(5,), num_computed=7)
    queue.leases.give_back(queue.leases.claim(job_id, 1, "w1")[0], prefix)
    queue.leases.claim(job_id, 1, "w1")
    desk.end_lease(job_id, 0)
    queue.timers.run_due()
    (expired,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.retry(expired, "oops", "x")
    (failed,) = queue.leases.claim(job_id, 1, "w1")

    assert (expired.attempt, expired.prefix) == (2, prefix)
    assert (failed.attempt, failed.prefix) == (3, Prefix(num_computed=7))


def test_the_next_attempt_knows_what_a_lost_one_computed(queue, desk, line):
    job_id = submit(queue, line, 2)
    first, second = queue.leases.claim(job_id, 2, "w1")
    queue.leases.give_back(second, Prefix(token_ids=(5,), seed=3, num_computed=7))
    (second,) = queue.leases.claim(job_id, 1, "w1")
    for num_computed in (10, 20):
        queue.leases.report_progress({first.lease: num_computed, second.lease: num_computed + 1, (job_id, 0, 999): 5})
    desk.end_lease(job_id, 0)
    desk.end_lease(job_id, 1)
    queue.timers.run_due()
    queue.leases.report_progress({first.lease: 99})
    claimed = queue.leases.claim(job_id, 2, "w2")

    assert [item.prefix for item in claimed] == [
        Prefix(num_computed=20),
        Prefix(token_ids=(5,), seed=3, num_computed=21),
    ]


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


def test_items_come_back_in_their_own_order(queue, line):
    job_id = submit(queue, line, 6)
    claimed = queue.leases.claim(job_id, 4, "w1")
    queue.leases.give_back_many([(claimed[3], None), (claimed[1], None)])

    assert [c.index for c in queue.leases.claim(job_id, 4, "w2")] == [1, 3, 4, 5]


def test_all_that_is_due_is_moved_and_counted(queue, desk, line):
    for _ in range(3):
        job_id = submit(queue, line, 2)
        queue.leases.claim(job_id, 2, "w1")
        desk.end_lease(job_id, 0)
        desk.end_lease(job_id, 1)

    assert queue.timers.run_due() == 6
    assert queue.stats().items.leased == 0


def test_a_timer_of_a_newer_version_is_left_alone(queue, desk):
    desk.raw.zadd(queue.store.keys.timers, {"later:job-1": 1})
    moved = queue.timers.run_due()

    assert (moved, desk.raw.zcard(queue.store.keys.timers)) == (0, 1)


def test_a_failed_attempt_waits_for_its_backoff(queue, desk, line):
    queue.settings.apply(QueueSettings(backoff_seconds=3600))
    job_id = submit(queue, line, 3)
    claimed = queue.leases.claim(job_id, 2, "w1")
    outcome = queue.leases.retry(claimed[0], "oops", "the engine failed")
    head = queue.claimable.heads()[0]
    meanwhile = queue.leases.claim(job_id, 5, "w2")
    none_ready = queue.claimable.heads()
    not_yet = queue.timers.run_due()
    desk.end_backoff(job_id, 0)
    woken = queue.timers.run_due()
    left = queue.store.call(queue.store.functions.due(10))
    (again,) = queue.leases.claim(job_id, 5, "w1")

    assert outcome is Outcome.RETRIED
    assert (head.waiting, head.remaining) == (1, 3)
    assert [c.index for c in meanwhile] == [2]
    assert none_ready == []
    assert (not_yet, woken, left) == (0, 1, [])
    assert (again.index, again.attempt) == (0, 2)


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


def test_backoff_doubles_with_jitter_and_is_capped(queue, desk, line):
    queue.settings.apply(QueueSettings(backoff_seconds=1000, backoff_max_seconds=3000, max_attempts=9))
    job_id = submit(queue, line, 1)
    waits = []
    for _ in range(4):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        before = queue.now()
        queue.leases.retry(claimed, "oops", "again")
        ready_at = desk.raw.zscore(queue.store.keys.part(job_id, "delayed"), "0")
        waits.append(ready_at - before)
        desk.end_backoff(job_id, 0)
        queue.timers.run_due()

    for wait, most in zip(waits, (1000, 2000, 3000, 3000), strict=True):
        assert most / 2 <= wait <= most + 1


OPENAI = {
    "a success": (
        {"status_code": 200, "body": {"text": "hi"}},
        {"response": {"status_code": 200, "request_id": "j:r0", "body": {"text": "hi"}}, "error": None},
    ),
    "an error": (
        {"status_code": 500, "error": {"code": "oops", "message": "x"}},
        {"response": None, "error": {"code": "oops", "message": "x"}},
    ),
    "an error with an answer": (
        {"status_code": 400, "body": {"error": {}}, "error": {"code": "no", "message": "x"}},
        {
            "response": {"status_code": 400, "request_id": "j:r0", "body": {"error": {}}},
            "error": {"code": "no", "message": "x"},
        },
    ),
}


@pytest.mark.parametrize("name", OPENAI)
def test_a_result_reads_as_a_line_of_openais_output_file(name):
    given, shown = OPENAI[name]

    assert Result(custom_id="r0", **given).as_openai("j") == {"id": "batch_req_j_r0", "custom_id": "r0"} | shown


def test_cancelling_ends_waiting_items_at_once_and_leased_ones_at_their_heartbeat(queue, line, result):
    job_id = submit(queue, line, 5)
    done, kept, beaten, *_ = queue.leases.claim(job_id, 3, "w1")
    queue.leases.finish("w1", done, result(done))
    at_once = queue.jobs.cancel(job_id)
    finished = queue.leases.finish("w1", kept, result(kept))
    lost = queue.leases.heartbeat([beaten.lease])
    job = queue.jobs.get(job_id)

    assert (at_once.state, at_once.counts.cancelled, at_once.counts.leased) == (JobState.CANCELLING, 2, 2)
    assert finished is Outcome.DONE
    assert lost == [beaten.lease]
    assert (job.state, job.counts.succeeded, job.counts.cancelled) == (JobState.CANCELLED, 2, 3)
    assert queue.leases.finish("w1", beaten, result(beaten)) is Outcome.CANCELLED
    errors = {found.custom_id: found.error and found.error["code"] for found in queue.results.read(job_id)}
    assert errors == {"r0": None, "r1": None, "r2": "cancelled", "r3": "cancelled", "r4": "cancelled"}
    assert queue.jobs.cancel(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["give_back", "retry", "expire"])
def test_an_item_of_a_cancelled_job_that_comes_back_is_cancelled(queue, desk, line, how):
    job_id = submit(queue, line, 1)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.jobs.cancel(job_id)
    if how == "give_back":
        assert queue.leases.give_back(claimed, Prefix(token_ids=(1,))) is Outcome.CANCELLED
    elif how == "retry":
        assert queue.leases.retry(claimed, "oops", "x") is Outcome.CANCELLED
    else:
        desk.end_lease(job_id, 0)
        queue.timers.run_due()

    assert queue.jobs.get(job_id).state is JobState.CANCELLED
    assert ids(queue, job_id) == ["r0"]


def test_cancelling_takes_items_in_backoff_along(queue, line):
    queue.settings.apply(QueueSettings(backoff_seconds=3600))
    job_id = submit(queue, line, 2)
    first, second = queue.leases.claim(job_id, 2, "w1")
    queue.leases.retry(first, "oops", "x")
    queue.leases.give_back(second)

    assert queue.jobs.cancel(job_id).state is JobState.CANCELLED


def test_a_cancel_that_died_half_way_is_finished_by_reap(queue, line):
    job_id = submit(queue, line, 1200)
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    queue.store.call(queue.store.functions.sweep(job_id, 10))
    while queue.jobs.get(job_id).state is JobState.CANCELLING:
        assert queue.timers.run_due() > 0

    assert queue.jobs.get(job_id).counts.cancelled == 1200


def test_a_paused_job_finishes_what_runs_and_starts_nothing(queue, line, result):
    job_id = submit(queue, line, 2)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    paused = queue.jobs.pause(job_id)
    nothing = queue.leases.claim(job_id, 1, "w1")
    heads = queue.claimable.heads()
    outcome = queue.leases.finish("w1", claimed, result(claimed))
    resumed = queue.jobs.resume(job_id)

    assert paused.state is JobState.PAUSED
    assert (nothing, heads) == ([], [])
    assert outcome is Outcome.DONE
    assert resumed.state is JobState.IN_PROGRESS
    assert len(queue.leases.claim(job_id, 5, "w1")) == 1


def test_a_paused_job_whose_last_item_finishes_is_complete(queue, line, result):
    job_id = submit(queue, line, 1)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.jobs.pause(job_id)
    queue.leases.finish("w1", claimed, result(claimed))

    assert queue.jobs.get(job_id).state is JobState.COMPLETED


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_job_that_is_over_cannot_be_held(queue, line, result, verb):
    job_id = submit(queue, line, 1)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", claimed, result(claimed))

    with pytest.raises(JobStateConflict, match=f"is completed: only a job that is not over or ending can be {verb}d$"):
        getattr(queue.jobs, verb)(job_id)


def test_a_deadline_keeps_what_is_done(queue, desk, line, result):
    job_id = submit(queue, line, 4, deadline=queue.now() + 1000)
    done, lost, late = queue.leases.claim(job_id, 3, "w1")
    queue.leases.finish("w1", done, result(done))
    desk.pass_deadline(job_id)
    refused = queue.leases.claim(job_id, 1, "w1")
    queue.timers.run_due()
    queue.timers.run_due()
    middle = queue.jobs.get(job_id)
    gone = queue.leases.heartbeat([lost.lease])
    queue.leases.finish("w1", late, result(late))
    job = queue.jobs.get(job_id)

    assert refused == []
    assert (middle.state, middle.counts.expired, middle.counts.leased) == (JobState.FINALIZING, 1, 2)
    assert gone == [lost.lease]
    assert (job.state, job.counts.succeeded, job.counts.expired) == (JobState.EXPIRED, 2, 2)
    assert "3 of 4 items left" in job.reason
    assert sorted(ids(queue, job_id)) == ["r0", "r1", "r2", "r3"]
    with pytest.raises(JobStateConflict, match=f"^job {job_id} is expired: submit its lines as another job$"):
        queue.jobs.redrive(job_id)


def test_results_that_are_deleted_while_they_are_read_are_no_complete_download(queue, desk, line, result, monkeypatch):
    monkeypatch.setattr("ballast_queue.results.PAGE", 1)
    job_id = submit(queue, line, 2)
    queue.leases.finish_many("w1", [(item, result(item)) for item in queue.leases.claim(job_id, 2, "w1")])
    found = queue.results.read(job_id)
    next(found)
    desk.outlive_results(job_id)
    queue.timers.run_due()

    with pytest.raises(JobNotFound):
        list(found)


def test_results_are_kept_and_then_deleted_without_a_trace(queue, desk, line, result):
    job_id = submit(queue, line, 1, key="k")
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    too_early = desk.outlive_results(job_id) or queue.timers.run_due()
    queue.leases.finish("w1", claimed, result(claimed))
    kept = queue.timers.run_due()
    desk.outlive_results(job_id)
    deleted = queue.timers.run_due()

    assert (too_early, kept, deleted) == (0, 0, 1)
    with pytest.raises(JobNotFound):
        queue.jobs.get(job_id)
    with pytest.raises(JobNotFound):
        next(queue.results.read(job_id))
    left = set(desk.raw.scan_iter(f"ballast:{{{queue.name}}}:*"))
    assert left <= {queue.store.keys.totals, queue.store.keys.settings}
    assert queue.leases.finish("w1", claimed, result(claimed)) is Outcome.NOT_FOUND
    assert queue.stats().items.total == 0
    assert queue.submissions.submit([line("r0")], key="k").is_new


def test_a_heartbeat_extends_what_is_held_and_names_what_is_not(queue, desk, line):
    job_id, other = submit(queue, line, 2), submit(queue, line, 1)
    held, taken = queue.leases.claim(job_id, 2, "w1")
    (elsewhere,) = queue.leases.claim(other, 1, "w1")
    for index in (0, 1):
        desk.end_lease(job_id, index)
    desk.raw.zadd(queue.store.keys.part(job_id, "leases"), {"0": 2e9})
    queue.timers.run_due()
    leases = [taken.lease, held.lease, elsewhere.lease, ("job-none", 0, 1)]
    lost = queue.leases.heartbeat(leases)
    expires = desk.raw.zscore(queue.store.keys.part(job_id, "leases"), "0")

    assert sorted(lost) == sorted([taken.lease, ("job-none", 0, 1)])
    assert expires == pytest.approx(queue.now() + 30, abs=5)
    assert queue.leases.heartbeat([]) == []


def test_a_worker_may_hold_and_finish_thousands_of_items(queue, line, result):
    job_id = submit(queue, line, 4500)
    claimed = [c for _ in range(5) for c in queue.leases.claim(job_id, 5000, "w1")]
    lost = queue.leases.heartbeat([c.lease for c in claimed])
    outcomes = queue.leases.finish_many("w1", [(c, result(c)) for c in (*claimed, claimed[0])])

    assert (len(claimed), lost) == (4500, [])
    assert outcomes == [Outcome.DONE] * 4500 + [Outcome.ALREADY_DONE]
    assert queue.jobs.get(job_id).state is JobState.COMPLETED


def test_the_same_item_twice_in_one_call_counts_once(queue, line, result):
    job_id = submit(queue, line, 2)
    first, second = queue.leases.claim(job_id, 2, "w1")
    outcomes = queue.leases.finish_many("w1", [(c, result(c)) for c in (first, first, second)])

    assert outcomes == [Outcome.DONE, Outcome.ALREADY_DONE, Outcome.DONE]
    assert ids(queue, job_id) == ["r0", "r1"]


def test_newer_settings_of_a_resource_win(queue):
    def put(created, generation):
        return queue.settings.apply(QueueSettings(created=created, generation=generation, max_attempts=generation + 1))

    put_in_force = [put(10, 3), put(10, 2), put(9, 99), put(10, 4), put(11, 1), put(11, 1)]

    assert put_in_force == [True, False, False, True, True, True]
    assert queue.settings.read().max_attempts == 2


@pytest.mark.parametrize("part", ["", "/part"], ids=["namespace and name", "a part of a name"])
def test_the_settings_of_a_queue_are_those_of_its_own_resource_then_of_the_oldest(valkey, queue_name, part):
    queue = Queue.connect(valkey.url, f"{queue_name}{part}")
    namespace = queue.name.partition("/")[0]
    put = [
        queue.settings.apply(QueueSettings(owner=owner, created=created))
        for owner, created in [
            ("other/m", 5),
            ("other/n", 4),
            ("other/of the same age", 4),
            ("other/newer", 9),
            (f"{namespace}/llm", 8),
            (f"{namespace}/newer", 9),
            (queue.name, 10),
            (f"{namespace}/llm", 8),
            ("other/m", 99),
        ]
    ]

    assert put == [True, True, False, False, True, False, True, False, False]
    assert queue.settings.read().owner == queue.name
    queue.close()


def test_settings_give_way_if_nobody_renews_them(queue, desk):
    mine, other = QueueSettings(owner=queue.name, created=1), QueueSettings(owner="other/m", created=2)
    queue.settings.apply(mine)
    before = queue.settings.apply(other)
    desk.raw.hset(queue.store.keys.settings, "renewed", "1")
    queue.settings.renew(queue.name)
    renewed = queue.settings.apply(other)
    desk.raw.hset(queue.store.keys.settings, "renewed", "1")
    queue.settings.renew("other/m")  # it renews its own settings only
    gone = queue.settings.apply(other)

    assert (before, renewed, gone) == (False, False, True)
    assert queue.settings.renew(queue.name) == InForce("other/m", 2, 0)
    assert queue.settings.apply(mine), "the resource that the queue is named after returns"


def test_older_settings_of_a_resource_win_once_nobody_applies_the_newer_ones(queue, desk):
    """As after a restore of the cluster from a backup: the resource begins again at an older generation."""
    older, newer = (QueueSettings(owner=queue.name, created=10.5, generation=number) for number in (6, 7))
    queue.settings.apply(newer)
    before = queue.settings.apply(older)
    desk.raw.hset(queue.store.keys.settings, "applied", "1")
    in_force = queue.settings.renew(queue.name)  # the operator renews the settings of a generation that it has lost
    after = queue.settings.apply(older)
    again = [queue.settings.apply(newer), queue.settings.apply(older)]

    assert (before, after, again) == (False, True, [True, False])
    assert in_force == InForce(queue.name, 10.5, 7)

    desk.raw.hdel(queue.store.keys.settings, "applied")  # as an older version of Ballast wrote them
    assert [queue.settings.apply(older) for _ in range(2)] == [False, False]
    desk.raw.hset(queue.store.keys.settings, "applied", "1")
    assert queue.settings.apply(older)


def test_settings_are_removed_by_the_name_of_their_owner_only(queue):
    queue.settings.apply(QueueSettings(owner=queue.name, max_attempts=9))
    dropped = [queue.settings.drop("other/m"), queue.settings.drop(queue.name), queue.settings.drop(queue.name)]

    assert dropped == [False, True, False]
    assert queue.settings.read() == UNCONFIGURED


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


def test_jobs_are_listed_in_the_order_of_their_submission(queue, line):
    job_ids = [submit(queue, line, 1) for _ in range(5)]

    assert [job.id for job in queue.jobs.all()] == job_ids


def test_results_follow_a_job_while_it_runs(queue, line, result):
    job_id = submit(queue, line, 3)
    following = queue.results.read(job_id, follow=True, poll_seconds=0.01)
    seen = []
    for _ in range(3):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        queue.leases.finish("w1", claimed, result(claimed))
        seen.append(next(following).custom_id)

    assert seen == ["r0", "r1", "r2"]
    assert list(following) == []


def test_a_reader_waits_while_a_job_runs_without_new_results(queue, line, result, monkeypatch):
    job_id = submit(queue, line, 2)

    def wait(*_):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        queue.leases.finish("w1", claimed, result(claimed))

    monkeypatch.setattr(queue.store.connection, "wait_for_entry", wait)

    assert [found.custom_id for found in queue.results.read(job_id, follow=True)] == ["r0", "r1"]


def test_in_an_empty_queue_nothing_waits(queue):
    stats = queue.stats()

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


def test_a_job_that_an_older_version_paused_counts_as_others_after_its_next_change(queue, desk, line):
    """The totals of an older version know nothing of it, and a sum below zero would hide what is paused later."""
    keys = queue.store.keys
    resumed, changed = (submit(queue, line, 3, deadline=queue.now() + 60) for _ in range(2))
    for job_id in (resumed, changed):
        queue.jobs.record_outlooks([(job_id, Outlook.NO, "it needs 2m of the 1m left")])
        queue.jobs.pause(job_id)
        desk.raw.hdel(keys.job(job_id), "unclaimable", "unclaimable_at_risk")
    desk.raw.hdel(keys.totals, "unclaimable", "unclaimable_at_risk")
    at_first = needs(queue)
    queue.jobs.resume(resumed)
    queue.jobs.record_outlooks([(changed, Outlook.NO, "it needs 3m of the 1m left")])

    assert (at_first, needs(queue)) == ((6, 2), (3, 1))


def test_active_jobs_are_those_not_over_with_the_nearest_deadlines_first(queue, line, result):
    plain = submit(queue, line, 1)
    far, near = (submit(queue, line, 1, deadline=queue.now() + seconds) for seconds in (2000, 1000))
    over = submit(queue, line, 1)
    queue.leases.finish("w1", (claimed := queue.leases.claim(over, 1, "w1")[0]), result(claimed))
    paused = submit(queue, line, 1)
    queue.jobs.pause(paused)

    assert [job.id for job in queue.jobs.active(2)] == [near, far]
    assert {job.id for job in queue.jobs.active(limit=None)} == {plain, far, near, paused}


def test_one_of_all_workers_has_the_turn(queue):
    assert [queue.jobs.begin_forecast(60) for _ in range(3)] == [True, False, False]
