"""Jobs, from their submission until their results are deleted."""

from __future__ import annotations

import pytest
from queue_objects import ids, submit

from ballast_queue.errors import JobNotFound, JobStateConflict
from ballast_queue.job import JobState, Outlook, Prefix, Result
from ballast_queue.outcome import Outcome
from ballast_queue.settings import QueueSettings


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
def test_items_of_a_cancelled_job_that_wait_or_come_back_are_cancelled(queue, desk, line, how):
    queue.settings.apply(QueueSettings(backoff_seconds=3600))
    job_id = submit(queue, line, 3)
    claimed, delayed, returned = queue.leases.claim(job_id, 3, "w1")
    queue.leases.retry(delayed, "oops", "x")
    queue.leases.give_back(returned)
    queue.jobs.cancel(job_id)
    if how == "give_back":
        assert queue.leases.give_back(claimed, Prefix(token_ids=(1,))) is Outcome.CANCELLED
    elif how == "retry":
        assert queue.leases.retry(claimed, "oops", "x") is Outcome.CANCELLED
    else:
        desk.end_lease(job_id, 0)
        queue.timers.run_due()

    assert queue.jobs.get(job_id).state is JobState.CANCELLED
    assert ids(queue, job_id) == ["r2", "r1", "r0"]


def test_a_paused_job_finishes_what_runs_and_starts_nothing(queue, line, result):
    job_id = submit(queue, line, 2)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    paused = queue.jobs.pause(job_id)
    nothing = queue.leases.claim(job_id, 1, "w1")
    heads = queue.claimable.heads()
    outcome = queue.leases.finish("w1", claimed, result(claimed))
    resumed = queue.jobs.resume(job_id)
    (last,) = queue.leases.claim(job_id, 5, "w1")
    queue.jobs.pause(job_id)
    queue.leases.finish("w1", last, result(last))

    assert paused.state is JobState.PAUSED
    assert (nothing, heads) == ([], [])
    assert outcome is Outcome.DONE
    assert (resumed.state, queue.jobs.get(job_id).state) == (JobState.IN_PROGRESS, JobState.COMPLETED)


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


def test_a_job_that_is_over_is_deleted_for_a_user_without_a_trace(queue, desk, line, result):
    kept = submit(queue, line, 1)
    before = desk.raw.hgetall(queue.store.keys.totals)
    job_id = submit(queue, line, 4, key="k", tenant="b", deadline=queue.now() + 1000)
    queue.jobs.record_outlooks([(job_id, Outlook.NO, "too late")])
    done, failed, returned = queue.leases.claim(job_id, 3, "w1")
    queue.leases.finish("w1", done, result(done))
    queue.leases.retry(failed, "oops", "x", is_retryable=False)
    queue.jobs.cancel(job_id)
    queue.leases.give_back(returned)
    queue.jobs.delete(job_id)

    assert queue.jobs.ids() == [kept]
    assert not list(desk.raw.scan_iter(f"ballast:{{{queue.name}}}:job:{job_id}*"))
    assert {name for name, _ in desk.raw.zscan_iter(queue.store.keys.timers) if job_id.encode() in name} == set()
    after = desk.raw.hgetall(queue.store.keys.totals)
    assert {name: value for name, value in after.items() if value != b"0" and name not in {b"sequence", b"token"}} == {
        name: value for name, value in before.items() if value != b"0" and name not in {b"sequence", b"token"}
    }
    assert queue.leases.finish("w1", returned, result(returned)) is Outcome.NOT_FOUND
    with pytest.raises(JobNotFound):
        queue.jobs.delete(job_id)
    assert queue.submissions.submit([line("r0")], key="k", tenant="b").is_new


@pytest.mark.parametrize(
    ("verb", "state", "advice"),
    [
        ("get", "in_progress", "cancel it first"),
        ("pause", "paused", "cancel it first"),
        ("cancel", "cancelling", "repeat the call when its running items have ended"),
    ],
)
def test_a_job_that_is_not_over_is_not_deleted(queue, line, result, *, verb, state, advice):
    job_id = submit(queue, line, 2)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    getattr(queue.jobs, verb)(job_id)
    with pytest.raises(JobStateConflict) as caught:
        queue.jobs.delete(job_id)

    assert str(caught.value) == f"job {job_id} is {state}: only a job that is over can be deleted; {advice}"
    assert queue.leases.finish("w1", claimed, result(claimed)) is Outcome.DONE
    assert "r0" in ids(queue, job_id)


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


@pytest.mark.parametrize("is_passed", [False, True], ids=["behind", "passed again"])
def test_a_reader_gets_all_results_after_a_failover_to_a_server_whose_clock_is_behind(
    queue, desk, line, result, is_passed
):
    job_id = submit(queue, line, 4)
    key = queue.store.keys.part(job_id, "results")

    def finish(num: int, *, clock_ahead: float = 0) -> None:
        if clock_ahead:
            desk.raw.execute_command("XSETID", key, f"{int(1000 * (queue.now() + clock_ahead))}-0")
        queue.leases.finish_many("w1", [(item, result(item)) for item in queue.leases.claim(job_id, num, "w1")])

    following = queue.results.read(job_id, follow=True, poll_seconds=0.01)
    finish(1)
    seen = [next(following).custom_id]
    replica = {name: desk.raw.dump(name) for name in desk.raw.scan_iter(f"ballast:{{{queue.name}}}:*")}
    finish(1, clock_ahead=60)
    seen.append(next(following).custom_id)
    for name, value in replica.items():
        desk.raw.restore(name, 0, value, replace=True)
    finish(2)
    finish(1, clock_ahead=120 if is_passed else 0)

    assert seen == ["r0", "r1"]
    assert [found.custom_id for found in following] == ["r0", "r1", "r2", "r3"]


def test_a_reader_gets_no_result_again_because_of_a_redrive(queue, line, result):
    job_id = submit(queue, line, 2)
    following = queue.results.read(job_id, follow=True, poll_seconds=0.01)
    done, failed = queue.leases.claim(job_id, 2, "w1")
    queue.leases.finish("w1", done, result(done))
    seen = [next(following).custom_id]
    queue.leases.retry(failed, "oops", "x", is_retryable=False)
    seen.append(next(following).custom_id)
    queue.jobs.redrive(job_id, takes_all=True)
    (again,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", again, result(again))

    assert seen == ["r0", "r1"]
    assert [found.custom_id for found in following] == ["r1"]


def test_a_reader_follows_a_job_that_is_redriven_after_its_end_was_seen(queue, line, result):
    job_id = submit(queue, line, 2)
    done, failed = queue.leases.claim(job_id, 2, "w1")
    queue.leases.finish("w1", done, result(done))
    queue.leases.retry(failed, "oops", "x", is_retryable=False)
    calls = []

    def attempt(call):
        calls.append(call)
        if len(calls) == 2:  # the first one finds that the job is over
            queue.jobs.redrive(job_id, takes_all=True)
        if len(calls) == 6:  # after an empty page, and after the one that finds that it is not over any more
            (again,) = queue.leases.claim(job_id, 1, "w1")
            queue.leases.finish("w1", again, result(again))
        return call()

    found = queue.results.read(job_id, follow=True, poll_seconds=0.01, attempt=attempt)

    assert [one.custom_id for one in found] == ["r0", "r1"]
