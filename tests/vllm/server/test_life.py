"""Drain, death and refusals of a `vllm serve` process."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

pytestmark = pytest.mark.timeout(1500)

LENGTH = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
LONG = {"prompt": "Once upon", **LENGTH}
CHAT = {"messages": [{"role": "user", "content": "Go"}], **LENGTH}
NUM_OF_KIND = 9
"""The items take seconds on a fast machine too. Items with one start go together, and leave slots for the others."""


@pytest.fixture
def started(start, wandering_model, valkey, queue_name):
    variables = {"BALLAST_RUNTIME_REDIS_URL": valkey.url, "BALLAST_OFFLINE_QUEUE": queue_name}
    variables |= {"BALLAST_OFFLINE_LEASE_SECONDS": "600", "BALLAST_RUNTIME_DRAIN_SECONDS": "60"}
    return lambda: start(wandering_model, **variables)


def test_a_drain_gives_items_back_and_the_next_server_finishes_them(started, queue, as_line, eventually):
    kinds = {
        "plain": ("/v1/completions", LONG),
        "chat": ("/v1/chat/completions", CHAT),
        "with logprobs": ("/v1/completions", LONG | {"logprobs": 1}),
    }
    lines = [as_line(f"{kind} {n}", url, **body) for n in range(NUM_OF_KIND) for kind, (url, body) in kinds.items()]
    with started() as first:
        with first.client() as client:
            expected = client.post("/v1/completions", json={"model": "m", **LONG}).json()["choices"][0]
        eventually(lambda: queue.settings.read().models, "the server to configure the queue")
        job_id = queue.submissions.submit(lines).job_id
        decoded = 'ballast_tokens_total{class="offline",phase="decode"}'
        eventually(lambda: first.series()[decoded] > 60, "items to be half done")
        body = {"model": "m", **LONG, "max_tokens": 300, "stream": True}
        with first.client() as client, client.stream("POST", "/v1/completions", json=body) as online:
            lines_of_answer = online.iter_lines()
            next(lines_of_answer)  # the request runs
            first.process.send_signal(signal.SIGTERM)
            rest = list(lines_of_answer)
        assert first.process.wait(120) == 0
        assert (online.status_code, rest[-2]) == (200, "data: [DONE]")
        log = first.log.read_text()
    counts = queue.jobs.get(job_id).counts

    assert "offline items returned" in log
    assert (counts.leased, counts.waiting + counts.succeeded) == (0, len(lines))
    assert counts.waiting > 0

    with started() as second:
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        wasted = 'ballast_wasted_tokens_total{class="offline"}'
        eventually(lambda: second.series()[wasted] > 0, "the chats that were given back to begin again")
        results = {result.custom_id: result for result in queue.results.read(job_id)}
        with second.client() as client:
            answer = client.post("/v1/chat/completions", json={"model": "m", **CHAT}).json()
        _kill_the_engine(second, queue, as_line, eventually)

    assert len(results) == len(lines)
    for name, result in results.items():
        assert result.status_code == 200
        choice, usage = result.body["choices"][0], result.body["usage"]
        if name.startswith("chat"):
            assert choice["message"] == answer["choices"][0]["message"]
            assert usage["prompt_tokens"] == answer["usage"]["prompt_tokens"]
            continue
        assert (choice["text"], choice["finish_reason"]) == (expected["text"], "length")
        assert usage["completion_tokens"] == LENGTH["max_tokens"]
        if name.startswith("with logprobs"):
            assert len(choice["logprobs"]["tokens"]) == LENGTH["max_tokens"]


def _kill_the_engine(serving, queue, as_line, eventually):
    """Kill EngineCore in the middle of items: the server states it and ends, and no item is lost."""
    lines = [as_line(f"x {n}", "/v1/completions", **LONG) for n in range(80)]  # some still run when the wait has ended
    job_id = queue.submissions.submit(lines).job_id
    eventually(lambda: serving.series()['ballast_slots{class="offline",state="running"}'] > 0, "items to run")
    os.kill(serving.engine_core(), signal.SIGKILL)

    def is_bad() -> bool:
        try:
            return httpx.get(f"{serving.url}/health", timeout=5).status_code == 503
        except httpx.TransportError:
            return serving.process.poll() is not None

    eventually(is_bad, "the health to turn bad")
    eventually(lambda: serving.process.poll() is not None, "the server to end")
    counts = queue.jobs.get(job_id).counts
    assert (counts.leased, counts.waiting + counts.succeeded) == (0, len(lines))
    assert counts.waiting > 0
    assert "EngineCore of vLLM ended" in serving.log.read_text()


REFUSED = {
    "several API servers": (
        ("--api-server-count", "2"), {}, "vLLM runs 2 API server processes, and Ballast supports one",
    ),
    "keys of vLLM beside those of Ballast": (
        ("--api-key", "x"), {"BALLAST_RUNTIME_API_KEYS_FILE": "{folder}/keys.yaml"},
        "a request has one key. Remove --api-key",
    ),
    "the scheduler of vLLM": (
        ("--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"), {},
        "start it with --scheduler-cls ballast_vllm.scheduler.BallastScheduler",
    ),
    "a policy in additional_config beside the middleware": (
        ("--additional-config", '{"ballast": {"ttft": 1.0}}'), {},
        "set the fields in the file that BALLAST_CONFIG names",
    ),
    "a latency SLO of a model that generates": (
        (), {"BALLAST_SLO_LATENCY_MILLISECONDS": "30"},
        "slo.latencyMilliseconds is the SLO of a model that returns vectors or scores",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_keep_its_promises_does_not_start(start, tiny_model, tmp_path, case):
    (tmp_path / "keys.yaml").write_text("key: tenant\n")
    arguments, variables, sentence = REFUSED[case]
    variables = {name: value.format(folder=tmp_path) for name, value in variables.items()}
    with start(tiny_model, *arguments, is_awaited=False, **variables) as serving:
        code = serving.process.wait(600)

    assert code != 0
    assert sentence in serving.log.read_text()
