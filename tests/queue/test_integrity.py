"""The auditor itself: whatever is kept twice and differs is found, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import redis
from queue_audit import differences

from ballast_queue.job import Outlook, Result
from ballast_queue.redis_store import Queue


@dataclass(frozen=True)
class Books:
    """A queue whose balance a test destroys: an item of each kind, in one job."""

    queue: Queue
    raw: redis.Redis
    job_id: str

    def problems(self) -> list[str]:
        return differences(self.raw, self.queue.name)

    def part(self, name: str) -> bytes:
        return self.queue.store.keys.part(self.job_id, name)

    def add(self, field: str, by: int = 1) -> None:
        """Add to a number of the job's record."""
        self.raw.hincrby(self.queue.store.keys.job(self.job_id), field, by)


@pytest.fixture
def books(valkey: Any, queue_name: str, line: Any) -> Iterator[Books]:
    queue = Queue.connect(valkey.url, queue_name)
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(6)], deadline=queue.now() + 1000).job_id
    done, dead, late, back, *_ = queue.leases.claim(job_id, 5, "w1")
    queue.leases.finish("w1", done, Result(custom_id="r0", status_code=200, body={}))
    queue.leases.retry(dead, "oops", "x", is_retryable=False)
    queue.leases.retry(late, "oops", "x")
    queue.leases.give_back(back)
    queue.jobs.record_outlooks([(job_id, Outlook.AT_RISK, "perhaps")])
    with redis.Redis.from_url(valkey.url) as raw:
        yield Books(queue, raw, job_id)
    queue.close()


OTHER = "1000|other|inf|9|job-other"
COUNTS = {"waiting": 3, "leased": 1, "dead": 1, "succeeded": 1, "failed": 1, "total": 6, "delayed": 1}
"""Numbers in the record of the job."""
TOTALS = {"waiting": 3, "dead": 1, "at_risk": 1, "unclaimable": 0, "jobs:in_progress": 1}
"""Numbers of the queue."""
SETS = {"ready": "'1000|default|", "groups": "'1000|default|'", "backlog": "'job-", "active": "'job-"}
"""Keys of the queue, and how the content of each starts."""
TAMPERED: dict[str, tuple[Callable[[Books], object], str]] = {
    **{
        f"a job counts too much as {field}": (partial(Books.add, field=field), f"{field}: found {n + 1}, expected {n}")
        for field, n in COUNTS.items()
    },
    **{
        f"the queue counts too much as {field}": (
            lambda b, field=field: b.raw.hincrby(b.queue.store.keys.totals, field, 1),
            f"totals.{field} is {n + 1}, its jobs sum up to {n}",
        )
        for field, n in TOTALS.items()
    },
    **{
        f"{key} is lost": (
            lambda b, key=key: b.raw.delete(getattr(b.queue.store.keys, key)),
            f"{key}: found set(), expected {{{member}",
        )
        for key, member in SETS.items()
    },
    "a job counts an item too much that was let go": (
        lambda b: b.add("cancelled"),
        "cancelled and expired: found 1, expected 0",
    ),
    "a job is over while items wait": (
        lambda b: b.raw.hset(b.queue.store.keys.job(b.job_id), "state", "completed"),
        "is over: found True, expected False",
    ),
    "an item came back twice": (
        lambda b: b.raw.zadd(b.part("returned"), {"4": 4}),
        "waiting: found 3, expected 4",
    ),
    "a lease is lost": (lambda b: b.raw.delete(b.part("leases")), "items with a token: found {4}, expected set()"),
    "a token is lost": (lambda b: b.raw.delete(b.part("live")), "items with a token: found set(), expected {4}"),
    "a line is lost": (
        lambda b: b.raw.hdel(b.part("items"), "5"),
        "items with a line: found {1, 2, 3, 4}, expected {1, 2, 3, 4, 5}",
    ),
    "a prefix outlives its item": (
        lambda b: b.raw.hset(b.part("prefixes"), "0", "{}"),
        "prefixes of items that are over: found {0}, expected set()",
    ),
    "a result is there twice": (
        lambda b: b.raw.xadd(b.part("results"), {"i": "0", "r": '{"custom_id":"r0","status_code":200}'}),
        "custom ids with several results: found ['r0'], expected []",
    ),
    "a result is there too much": (
        lambda b: b.raw.xadd(b.part("results"), {"i": "9", "r": '{"custom_id":"r9","status_code":200}'}),
        "results: found 3, expected 2",
    ),
    "a rank has no job": (lambda b: b.raw.zadd(b.queue.store.keys.ready, {OTHER: 0}), "ready: found "),
    "a group has no rank": (lambda b: b.raw.sadd(b.queue.store.keys.groups, "0999|other|"), "groups: found "),
    "a tenant holds an item too much": (
        lambda b: b.raw.hincrby(b.queue.store.keys.held, "default", 1),
        "held: found {'default': 2}, expected {'default': 1}",
    ),
    "another tenant holds an item": (
        lambda b: b.raw.hset(b.queue.store.keys.held, "other", 1),
        "expected {'default': 1}",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_differs_is_found_by_name(books: Books, name: str):
    tamper, sentence = TAMPERED[name]
    before = books.problems()
    tamper(books)
    found = books.problems()

    assert before == []
    assert any(sentence in problem for problem in found), found


def test_a_problem_of_a_job_names_the_job(books: Books):
    books.add("total")

    assert f"{books.job_id}: total: found 7, expected 6" in books.problems()
