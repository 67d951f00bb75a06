"""Long lines, prefixes and results move in pages, since Redis disconnects a client whose replies take too much memory."""

from __future__ import annotations

from ballast_queue.job import Prefix

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
