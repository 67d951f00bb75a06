from __future__ import annotations

from http import HTTPStatus

import pytest
from queue_objects import ids, submit

from ballast_queue.errors import JobStateConflict
from ballast_queue.job import JobState, Redriven
from ballast_queue.outcome import Outcome
from ballast_queue.settings import QueueSettings


def test_attempts_are_spent_after_five_and_leave_a_dead_letter(impatient, line):
    queue = impatient
    job_id = submit(queue, line, 1)
    outcomes = []
    for _ in range(5):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        outcomes.append(queue.leases.retry(claimed, "engine_failed", "the step failed"))
    (letter,) = queue.results.dead_letters(job_id)
    (found,) = queue.results.read(job_id)
    job = queue.jobs.get(job_id)

    assert outcomes == [Outcome.RETRIED] * 4 + [Outcome.DEAD]
    assert (letter.custom_id, letter.attempts, letter.code, letter.worker) == ("r0", 5, "engine_failed", "w1")
    assert (found.status_code, found.error) == (500, {"code": "engine_failed", "message": "the step failed"})
    assert (job.state, job.counts.failed) == (JobState.COMPLETED, 1)
    assert queue.stats().dead_letters == 1


def test_a_number_of_a_subclass_is_stored_as_the_number(queue, line):
    class Verbose(float):
        def __repr__(self) -> str:
            return f"Verbose({float(self)})"

    job_id = submit(queue, line, 1)
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.retry(claimed, "oops", "x", is_retryable=False, status_code=HTTPStatus.BAD_REQUEST)
    (found,) = queue.results.read(job_id)

    assert found.status_code == 400
    assert queue.ledger.charge({"a": Verbose(0.5)}).tenants == {"a": 0.5}


def test_five_expired_leases_make_a_dead_letter(queue, desk, line, result):
    job_id = submit(queue, line, 1)
    for _ in range(5):
        (last,) = queue.leases.claim(job_id, 1, "w1")
        desk.end_lease(job_id, 0)
        queue.timers.run_due()
    (found,) = queue.results.read(job_id)

    assert queue.leases.finish("w1", last, result(last)) is Outcome.LEASE_LOST
    assert queue.leases.claim(job_id, 1, "w1") == []
    assert found.error is not None
    assert found.error["code"] == "lease_expired"
    assert "5 of 5 attempts" in found.error["message"]
    assert queue.jobs.get(job_id).state is JobState.COMPLETED


def test_redrive_withdraws_the_errors_and_starts_afresh(impatient, line, result):
    queue = impatient
    job_id = submit(queue, line, 3)
    for claimed in queue.leases.claim(job_id, 3, "w1"):
        if claimed.index == 1:
            queue.leases.finish("w1", claimed, result(claimed))
        else:
            queue.leases.retry(claimed, "oops", "x", is_retryable=False)
    before = (queue.jobs.get(job_id).state, sorted(ids(queue, job_id)))
    redriven = queue.jobs.redrive(job_id, takes_all=True)
    during = (queue.jobs.get(job_id).state, ids(queue, job_id), list(queue.results.dead_letters(job_id)))
    again = queue.leases.claim(job_id, 5, "w2")
    queue.leases.finish_many("w2", [(c, result(c)) for c in again])

    assert before == (JobState.COMPLETED, ["r0", "r1", "r2"])
    assert redriven == Redriven(returned=2, left=0)
    assert during == (JobState.IN_PROGRESS, ["r1"], [])
    assert [c.attempt for c in again] == [1, 1]
    assert queue.jobs.get(job_id).state is JobState.COMPLETED
    assert ids(queue, job_id) == ["r1", "r0", "r2"]
    assert queue.jobs.redrive(job_id) == Redriven(0, 0)


def test_redriving_many_dead_letters_takes_several_calls(impatient, line):
    queue = impatient
    job_id = submit(queue, line, 1200)
    while claimed := queue.leases.claim(job_id, 400, "w1"):
        for item in claimed:
            queue.leases.retry(item, "oops", "x", is_retryable=False)

    assert len(list(queue.results.dead_letters(job_id))) == 1200
    assert queue.jobs.redrive(job_id) == Redriven(returned=0, left=1200)
    assert queue.jobs.get(job_id).state is JobState.COMPLETED
    assert queue.jobs.redrive(job_id, takes_all=True) == Redriven(returned=1200, left=0)
    assert queue.jobs.get(job_id).counts.waiting == 1200


def test_redrive_leaves_out_what_no_attempt_can_serve(queue, desk, line):
    queue.settings.apply(QueueSettings(max_attempts=1))
    job_id = submit(queue, line, 4)
    broken, invalid, refused, silent = queue.leases.claim(job_id, 4, "w1")
    queue.leases.retry(broken, "engine_failed", 'said "is_retryable":true', is_retryable=True)
    queue.leases.retry(invalid, "invalid_request", 'not "is_retryable":true', is_retryable=False)
    queue.leases.retry(refused, "no", "no", is_retryable=False)
    desk.end_lease(job_id, silent.index)
    queue.timers.run_due()
    letters = {letter.custom_id: letter.is_retryable for letter in queue.results.dead_letters(job_id)}
    first, second = queue.jobs.redrive(job_id), queue.jobs.redrive(job_id)

    assert letters == {"r0": True, "r1": False, "r2": False, "r3": True}
    assert (first, second) == (Redriven(returned=2, left=2), Redriven(returned=0, left=2))
    assert [c.custom_id for c in queue.leases.claim(job_id, 4, "w1")] == ["r0", "r3"]


def test_nothing_is_redriven_behind_its_deadline(impatient, desk, line):
    queue = impatient
    job_id = submit(queue, line, 1, deadline=queue.now() + 1000)
    queue.leases.retry(queue.leases.claim(job_id, 1, "w1")[0], "oops", "x", is_retryable=False)
    desk.pass_deadline(job_id)
    with pytest.raises(JobStateConflict, match=f"^the deadline of job {job_id} has passed: submit its lines as"):
        queue.jobs.redrive(job_id, takes_all=True)


def test_a_redriven_job_ends_at_its_deadline(queue, desk, line):
    job_id = submit(queue, line, 1, deadline=queue.now() + 1000)
    queue.leases.retry(queue.leases.claim(job_id, 1, "w1")[0], "oops", "x", is_retryable=False)
    queue.jobs.redrive(job_id, takes_all=True)
    desk.pass_deadline(job_id)
    while queue.timers.run_due():
        pass

    assert queue.jobs.get(job_id).state is JobState.EXPIRED


def test_a_long_message_of_an_error_is_cut(queue, line):
    jobs = [submit(queue, line, 1) for _ in range(2)]
    for job_id, times in zip(jobs, (1, 5), strict=True):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        queue.leases.retry(claimed, "c" * 200 * times, "é" * 2000 * times, is_retryable=False, status_code=400)
    letters = [letter for job_id in jobs for letter in queue.results.dead_letters(job_id)]
    results = [found for job_id in jobs for found in queue.results.read(job_id)]

    assert [(letter.code, letter.message) for letter in letters] == [
        ("c" * 200, "é" * 2000),
        ("c" * 200 + "...", "é" * 2000 + "..."),
    ]
    assert [found.error for found in results] == [{"code": each.code, "message": each.message} for each in letters]
    assert [found.status_code for found in results] == [400, 400]
