"""What has to be true after a run: one result for each item, and nothing that a dead worker held."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from load import Jobs
from network import FAULTS, Link
from queue_audit import differences
from redis import Redis
from stacks import Stack, descriptors, metrics

from ballast_queue.errors import JobNotFound
from ballast_queue.redis_store import Queue

SETTLE_SECONDS = 300
MOST_CLIENTS_PER_WORKER = 4
"""Connections of one worker to Redis: one, and new ones that it opens before it has closed an old one."""


def wait_for(what: Callable[[], bool], *, seconds: float, pause: float = 0.5) -> bool:
    """Wait until `what` returns True. Return whether it did in time."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def results_of(queue: Queue, jobs: Jobs) -> tuple[int, list[str]]:
    """Return the number of results, and the differences from one result per custom_id."""
    found, num_results = [], 0
    for job in jobs.submitted:
        try:
            results = Counter(result.custom_id for result in queue.results.read(job.job_id))
            state = queue.jobs.get(job.job_id)
        except JobNotFound:
            found.append(f"{job.key} ({job.job_id}) was acknowledged, and does not exist")
            continue
        num_results += results.total()
        expected = Counter(job.custom_ids)
        if missing := expected - results:
            found.append(f"{job.key}: {missing.total()} of {len(job.custom_ids)} items have no result")
        if extra := results - expected:
            found.append(f"{job.key}: {extra.total()} results too many, e.g. {next(iter(extra))}")
        if not job.is_cancelled and state.counts.succeeded != len(job.custom_ids):
            found.append(f"{job.key}: {state.state} with {state.counts.succeeded} of {len(job.custom_ids)} succeeded")
    return num_results, found


def leaks_in_redis(queue: Queue, connection: Redis, stacks: Sequence[Stack]) -> Iterator[str]:
    """Yield leases, counters, indexes and connections without a holder."""
    yield from differences(connection, queue.name)
    items = queue.stats().items
    if items.leased or items.waiting:
        yield f"{items.leased} items are under lease and {items.waiting} wait, with every job over"
    held = connection.hgetall(queue.store.keys.held)
    if held:
        yield f"tenants hold items: {held}"
    timers = connection.zrange(queue.store.keys.timers, 0, -1)
    if left := [timer for timer in timers if not timer.startswith(b"forget:")]:
        yield f"timers of jobs that are over: {left[:3]}"
    alive = {stack.life.pid for stack in stacks if stack.life is not None}
    known = {int(status.worker_id.rpartition("-")[2]) for status in queue.workers.statuses()}
    if known != alive:
        yield f"workers that publish a status: {sorted(known)}, running: {sorted(alive)}"
    num_clients = int(connection.info("clients")["connected_clients"])
    if num_clients > 2 + MOST_CLIENTS_PER_WORKER * len(stacks):
        yield f"{num_clients} connections to Redis, of {len(stacks)} workers"


def leaks_in_workers(stacks: Sequence[Stack]) -> Iterator[str]:
    """Yield leases, slots, requests and KV blocks that idle workers hold, from their metrics."""
    for stack in stacks:
        if stack.life is None:
            yield f"{stack.name} has no worker"
            continue
        samples = metrics(stack.life.address)
        for name, value in samples.items():
            is_held = name.startswith(("ballast_leases", "ballast_slots{", "ballast_requests_waiting"))
            if value and (is_held or name == 'ballast_kv_blocks{state="used"}'):
                yield f"{stack.name}: {name} is {value:g} without any work"


def descriptor_leaks(stacks: Sequence[Stack], links: dict[str, Link]) -> Iterator[str]:
    """Cut the links of living workers with every fault in turn, and yield the descriptors that they keep."""
    watched = [stack for stack in stacks if stack.name in links and stack.life is not None]
    time.sleep(2)  # connections of the last requests close
    before = {stack.name: descriptors(stack.life.pid) for stack in watched if stack.life is not None}
    for fault in FAULTS:
        for stack in watched:
            links[stack.name].spoil(fault)
        time.sleep(1)
        for stack in watched:
            links[stack.name].heal()
        time.sleep(0.5)
    for stack in watched:
        life = stack.life
        if life is None:
            continue
        wait_for(lambda address=life.address: metrics(address)["ballast_redis_up"] == 1, seconds=60)
        time.sleep(0.5)
        after = descriptors(life.pid)
        for kind in after:
            if after[kind] > before[stack.name].get(kind, 0) + 1:  # one connection may be renewed at this moment
                yield f"{stack.name}: descriptors before {len(FAULTS)} faults: {before[stack.name]}, after: {after}"
