"""Requests whose answer does not come from vLLM's routes."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
import source

from ballast_api.worker_config import WorkerConfig
from ballast_policy.request import RequestClass
from ballast_vllm.middleware import BallastMiddleware
from ballast_worker.bodies import BodyMemory
from ballast_worker.errors import Refused
from ballast_worker.requests import Recorder, RequestOutcome
from ballast_worker.tenancy import Tenancy

SCOPE = {"type": "http", "method": "POST", "headers": [], "query_string": b""}


class Server:
    """A server that admits each call, and notes how it ended."""

    def __init__(self):
        self.config = WorkerConfig.model_validate({"model": {"uri": "hf://a/m"}})
        self.tenancy = Tenancy((), None)
        self.bodies = BodyMemory(1 << 20)
        self.tap = SimpleNamespace(is_encoder=False)
        self.is_draining = False
        self.recorder = Recorder()
        self.call = self.is_queued = None
        self.ends = []
        self.admission = self

    def check_open(self):
        """Admit the call."""

    def check_queue(self, caller):
        """Admit the call."""

    def has_route(self, scope):
        return True

    def begin(self, call, *, is_queued):
        self.call, self.is_queued = call, is_queued

    def end(self, call, status, *, is_complete):
        assert call is self.call
        self.ends.append((status, is_complete))


def ask(server, app, path="/v1/completions", body=b"{}", **scope):
    """Send a request to `app` behind the middleware; return the status of the response."""
    middleware, sent = BallastMiddleware(app), []
    middleware.server = server

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(middleware(SCOPE | {"path": path} | scope, receive, send))
    return sent[0]["status"]


def test_an_error_that_vllm_does_not_know_is_a_failure():
    async def app(scope, receive, send):
        raise RuntimeError

    server = Server()
    with pytest.raises(RuntimeError):
        ask(server, app)

    assert server.ends == [(500, False)]


@pytest.mark.parametrize("is_answered", [True, False], ids=["as an answer", "as an error"])
def test_a_refusal_after_vllm_read_the_body_replaces_the_answer_of_vllm(is_answered):
    server = Server()

    async def app(scope, receive, send):
        server.call.refused = Refused(429, "Too many.")
        if not is_answered:
            raise server.call.refused
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"vLLM"})

    assert ask(server, app) == 429
    assert server.ends == [(429, False)]


@pytest.mark.parametrize(
    "body",
    [b'{"back\\u0067round": true}', '{"background": true}'.encode("utf-16"), b'{"background": false, "background": 1}'],
    ids=["escapes", "utf-16", "twice"],
)
def test_a_response_in_the_background_is_refused_in_any_encoding(body):
    assert json.loads(body)["background"]
    assert ask(Server(), None, "/v1/responses", body) == 400
    assert ask(Server(), None, "/api/v1/responses", body, root_path="/api") == 400


def route_paths():
    """Return the paths of POST requests in the source of vLLM."""
    files = (source.root() / "entrypoints").rglob("*.py")
    return {path for file in files for path in re.findall(r'\.post\(\s*"([^"]+)"', file.read_text())}


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render", "/v1/completions/derender",
     "/v1/messages/render", "/v1/responses/render", "/v1/responses/resp_1/cancel", "/v1/load_lora_adapter"],
)  # fmt: skip
def test_a_request_that_enginecore_does_not_see_is_not_in_the_queue(path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    server = Server()

    assert path.replace("resp_1", "{response_id}") in route_paths()
    assert ask(server, app, path) == 200
    assert server.is_queued is False
    assert ask(server, app, "/v1/responses") == 200
    assert server.is_queued is True


def test_without_offline_slots_only_offline_requests_in_the_queue_are_refused():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    server, headers = Server(), [(b"x-ballast-class", b"offline")]
    server.tenancy = Tenancy((), None, serves_offline=False)

    assert ask(server, app, "/tokenize", headers=headers) == 200
    assert ask(server, app) == 200
    assert ask(server, app, headers=headers) == 503
    assert ask(server, app, body=b'{"service_tier": "flex"}') == 503
    assert server.recorder.outcomes[RequestClass.OFFLINE, RequestOutcome.QUEUE_FULL] == 2
