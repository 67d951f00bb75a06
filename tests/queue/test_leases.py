"""Leases, from a claim to its result: what an attempt gets, keeps and returns, and who may end it."""

from __future__ import annotations

import pytest
from queue_objects import ids, submit

from ballast_queue.job import JobState, Prefix
from ballast_queue.outcome import Outcome
from ballast_queue.settings import QueueSettings


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


def test_giving_back_spends_no_attempt_and_keeps_the_prefix_until_the_item_ends(queue, desk, line, result):
    job_id = submit(queue, line, 2)
    prefix = Prefix(token_ids=(5, 6), seed=9, model_revision="r1")
    (first,) = queue.leases.claim(job_id, 1, "w1")
    given = queue.leases.give_back(first, prefix)
    (second,) = queue.leases.claim(job_id, 1, "w2")
    queue.leases.give_back(second)
    (third,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", third, result(third))

    assert not desk.raw.exists(queue.store.keys.part(job_id, "prefixes"))
    assert given is Outcome.DONE
    assert (second.attempt, second.prefix) == (1, prefix)
    assert (third.attempt, third.prefix) == (1, prefix)
    assert [queue.leases.give_back(item) for item in (first, third)] == [Outcome.LEASE_LOST, Outcome.ALREADY_DONE]


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


@pytest.mark.parametrize("is_dead", [False, True], ids=["a result", "a dead letter"])
def test_a_worker_that_repeats_two_results_of_an_item_learns_which_one_counts(queue, desk, line, result, is_dead):
    job_id = submit(queue, line, 2)
    (late,) = queue.leases.claim(job_id, 1, "w1")
    desk.end_lease(job_id, 0)
    queue.timers.run_due()
    (fresh,) = queue.leases.claim(job_id, 1, "w1")
    if is_dead:
        queue.leases.retry(fresh, "no", "no", is_retryable=False)
    first, again = (queue.leases.finish_many("w1", [(c, result(c)) for c in (late, fresh)]) for _ in range(2))

    assert first == [Outcome.LEASE_LOST, Outcome.ALREADY_DONE if is_dead else Outcome.DONE]
    assert again == [Outcome.LEASE_LOST, Outcome.ALREADY_DONE]


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
