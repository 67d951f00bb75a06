"""Replicas of Ray Serve on several nodes: online requests, jobs, hot configuration, and deaths."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from queue_audit import differences
from queue_objects import make_line

from ballast_api.worker_config import WorkerConfig
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.timeout(900)
ASK = {"model": "tiny", "prompt": "The method returns", "temperature": 0}
ITEMS = 120


@pytest.fixture
def queue(valkey, queue_name):
    queue = Queue.connect(valkey.url, queue_name, loads_functions=True)
    yield queue
    queue.close()


@pytest.fixture
def make_config(model_dir, valkey, queue_name):
    def make(**changes) -> WorkerConfig:
        data = {
            "model": {"uri": str(model_dir), "servedName": "tiny"},
            "slots": 4,
            "engine": {"threads": 1},
            "offline": {"queue": queue_name, "leaseSeconds": 3},
            "runtime": {"redisUrl": valkey.url, "port": 0, "drainSeconds": 20},
        }
        return WorkerConfig.model_validate(data | changes)

    return make


@pytest.fixture
def replicas(ray_nodes, queue, make_config, eventually):
    """Two replicas: gives their statuses."""
    ray_nodes.deploy(make_config(), replicas=2)
    return eventually(lambda: two_of(queue), "both replicas to publish their status")


def two_of(queue: Queue):
    found = queue.workers.statuses()
    return found if len(found) == 2 else None


def pid_of(status) -> int:
    return int(status.worker_id.rpartition("-")[2])


def ask(url: str, **body) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=ASK | body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def num_online(url: str) -> int:
    return httpx.get(f"{url}/ballast/status", timeout=30).json()["online"]["running"]


def results_of(queue: Queue, job_id: str) -> list[str]:
    results = list(queue.results.read(job_id))
    assert [result for result in results if result.status_code != 200] == []
    return [result.custom_id for result in results]


def test_online_requests_and_a_job_run_on_both_replicas_and_hot_fields_change_without_a_restart(
    ray_nodes, replicas, queue, make_config, eventually
):
    job_id = queue.submissions.submit([make_line(index) for index in range(ITEMS)]).job_id
    with ThreadPoolExecutor(8) as threads:
        through_proxy = list(threads.map(lambda _: ask(ray_nodes.proxy, max_tokens=12), range(24)))
    directly = [ask(status.address, max_tokens=12) for status in replicas]
    events = httpx.post(f"{ray_nodes.proxy}/v1/completions", json=ASK | {"max_tokens": 12, "stream": True}, timeout=300)
    ray_nodes.deploy(make_config(slo={"ttftMilliseconds": 321}), replicas=2)
    eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to be done")

    assert len({*through_proxy, *directly}) == 1
    assert events.text.endswith("data: [DONE]\n\n")
    assert sorted(results_of(queue, job_id)) == sorted(f"item-{index}" for index in range(ITEMS))
    changed = {status.worker_id: status.config_hash for status in replicas}
    eventually(
        lambda: all(status.config_hash != changed[status.worker_id] for status in queue.workers.statuses()),
        "the same replicas to have the new configuration",
    )


def test_without_the_head_requests_and_jobs_go_on_and_it_finds_the_same_replicas_when_it_is_back(
    ray_nodes_with_storage, queue, make_config, eventually
):
    import psutil

    nodes = ray_nodes_with_storage
    nodes.deploy(make_config(), replicas=2)
    before = {
        each.worker_id: each for each in eventually(lambda: two_of(queue), "both replicas to publish their status")
    }
    job_id = queue.submissions.submit([make_line(index, max_tokens=64) for index in range(ITEMS)]).job_id
    eventually(lambda: queue.jobs.get(job_id).counts.done > 0, "the job to begin")

    nodes.cluster.head_node.kill_gcs_server(check_alive=False)
    commands = {each: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
    [controller] = [each for each, command in commands.items() if "ray::ServeController" in command]
    controller.kill()
    done = queue.jobs.get(job_id).counts.done
    answers = {ask(each.address, max_tokens=64) for each in before.values() for _ in range(3)}
    eventually(lambda: queue.jobs.get(job_id).counts.done > done, "the job to go on")
    nodes.cluster.head_node.start_gcs_server()
    eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to be done")
    eventually(lambda: nodes.num_running() == 2, "Serve to know its replicas again")
    nodes.deploy(make_config(slo={"ttftMilliseconds": 321}), replicas=2)

    assert len(answers) == 1
    assert sorted(results_of(queue, job_id)) == sorted(f"item-{index}" for index in range(ITEMS))
    eventually(
        lambda: all(each.config_hash != before[each.worker_id].config_hash for each in queue.workers.statuses()),
        "the same replicas to have the new configuration",
    )


@pytest.mark.parametrize("victim", ["replica", "node"])
def test_a_death_loses_no_item_and_no_request_of_the_other_replica(ray_nodes, replicas, queue, eventually, victim):
    ray_nodes.add_node()  # a place for the replica that Serve starts instead
    dead, survivor = replicas
    job_id = queue.submissions.submit([make_line(index, max_tokens=64) for index in range(ITEMS)]).job_id
    eventually(lambda: queue.jobs.get(job_id).counts.done > 0, "the job to begin")

    with ThreadPoolExecutor(6) as threads:
        kept = [threads.submit(ask, survivor.address, max_tokens=400) for _ in range(6)]
        eventually(
            lambda: httpx.get(f"{survivor.address}/ballast/status").json()["online"]["running"], "a request to run"
        )
        if victim == "replica":
            os.kill(pid_of(dead), signal.SIGKILL)
        else:
            ray_nodes.kill_node(pid_of(dead))
        answers = {request.result() for request in kept}
    eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to be done")
    eventually(lambda: ray_nodes.num_running() == 2, "two replicas to run again")

    assert len(answers) == 1
    assert sorted(results_of(queue, job_id)) == sorted(f"item-{index}" for index in range(ITEMS))
    assert ask(ray_nodes.proxy, max_tokens=4)
    assert differences(queue.store.connection.client, queue.name) == []
