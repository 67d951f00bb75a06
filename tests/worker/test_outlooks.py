from __future__ import annotations

import json

import pytest
from queue_objects import make_status

from ballast_queue.job import JobState, Outlook
from ballast_worker import outlooks

LINE = json.dumps(
    {"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "p", "max_tokens": 100}}
)


@pytest.fixture
def appraise(queue):
    """Judge at the rate of one worker; `turn` says whether it is this one's."""

    def run(*, tokens: float = 10, now: float | None = None, is_due: bool = True) -> None:
        status = make_status(offline_items_per_second=0.1, offline_tokens_per_second=tokens)
        if is_due:
            queue.store.connection.client.delete(queue.store.keys.forecast)  # as time does
        outlooks.update_outlooks(queue, [status], queue.now() if now is None else now, {})

    return run


def test_one_worker_judges_for_all(queue, appraise) -> None:
    job_id = queue.submissions.submit([LINE], deadline=queue.now() + 5).job_id
    appraise()
    first = queue.jobs.get(job_id).outlook
    appraise(tokens=1000, is_due=False)
    same = queue.jobs.get(job_id).outlook
    appraise(tokens=1000)

    assert (first, same, queue.jobs.get(job_id).outlook) == (Outlook.NO, Outlook.NO, Outlook.YES)


def test_a_worker_that_was_killed_in_its_turn_holds_nobody_up(queue, eventually) -> None:
    assert queue.jobs.begin_forecast(0.05)
    assert eventually(lambda: queue.jobs.begin_forecast(60), "the turn to be over")


def test_a_turn_of_a_server_whose_clock_was_ahead_holds_up_no_forecast(queue) -> None:
    queue.store.connection.client.set(queue.store.keys.forecast, f"{queue.now() + 3600:.6f}", px=3_600_000)

    assert [queue.jobs.begin_forecast(60) for _ in range(2)] == [True, False]


def test_figures_are_renewed_now_and_then_and_a_new_outlook_at_once(queue, appraise) -> None:
    job_id = queue.submissions.submit([LINE], deadline=queue.now() + 10**6).job_id
    appraise()
    first = queue.jobs.get(job_id).appraised
    appraise(now=first + outlooks.REPEAT_SECONDS / 2)
    unchanged = queue.jobs.get(job_id).appraised
    appraise(now=first + outlooks.REPEAT_SECONDS)

    assert unchanged == first
    assert queue.jobs.get(job_id).appraised > first


def test_with_many_jobs_each_gets_its_turn(queue, appraise, monkeypatch) -> None:
    monkeypatch.setattr(outlooks, "MOST_JOBS", 2)
    jobs = [queue.submissions.submit([LINE], deadline=queue.now() + 10**6 + i).job_id for i in range(5)]
    without = queue.submissions.submit([LINE]).job_id
    for _ in range(3):
        appraise()

    assert [queue.jobs.get(job_id).outlook for job_id in jobs] == [Outlook.YES] * 5
    assert queue.jobs.get(without).outlook is None


def test_a_job_that_ends_is_judged_no_more(queue, appraise) -> None:
    job_id = queue.submissions.submit([LINE, LINE.replace('"a"', '"b"')], deadline=queue.now() + 5).job_id
    (held,) = queue.leases.claim(job_id, 1, "w1")
    queue.jobs.cancel(job_id)
    appraise()
    ending = queue.jobs.get(job_id)
    queue.leases.heartbeat([held.lease])

    assert (ending.state, ending.outlook) == (JobState.CANCELLING, None)
