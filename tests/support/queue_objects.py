"""Jobs and their lines, statuses of workers, and executors for tests of the worker and the commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import redis
from waiting import until

from ballast_engine.request import GenerationRequest
from ballast_queue.job import Claimed, Job
from ballast_queue.redis_store import Queue
from ballast_queue.status import ClassLoad, ReservationStatus, SloStatus, WorkerStatus


def make_line(index: int, **body: Any) -> str:
    """Return a line of a job for the small model: eight greedy tokens by default."""
    body = {"model": "tiny", "prompt": f"Item {index} returns", "max_tokens": 8, "temperature": 0} | body
    return json.dumps({"custom_id": f"item-{index}", "method": "POST", "url": "/v1/completions", "body": body})


def make_chat(custom_id: str, messages: list[dict[str, Any]], **body: Any) -> str:
    """Return a line with a chat for the small model: two tokens by default."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 2} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def make_claimed(**changes: Any) -> Claimed:
    """Return an item under its first lease."""
    fields = {"job_id": "j", "index": 0, "custom_id": "a", "url": "/v1/completions", "body": {}, "tenant": "t"}
    return Claimed(**(fields | {"token": 1, "seed": 1} | changes))


def wait_for(queue: Queue, job_id: str, eventually: Callable[[Callable[[], Any], str], Any]) -> Job:
    """Return a job when it is over."""
    return eventually(lambda: (job := queue.jobs.get(job_id)).state.is_over and job, f"job {job_id} to be over")


def submit(queue: Queue, line: Callable[[str], bytes], n: int = 3, **options: Any) -> str:
    """Submit a job with the lines r0, r1, ..., and return its id."""
    return queue.submissions.submit([line(f"r{i}") for i in range(n)], **options).job_id


def ids(queue: Queue, job_id: str) -> list[str]:
    """Return the ids of the finished items of a job."""
    return [found.custom_id for found in queue.results.read(job_id)]


def make_status(worker_id: str = "w1", **fields: Any) -> WorkerStatus:
    """Return the status of an idle worker with eight slots."""
    sizes = {"slots": 8, "batch_ceiling": 8, "kv_blocks_total": 1, "kv_blocks_free": 1} | fields
    about = {"address": "http://127.0.0.1:8000", "at": 0, "model": "m"}
    reservation = ReservationStatus(slots=0, blocks=0, chunk=0, in_use=0, is_met=True)
    loads = {"online": ClassLoad(), "offline": ClassLoad(), "slo": SloStatus(), "reservation": reservation}
    limits = {"offline_reserved": 0, "offline_most": sizes["slots"]}
    return WorkerStatus(worker_id=worker_id, **(about | loads | limits | sizes))


def make_cluster(raw: redis.Redis) -> None:
    """Make a server a cluster of its own. For its first seconds it refuses calls, and redis-py leaves a socket open."""
    raw.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    until(lambda: raw.cluster("INFO")["cluster_state"] == "ok", said="the cluster")


def join(first: redis.Redis, second: redis.Redis, *, port: int) -> None:
    """Make two servers one cluster."""
    first.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
    second.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
    first.execute_command("CLUSTER MEET", "127.0.0.1", port)
    until(lambda: all(node.cluster("INFO")["cluster_state"] == "ok" for node in (first, second)), said="the cluster")


class WrappedRunner:
    """An executor in which a subclass changes `run`."""

    def around(self, inner: Any) -> Any:
        self.inner = inner
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SlowRunner(WrappedRunner):
    """An executor whose steps take long, so that no item ends by itself."""

    def run(self, batch: Any, interrupt: Any) -> Any:
        time.sleep(0.05)
        return self.inner.run(batch, interrupt)


class RecordingEngine:
    """The engine of a worker, which keeps the requests that it gets."""

    def __init__(self, options: Any, *, tokenizer: Any) -> None:
        from ballast_engine.build import build_engine  # the commands need no torch

        self._engine = build_engine(options, tokenizer=tokenizer)
        self.requests: list[GenerationRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._engine.submit(request)
