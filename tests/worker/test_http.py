"""The API's edges, with raw HTTP."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_http import post
from streamed import BODY, ENDLESS, begun

from ballast_worker.http_exchange import event

ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture
def http(serving):
    with serving.client() as client:
        yield client


def error_of(response) -> dict:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == ERROR_FIELDS
    return error


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        pytest.param(b"{", "invalid_json", "found '{'", id="broken"),
        pytest.param(b"", "invalid_json", "an empty body", id="empty"),
        pytest.param(b"[1]", "invalid_json", "is a list of 1, expected a JSON object", id="a list"),
        pytest.param(b'"text"', "invalid_json", "is the string 'text', expected", id="a string"),
        pytest.param(b"null", "invalid_json", "is null, expected", id="null"),
        pytest.param(b'{"model": NaN}', "invalid_json", "NaN is not a JSON number", id="NaN"),
        pytest.param(b"[" * 100_000, "invalid_json", "nested too deeply", id="nested"),
        pytest.param(b'{"model": "\xff"}', "invalid_utf8", "byte 11 is 0xff", id="not UTF-8"),
        pytest.param(b'{"model": 1e999999}', "invalid_type", "model", id="a huge number"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}", "invalid_json", "", id="too many digits"),
        pytest.param(b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_value", "surrogate", id="a lone surrogate"),
        pytest.param(b'{"model": "\\ud800", "prompt": "a"}', "invalid_value", "surrogate", id="in the model's name"),
        pytest.param(b'{"model": "tiny"}', "missing_required_parameter", "prompt", id="no prompt"),
        pytest.param(b'{"prompt": "a"}', "missing_required_parameter", "model", id="no model"),
        pytest.param(b'{"model": "tiny", "prompt": ""}', "invalid_value", "at least one", id="an empty prompt"),
        pytest.param(b'{"model": "tiny", "prompt": [99999]}', "invalid_value", "vocabulary", id="an unknown token"),
        pytest.param(b'{"model": "tiny", "prompt": ["a", "b"]}', "invalid_value", "one prompt", id="two prompts"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_400_that_says_why(http, content, code, said) -> None:
    response = http.post("/v1/completions", content=content)

    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == code
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(serving) -> None:
    with serving.connect() as raw:
        raw.sendall(post(b"").replace(b"content-length: 0", b"content-length: 999999999"))
        answer = raw.makefile("rb").read()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head.lower()
    assert "999999999 bytes, the limit is 4194304" in json.loads(body)["error"]["message"]


def test_a_body_that_grows_too_large_is_refused_while_it_comes(http) -> None:
    response = http.post("/v1/completions", content=(b" " * 65536 for _ in range(80)))

    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_a_body_of_as_many_bytes_as_the_limit_is_read(http) -> None:
    body = json.dumps(BODY).encode().ljust(4 * 1024 * 1024)

    assert [http.post("/v1/completions", content=sent).status_code for sent in (body, iter([body]))] == [200, 200]


def test_the_request_id_comes_back_and_one_is_made_where_there_is_none(http) -> None:
    given = http.post("/v1/completions", json=BODY, headers={"x-request-id": "my-id.1"})
    made = http.post("/v1/completions", json=BODY)
    wrong = http.post("/v1/completions", json=BODY, headers={"x-request-id": "a b"})
    refused = http.post("/v1/completions", content=b"{", headers={"x-request-id": "my-id.2"})
    unknown = http.get("/v1/nowhere", headers={"x-request-id": "my-id.3"})

    assert given.headers["x-request-id"] == "my-id.1"
    assert len(made.headers["x-request-id"]) == 32
    assert wrong.headers["x-request-id"] != "a b"
    assert refused.headers["x-request-id"] == "my-id.2"
    assert unknown.headers["x-request-id"] == "my-id.3"


def test_one_request_id_may_be_used_by_several_requests_at_a_time(http) -> None:
    headers = {"x-request-id": "twice"}
    with begun(http, headers):
        second = http.post("/v1/completions", json=BODY, headers=headers)

    assert second.status_code == 200


def test_a_rendered_chat_that_is_not_unicode_is_a_400(http) -> None:
    """As in transformers, the arguments of a template override its special tokens."""

    def chat(**arguments: str):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        return http.post("/v1/chat/completions", content=json.dumps(body | {"chat_template_kwargs": arguments}))

    wrong, usual, without = chat(bos_token="\ud800"), chat(unused="\ud800"), chat(bos_token="")

    assert wrong.status_code == 400
    assert error_of(wrong)["code"] == "invalid_chat"
    assert r"lone surrogate \ud800" in error_of(wrong)["message"]
    assert (usual.status_code, without.status_code) == (200, 200)
    assert usual.json()["usage"]["prompt_tokens"] == without.json()["usage"]["prompt_tokens"] + 1


def test_template_arguments_and_tool_calls_with_too_many_levels_are_a_400(http) -> None:
    """Some templates write them with indents: 30 KB would become megabytes."""
    nested: object = [0] * 15_000
    for _ in range(180):
        nested = [nested]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": nested})}}
    chats = (
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"custom_tools": nested}},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    )
    for chat in chats:
        refused = http.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 1} | chat)

        assert refused.status_code == 400
        assert "found more than 300000 levels of JSON" in error_of(refused)["message"]


def test_an_unknown_path_lists_those_that_are_there(http) -> None:
    response = http.post("/v1/nowhere", json={})

    assert response.status_code == 404
    assert "/v1/chat/completions" in error_of(response)["message"]


def test_a_path_with_a_slash_at_its_end_is_no_redirect_to_a_host_of_the_client(http) -> None:
    answer = http.get("/health/", headers={"host": "elsewhere.example"})

    assert answer.status_code == 404
    assert "location" not in answer.headers


def test_what_comes_later_is_refused_by_name(http) -> None:
    response = http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})

    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "unsupported_url"
    assert "Found /v1/embeddings (embeddings), which is not supported yet: use /v1/chat" in error["message"]
    assert error["message"].endswith(", or use engine.backend: vllm.")


def test_a_wrong_method_says_which_is_right(http) -> None:
    response = http.get("/v1/completions")

    assert response.status_code == 405
    assert "does not support GET: use POST" in error_of(response)["message"]
    assert response.headers["allow"] == "POST"


def test_a_connection_serves_request_after_request(serving) -> None:
    with serving.connect() as raw:
        answers = []
        for _ in range(3):  # together, their headers are longer than those of a request may be
            raw.sendall(post(json.dumps(BODY).encode(), f"x: {'a' * 30_000}"))
            stream = raw.makefile("rb")
            head = b"".join(iter(stream.readline, b"\r\n"))
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answers.append(json.loads(stream.read(length))["choices"][0]["text"])

    assert answers[0] == answers[1] == answers[2]


def test_a_stream_is_server_sent_events_that_end_with_done(http) -> None:
    with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        lines = list(response.iter_lines())

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = [line.removeprefix("data: ") for line in lines if line]
    assert all(line.startswith("data: ") for line in lines if line)
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])


def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_its_connection(serving) -> None:
    with serving.connect() as raw:
        raw.sendall(post(json.dumps(BODY | {"stream": True}).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = raw.makefile("rb").read().partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_hangs_up_frees_its_slot(serving, http, eventually) -> None:
    with begun(http):
        assert serving.worker.engine.stats().online.running == 1

    eventually(serving.is_idle, "the slot to be free")
    assert serving.worker.engine.stats().online.decode_tokens < 2000


def test_a_client_that_hangs_up_on_a_whole_answer_frees_its_slot(serving, eventually) -> None:
    with serving.connect() as raw:
        raw.sendall(post(json.dumps(ENDLESS | {"stream": False}).encode()))
        eventually(lambda: serving.worker.engine.stats().online.running, "the request to run")

    eventually(serving.is_idle, "the slot to be free")


def test_a_client_that_hangs_up_after_a_pipelined_request_frees_its_slot(serving, eventually) -> None:
    with serving.connect() as raw:
        raw.sendall(post(json.dumps(ENDLESS | {"stream": False}).encode()))
        eventually(lambda: serving.worker.engine.stats().online.running, "the request to run")
        (connection,) = serving.server.server_state.connections
        raw.sendall(post(json.dumps(BODY).encode()))
        eventually(lambda: connection.pipeline, "the second request to wait")

    eventually(serving.is_idle, "the slot to be free")
    assert serving.worker.engine.stats().online.decode_tokens < 2000


def test_the_tenant_of_the_header_is_charged(serving, http) -> None:
    name = "x-llm-d-inference-fairness-id"
    same = http.post("/v1/completions", json=BODY, headers=[(name, "team-x"), (name, "team-x")])
    two = http.post("/v1/completions", json=BODY, headers=[(name, "team-x"), (name, "team-y")])

    assert (same.status_code, two.status_code) == (200, 400), "a client cannot add to what a gateway sets"
    assert f"Header {name} is 'team-x, team-y'" in error_of(two)["message"]
    assert any(tenant == "team-x" for _, tenant in serving.worker.engine.stats().service)


def test_probes_version_and_status_answer(http, serving) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"][0].isdigit()
    status = http.get("/ballast/status").json()
    assert (status["model"], status["slots"], status["is_ready"]) == ("tiny", 4, True)
    assert status["address"] == serving.url


def test_metrics_parse_and_count_what_was_served(http) -> None:
    def samples() -> dict:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(response.text)
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    before = samples()
    assert http.post("/v1/completions", json=BODY | {"ignore_eos": True}).status_code == 200
    assert http.post("/v1/completions", content=b"{").status_code == 400
    after = samples()

    def gained(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before[key]

    assert gained("ballast_requests_total", **{"class": "online", "outcome": "length"}) == 1
    assert gained("ballast_requests_total", **{"class": "online", "outcome": "invalid"}) == 1
    assert gained("ballast_tokens_total", **{"class": "online", "phase": "decode"}) == 4
    assert gained("ballast_time_to_first_token_seconds_count", **{"class": "online"}) == 1
    assert gained("ballast_time_to_first_token_seconds_bucket", **{"class": "online", "le": "+Inf"}) == 1
    assert gained("ballast_time_per_output_token_seconds_count", **{"class": "online"}) == 1
    assert gained("ballast_slo_requests_total", **{"class": "online", "slo": "ttft", "met": "true"}) == 1
    assert gained("ballast_queue_seconds_count", **{"class": "online"}) == 1
    assert gained("vllm:generation_tokens_total", model_name="tiny") == 4
    assert gained("vllm:e2e_request_latency_seconds_count", model_name="tiny") == 1
    assert after["ballast_slots_total", ()] == 4
    assert after["vllm:num_requests_running", (("model_name", "tiny"),)] == 0
    assert ("ballast_redis_up", ()) not in after, "a worker without a queue says nothing of Redis"


def test_an_event_is_one_line_for_clients_that_divide_lines_as_python_does() -> None:
    text = "".join(map(chr, range(0x3000)))
    response = httpx.Response(200, content=event({"text": text}))
    (line,) = filter(None, response.iter_lines())

    assert json.loads(line.removeprefix("data: ")) == {"text": text}
