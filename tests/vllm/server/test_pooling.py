"""Embeddings and scores, online and as items."""

from __future__ import annotations

import pytest
from small_models import make_idefics, picture

from ballast_vllm.item_loop import NOT_JSON

pytestmark = pytest.mark.timeout(900)

NAME = "test/pooling"
BODIES = {
    "embedding": ("/v1/embeddings", {"input": ["Once upon a time", "Once"]}),
    "score": ("/v1/score", {"text_1": "Once", "text_2": ["Twice", "Once"]}),
    "rerank": ("/v1/rerank", {"query": "Once", "documents": ["Twice", "Once"]}),
}


INVALID = {
    "/v1/embeddings": ({"input": 5}, "input"),
    "/v1/score": ({"text_1": "Once"}, "text_2"),
    "/v1/rerank": ({"query": "Once"}, "documents"),
}
"""Bodies that vLLM's validation of their fields refuses, by URL, with a part of its sentence."""


def numbers(found: object) -> list[float]:
    """All numbers of a response in order, without ids and times."""
    if isinstance(found, dict):
        return [n for key, value in found.items() if key not in {"id", "created"} for n in numbers(value)]
    if isinstance(found, list):
        return [n for value in found for n in numbers(value)]
    return [float(found)] if isinstance(found, int | float) else []


def test_items_of_a_pooling_model_have_the_values_of_online_requests(start, wandering_model, valkey, as_line, run_job):
    variables = {"BALLAST_RUNTIME_REDIS_URL": valkey.url, "BALLAST_OFFLINE_QUEUE": NAME}
    with start(wandering_model, "--runner", "pooling", "--convert", "embed", **variables) as serving:
        with serving.client() as client:
            online = {name: client.post(url, json={"model": "m", **body}) for name, (url, body) in BODIES.items()}
        lines = [as_line(name, url, **body) for name, (url, body) in BODIES.items()]
        lines += [
            as_line("chat", "/v1/chat/completions", messages=[]),
            as_line("bytes", "/v1/embeddings", input="Once", encoding_format="bytes"),
            *(as_line(url, url, **body) for url, (body, _) in INVALID.items()),
        ]
        results = run_job(NAME, lines)
        series = serving.series()

    assert {name: response.status_code for name, response in online.items()} == dict.fromkeys(BODIES, 200)
    for name, response in online.items():
        assert results[name].status_code == 200, name
        assert numbers(results[name].body) == pytest.approx(numbers(response.json()), abs=1e-5), name
        assert results[name].tokens_in > 0
    assert "expected /v1/embeddings, /v1/score or /v1/rerank" in results["chat"].error["message"]
    for url, (_, said) in INVALID.items():
        assert results[url].status_code == 400
        assert said in results[url].error["message"]
    assert (results["bytes"].status_code, results["bytes"].error["message"]) == (400, NOT_JSON)
    assert series['ballast_requests_total{class="offline",outcome="stop"}'] == 3
    assert series['ballast_requests_total{class="online",outcome="stop"}'] == 3


def test_a_tenant_that_names_its_image_as_another_tenant_does_gets_its_own(start, tmp_path):
    with start(make_idefics(tmp_path / "idefics"), "--runner", "pooling", "--convert", "embed") as serving:

        def ask(color: str, tenant: str, **name: str) -> list[float]:
            part = {"type": "image_url", "image_url": {"url": picture(color)}, **name}
            body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
            with serving.client(headers={"x-llm-d-inference-fairness-id": tenant}) as client:
                return client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]

        red, blue = ask("red", "lab"), ask("blue", "lab")
        found = [ask("red", "lab", uuid="logo"), ask("blue", "web", uuid="logo"), ask("blue", "lab", uuid="logo")]

    assert found == [pytest.approx(values, abs=1e-5) for values in (red, blue, red)]
    assert red != pytest.approx(blue, abs=1e-2)
