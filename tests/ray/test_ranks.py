"""A model that spans two nodes: vLLM's ranks in the bundles of a placement group."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from queue_objects import make_line

from ballast_api.worker_config import WorkerConfig
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.timeout(900)
ITEMS = 120


def processes_of(rank: int) -> list[int]:
    """The processes of the program of a further node."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if ["--node-rank", str(rank)]
        == [each for each in process.info["cmdline"] or () if each in {"--node-rank", str(rank)}]
    ]


def workers_of_the_replica() -> list[psutil.Process]:
    """The workers that EngineCore of the replica has started, which wait for the other node."""
    replicas = [each for each in psutil.process_iter(["cmdline"]) if "ServeReplica" in str(each.info["cmdline"])]
    engines = [engine for replica in replicas for engine in replica.children()]
    started = [each for engine in engines for each in engine.children()]
    return [each for each in started if "VLLM::Worker" in str(each.cmdline())]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def make_config(model, **sections) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {
            "model": {"uri": str(model), "servedName": "tiny", "dtype": "float32", "maxModelLen": 512},
            "engine": {"backend": "vllm", "vllm": {"args": ["--enforce-eager"]}},
            "slots": 4,
        }
        | sections
        | {"runtime": {"port": 0, "nodes": 2, "tensorParallel": 2} | sections.get("runtime", {})}
    )


def test_a_node_that_ends_while_the_model_starts_ends_the_start(ray_nodes, tiny_llama, eventually):
    """vLLM blocks the event loop of the replica for ten minutes while it waits for the node.

    So does the worker of EngineCore. Ray ends it with the replica, or it would hold the GPU of the next start.
    """
    from ray import serve

    def message() -> str:
        found = serve.status().applications["ballast"].deployments.get("worker")
        return "" if found is None else found.message

    with ThreadPoolExecutor(1) as threads:
        deployed = threads.submit(ray_nodes.deploy, make_config(tiny_llama), replicas=1)
        [rank] = eventually(lambda: processes_of(1), "the node to start")
        os.kill(rank, signal.SIGSTOP)
        workers = eventually(workers_of_the_replica, "EngineCore to wait for the node")
        os.kill(rank, signal.SIGKILL)
        eventually(lambda: "Node 1 of the model ended: exit code -9" in message(), "the reason")
        eventually(lambda: not any(map(is_alive, workers)), "no process of the failed start to be left")
        deployed.result()

    assert processes_of(1) not in ([], [rank])


def test_a_model_over_two_nodes_serves_both_classes_and_is_replaced_as_a_whole_when_a_rank_dies(
    ray_nodes, tiny_llama, valkey, eventually
):
    queue = Queue.connect(valkey.url, "test/ranks", loads_functions=True)
    config = make_config(
        tiny_llama, offline={"queue": "test/ranks", "leaseSeconds": 5}, runtime={"redisUrl": valkey.url}
    )
    ray_nodes.deploy(config, replicas=1)
    [first] = eventually(queue.workers.statuses, "the replica to publish its status")
    ask = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "temperature": 0}
    online = httpx.post(f"{ray_nodes.proxy}/v1/completions", json=ask, timeout=300).json()
    job_id = queue.submissions.submit([make_line(index, max_tokens=64) for index in range(ITEMS)]).job_id
    eventually(lambda: queue.jobs.get(job_id).counts.done, "the job to begin")
    [rank] = processes_of(1)

    os.kill(rank, signal.SIGKILL)
    eventually(lambda: queue.jobs.get(job_id).state is JobState.COMPLETED, "the job to be done")

    [second] = [status for status in queue.workers.statuses() if status.worker_id != first.worker_id]
    again = httpx.post(f"{ray_nodes.proxy}/v1/completions", json=ask, timeout=300).json()
    results = [result.custom_id for result in queue.results.read(job_id) if result.status_code == 200]
    assert sorted(results) == sorted(f"item-{index}" for index in range(ITEMS))
    assert online["choices"] == again["choices"]
    assert second.slots == 4
    queue.close()
