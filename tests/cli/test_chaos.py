"""A slice of `make chaos`, and what its checks detect."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import network
import pytest
import redis
from checks import leaks_in_redis, results_of
from excuses import NOTICED_SECONDS, WATCH_SECONDS, Recorded
from load import Jobs, Online, Outcome, SubmittedJob
from stacks import Kind, WorkerLife

from ballast_queue.job import Result
from ballast_queue.redis_store import Queue

ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(valkey, queue_name: str):
    connected = Queue.connect(valkey.url, queue_name)
    yield connected
    connected.close()


def submit(queue: Queue, make_line, *names: str) -> SubmittedJob:
    job = queue.submissions.submit([make_line(name) for name in names])
    return SubmittedJob("key", job.job_id, list(names))


def finish(queue: Queue, job: SubmittedJob, count: int) -> None:
    for claimed in queue.leases.claim(job.job_id, count, "w"):
        queue.leases.finish("w", claimed, Result(custom_id=claimed.custom_id, status_code=200, body={}))


def problems(queue: Queue, *submitted: SubmittedJob) -> list[str]:
    jobs = Jobs(lambda: None, queue.name, None)
    jobs.submitted = list(submitted)
    return results_of(queue, jobs)[1]


@pytest.mark.parametrize(
    ("num_finished", "acknowledged", "found"),
    [
        (2, ["a", "b"], []),
        (1, ["a", "b"], ["key: 1 of 2 items have no result", "key: in_progress with 1 of 2 succeeded"]),
        (2, ["a"], ["key: 1 results too many, e.g. b", "key: completed with 2 of 1 succeeded"]),
    ],
    ids=["one for each", "a missing one", "one too many"],
)
def test_each_item_has_one_result(
    queue: Queue, make_line, num_finished: int, acknowledged: list[str], found: list[str]
):
    job = submit(queue, make_line, "a", "b")
    finish(queue, job, num_finished)
    job.custom_ids = acknowledged

    assert problems(queue, job) == found


def test_an_acknowledged_job_that_is_gone_is_a_problem(queue: Queue):
    found = problems(queue, SubmittedJob("key", "job-that-never-was", ["a"]))

    assert found == ["key (job-that-never-was) was acknowledged, and does not exist"]


def test_a_lease_and_a_status_without_a_worker_are_problems(queue: Queue, valkey, make_line):
    job = submit(queue, make_line, "a")
    (claimed,) = queue.leases.claim(job.job_id, 1, "w")
    with redis.Redis.from_url(valkey.url) as connection:
        found = "\n".join(leaks_in_redis(queue, connection, []))
        finish_anyway(queue, job, claimed.token)
        clean = [text for text in leaks_in_redis(queue, connection, []) if "connections to Redis" not in text]

    assert "1 items are under lease" in found
    assert "tenants hold items" in found
    assert "timers of jobs that are over" in found
    assert clean == []


def finish_anyway(queue: Queue, job: SubmittedJob, token: int) -> None:
    queue.jobs.cancel(job.job_id)
    queue.leases.heartbeat([(job.job_id, 0, token)])


WHOLE = b'HTTP/1.1 200 OK\r\n\r\ndata: {"finish_reason":"length"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("answer", "is_killed", "is_ending", "outcome"),
    [
        pytest.param(WHOLE, False, False, Outcome.ANSWERED, id="a whole answer"),
        pytest.param(WHOLE, True, True, Outcome.ANSWERED, id="a whole answer of a worker that was killed then"),
        pytest.param(WHOLE[:30], False, False, Outcome.LOST, id="half an answer"),
        pytest.param(WHOLE[:30], False, True, Outcome.LOST, id="half an answer of a worker that drains"),
        pytest.param(WHOLE[:30], True, False, Outcome.EXCUSED, id="half an answer of a killed worker"),
        pytest.param(b"", False, False, Outcome.LOST, id="no answer"),
        pytest.param(b"", False, True, Outcome.REFUSED, id="no answer to a request that came during the drain"),
        pytest.param(b"HTTP/1.1 503 x\r\n\r\n", False, False, Outcome.REFUSED, id="503"),
        pytest.param(b"HTTP/1.1 500 x\r\n\r\n", False, False, Outcome.LOST, id="500"),
    ],
)
def test_a_request_is_lost_unless_its_worker_was_killed_or_refused_it(answer, is_killed, is_ending, outcome):
    async def ask() -> Outcome:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            since = time.monotonic() if is_ending else None
            life = WorkerLife(1, f"http://127.0.0.1:{port}", ending_since=since, is_killed=is_killed)
            return (await Online([]).ask(life, "a", is_streamed=True))[0]

    assert asyncio.run(ask()) is outcome


REFUSED = "ConnectionRefusedError: [Errno 111] Connect call failed"
KILLED, LOST = (100.0, 104.0), [(0.0, True), (100.0, False), (104.0, True)]
RESTARTED = (100.0, 104.0, "kubelet restarted")


@pytest.mark.parametrize(
    ("recorded", "at", "failure", "excuse"),
    [
        (Recorded(kills=[KILLED]), 104 + NOTICED_SECONDS, REFUSED, "lost with a killed worker"),
        (Recorded(kills=[KILLED]), 105 + NOTICED_SECONDS, REFUSED, ""),
        (Recorded(kills=[KILLED]), 98.5, "half an answer", "lost with a killed worker"),
        (Recorded(kills=[KILLED]), 90, "half an answer", ""),
        (Recorded(endpoints=[(101, 0)], nodes={"a": LOST}), 103, REFUSED, "refused while the node counted as lost"),
        (Recorded(endpoints=[(101, 0)], nodes={"a": LOST}), 105 + WATCH_SECONDS, REFUSED, ""),
        (Recorded(endpoints=[(101, 0)], nodes={"a": LOST}), 103, "half an answer", ""),
        (Recorded(endpoints=[(101, 0), (102, 1)], nodes={"a": LOST}), 103, REFUSED, ""),
        (Recorded(nodes={"a": LOST}), 103, REFUSED, ""),
        (Recorded(endpoints=[(101, 0)], broken=[RESTARTED]), 103, REFUSED, ""),
    ],
)
def test_a_failed_request_is_excused_only_by_a_cause_in_the_cluster(recorded, at, failure, excuse):
    assert recorded.excuse({"at": at, "seconds": 1.0, "failure": failure}) == excuse


def test_the_timeline_shows_each_fault_beside_the_failed_requests():
    recorded = Recorded(broken=[RESTARTED], endpoints=[(101, 0), (112, 2)], nodes={"a": LOST})
    failures = [{"at": at, "seconds": 0.5, "failure": REFUSED} for at in (103.25, 200.0)]

    assert recorded.timeline(failures) == [
        "00:00:00.0     a is ready",
        "00:01:40.0     a counts as lost",
        "00:01:40.0 kubelet restarted (until 00:01:44.0)",
        "00:01:41.0     0 endpoints ready",
        f"00:01:43.2     refused while the node counted as lost, 0.5 s: {REFUSED}",
        "00:01:44.0     a is ready",
        "00:01:52.0     2 endpoints ready",
        f"00:03:20.0     FAILED, 0.5 s: {REFUSED}",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_kills_and_network_faults_lose_nothing_and_leak_nothing():
    # With this seed, two bursts after little work kill each kind of process alone, and all of one `ballast up` at once.
    options = ("--seed", "2781", "--kills", "10", "--minutes", "5", "--pause", "0.5")
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    figures = dict(re.findall(r"^\| (.+?) +\| +(\S.*?) \|$", done.stdout, re.MULTILINE))

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(figures["killed: all"]) >= 10
    assert all(int(figures[f"killed: {kind}"]) for kind in Kind), figures
    assert int(figures["items"]) == int(figures["results"]) > 0
    assert int(figures["online requests answered"]) > 0
    assert (network.MISSING in done.stdout) if network.program() is None else int(figures["network faults"]) > 0
