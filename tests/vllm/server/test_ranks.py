"""Two ranks that share a model serve, and the death of one of them ends the server."""

from __future__ import annotations

import os
import signal

import pytest

from ballast_worker.errors import WorkerError

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def serving(launch, wandering_model, tmp_path):
    config = {
        "model": {"uri": f"file://{wandering_model}", "servedName": "m", "dtype": "float32", "maxModelLen": 512},
        "engine": {
            "backend": "vllm",
            "threads": 1,
            "kvMemoryMebibytes": 128,
            "vllm": {"args": ["--enforce-eager"]},
        },
        "slots": 4,
        "runtime": {"tensorParallel": 2},
    }
    with launch(tmp_path / "worker.yaml", config) as found:
        yield found


def ask(serving, request_class):
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving.client(headers={"x-ballast-class": request_class}) as client:
        return client.post("/v1/completions", json=body).json()["choices"][0]


def test_two_ranks_give_one_answer_to_both_classes(serving):
    online, offline = ask(serving, "online"), ask(serving, "offline")

    assert len(serving.ranks()) == 2
    assert online["finish_reason"] == "length"
    assert online["text"] == offline["text"]
    assert serving.client().get("/health").status_code == 200


def test_the_death_of_a_rank_ends_the_server_with_a_sentence(serving):
    os.kill(serving.ranks()[1], signal.SIGKILL)

    assert serving.process.wait(120) == WorkerError.exit_code
    assert "ballast-vllm: EngineCore of vLLM ended." in serving.log.read_text().splitlines()
