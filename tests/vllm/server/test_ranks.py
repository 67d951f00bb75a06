"""Two ranks that share a model serve. The death of one of them ends the server, and the next one finishes its items."""

from __future__ import annotations

import os
import signal

import pytest
from small_models import config_of

from ballast_worker.errors import WorkerError

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def serve(launch, wandering_model, valkey, queue_name, tmp_path):
    """`with serve() as serving` runs a server with two ranks."""
    sections = {
        "engine": {"threads": 1},
        "offline": {"queue": queue_name, "leaseSeconds": 600},
        "runtime": {"tensorParallel": 2, "redisUrl": valkey.url},
    }
    config = config_of(wandering_model, slots=4, **sections)
    return lambda: launch(tmp_path / "worker.yaml", config)


def completion(max_tokens):
    return {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def ask(serving, request_class, max_tokens=12):
    with serving.client(headers={"x-ballast-class": request_class}) as client:
        return client.post("/v1/completions", json={"model": "m", **completion(max_tokens)}).json()["choices"][0]


def test_two_ranks_give_one_answer_to_both_classes(serve):
    with serve() as serving:
        online, offline = ask(serving, "online"), ask(serving, "offline")

        assert len(serving.ranks()) == 2
        assert online["finish_reason"] == "length"
        assert online["text"] == offline["text"]
        assert serving.client().get("/health").status_code == 200


def test_the_death_of_a_rank_ends_the_server_with_a_sentence_and_loses_no_item(serve, queue, as_line, eventually):
    lengths = {"first": 8} | {f"item-{index}": 400 for index in range(40)}  # seconds of work
    lines = [as_line(name, "/v1/completions", **completion(length)) for name, length in lengths.items()]
    with serve() as serving:
        eventually(lambda: queue.settings.read().models, "the server to configure the queue")
        job_id = queue.submissions.submit(lines).job_id
        eventually(lambda: queue.jobs.get(job_id).counts.succeeded, "the first item to be done")
        os.kill(serving.ranks()[1], signal.SIGKILL)

        assert serving.process.wait(120) == WorkerError.exit_code
        assert "\nballast-vllm: EngineCore of vLLM ended." in serving.log.read_text()
    counts = queue.jobs.get(job_id).counts
    assert (counts.leased, counts.waiting + counts.succeeded) == (0, len(lengths))
    assert counts.waiting > 0

    with serve() as serving:
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        expected = {length: ask(serving, "online", length)["text"] for length in set(lengths.values())}

    results = [(result.custom_id, result.body["choices"][0]["text"]) for result in queue.results.read(job_id)]
    assert sorted(results) == sorted((name, expected[length]) for name, length in lengths.items())
