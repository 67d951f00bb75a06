"""Ballast in front of vLLM's app: `vllm serve --middleware ballast_vllm.middleware.BallastMiddleware`.

vLLM adds the middleware to its app, so it is in every API server process, has each request before vLLM reads it, and
starts and stops with the app: Starlette passes the lifespan of the app through its middleware, too. When that starts,
vLLM has its engine client and its signal handlers, and does not accept connections yet. A plugin
(`vllm.general_plugins`) runs in each process of vLLM, before there is an app, and an endpoint plugin needs a third
setting and sees no other request.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast_api.errors import InvalidConfig
from ballast_log import Log, configure_packages
from ballast_openai.body import CHAT_URL, COMPLETIONS_URL
from ballast_policy.request import RequestClass
from ballast_queue.settings import MAX_PRIORITY
from ballast_vllm.bodies import CONVERSATIONS_URL, beam_search, check_lists, decoded, decoded_bytes
from ballast_vllm.calls import CALL, Call
from ballast_vllm.costs import Asked
from ballast_vllm.server import VllmServer, load
from ballast_vllm.versions import UnsupportedVllm, check_installed
from ballast_worker.bodies import BodyShare
from ballast_worker.command_line import BAD_CONFIG
from ballast_worker.errors import Refused, WorkerError
from ballast_worker.http_exchange import ClientGone, HttpExchange, compact, send_in_parts
from ballast_worker.metrics import CONTENT_TYPE
from ballast_worker.requests import RequestTiming, outcome_of_refusal
from ballast_worker.responses import stopping
from ballast_worker.tenancy import PRIORITY_HEADER

log = Log(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/openapi.json", "/ballast/status"})
"""Paths that need no API key."""
METRICS_PATHS = frozenset({"/metrics", "/metrics/"})
UNQUEUED = re.compile(
    r"/((de)?tokenize|ping|.*/(count_tokens|(de)?render)|v1/responses/[^/]+/cancel|v1/(un)?load_lora_adapter)"
)
"""Paths of POST requests that EngineCore does not see."""
SEARCH_URLS = frozenset({CHAT_URL, COMPLETIONS_URL, "/invocations"})
"""The paths where vLLM reads `use_beam_search` in JSON. Elsewhere it ignores the field, and so must the queue limit."""
STREAMED_INPUT = "Ballast does not support streamed input. Send the whole input to a route that takes POST requests."
SCALING_PATHS = frozenset({"/scale_elastic_ep", "/is_scaling_elastic_ep"})
"""vLLM has these for each model that generates text. They are for administrators."""
SCALING = "Ballast does not support data parallelism, so the number of engines does not change."
BACKGROUND = "Ballast does not support responses in the background. Leave out the field, or submit a job."
_FLEX = re.compile(rb'"service_tier"\s*:\s*"flex"')

TEXT = (b"content-type", CONTENT_TYPE.encode())


class BallastMiddleware:
    """The middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.server: VllmServer | None = None
        self._http: ASGIApp = self._respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "websocket":  # proxies of Ray Serve pass them on
            await send({"type": "websocket.close", "reason": STREAMED_INPUT})
        else:
            await self._http(scope, receive, send)

    # Life

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start with the app, after it, and stop before it."""

        async def receive_event() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self.server is not None:
                await self.server.stop()
            return message

        async def send_event(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    self.server = await self._start(scope["app"])
                except (InvalidConfig, UnsupportedVllm, WorkerError) as error:
                    code = error.exit_code if isinstance(error, WorkerError) else BAD_CONFIG
                    sys.stderr.write(f"ballast: {error}\n")
                    scope["app"].state.ballast_error = str(error)
                    if hasattr(scope["app"].state, "server"):  # the process is that of `vllm serve`
                        # uvicorn before 0.50 would end with status 0.
                        asyncio.get_running_loop().call_soon(sys.exit, code)
                    message = {"type": "lifespan.startup.failed", "message": str(error)}
            await send(message)

        await self.app(scope, receive_event, send_event)

    async def _start(self, app: Any) -> VllmServer:
        check_installed()  # first, because what the app holds differs between versions
        logging_config = getattr(app.state.args, "logging_config", None)
        style: Literal["text", "json"] = "json" if getattr(logging_config, "formatter", "") == "json" else "text"
        configure_packages(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"), style)
        loaded, path = load(app.state.args)
        server = VllmServer(app, self.app, loaded, path)
        await server.start()
        app.state.ballast = server
        arguments = app.state.args
        if arguments.allowed_origins:  # the CORS of vLLM is behind this middleware, and does not see its refusals
            self._http = CORSMiddleware(
                self._respond,
                allow_origins=arguments.allowed_origins,
                allow_credentials=arguments.allow_credentials,
                allow_methods=arguments.allowed_methods,
                allow_headers=arguments.allowed_headers,
            )
        return server

    # Requests

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.server is None:
            message = "Ballast has not started: the server runs without the lifespan of its app."
            await HttpExchange(scope, receive, send).refuse(Refused(503, message, kind="server_error"))
        else:
            await self._answer(self.server, scope, receive, send)

    async def _answer(self, server: VllmServer, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, is_last=server.is_draining)
        path, method = _path(scope), scope["method"]
        try:
            if await _own(server, method, path, exchange):
                return
            if method == "POST" and path != "/ping":
                with server.bodies.share() as share:
                    await self._call(server, exchange, share, (scope, receive, send))
                return
            if path not in OPEN_PATHS and method != "OPTIONS":
                server.tenancy.check_key(exchange.headers)
            await self.app(scope, receive, send)
        except ClientGone:
            log.debug("client went away", request=exchange.request_id.decode())
        except Refused as refused:
            await exchange.refuse(refused)

    async def _call(
        self, server: VllmServer, exchange: HttpExchange, share: BodyShare, asgi: tuple[Scope, Receive, Send]
    ) -> None:
        """Pass on a request that `_admitted` admits, and count how it ends."""
        scope = asgi[0]
        timing = RequestTiming(RequestClass.ONLINE, time.monotonic())
        is_queued = UNQUEUED.fullmatch(_path(scope)) is None
        try:
            passed = await self._admitted(server, exchange, share, asgi, timing, is_queued=is_queued)
        except Refused as refused:
            if is_queued and server.has_route(scope):
                server.recorder.refused(timing.request_class, outcome_of_refusal(refused))
            raise
        call = passed.call
        CALL.set(call)
        server.admission.begin(call, is_queued=is_queued)
        try:
            await self.app(scope, passed.receive, passed.send)
        except Exception:
            if passed.status is None and call.refused is None:
                passed.status = 500  # the answer to an error that vLLM does not know passes outside of all middleware
            if passed.status is not None:
                raise
        finally:
            call.leave_media()
            refusal = call.refused if passed.status is None else None
            status = refusal.status if refusal else passed.status
            if status is None or status < 400 or (is_queued and server.has_route(scope)):
                server.admission.end(call, status, is_complete=passed.is_complete)
            else:
                server.admission.forget(call)
        if refusal is not None:
            raise refusal
        if passed.status is None and passed.gone.is_set():
            raise stopping()

    async def _admitted(
        self,
        server: VllmServer,
        exchange: HttpExchange,
        share: BodyShare,
        asgi: tuple[Scope, Receive, Send],
        timing: RequestTiming,
        *,
        is_queued: bool,
    ) -> _Passed:
        """Return the request with its class and its tenant, and note the class and the arrival in `timing`.

        Raises:
            Refused: its key is not known, Ballast does not support it, or a limit does not allow it.
        """
        scope, receive, send = asgi
        path, headers = _path(scope), exchange.headers
        timing.request_class = server.tenancy.caller(headers).request_class
        server.admission.check_open()
        body = bytes(await exchange.body(server.config.limits.max_body_kibibytes * 1024, share))
        timing.arrival = time.monotonic()  # the client decides how long its upload takes
        share.grow(min(decoded_bytes(body), server.bodies.limit))  # at most all, so that each body passes alone
        check_lists(path, body, is_encoder=server.tap.is_encoder)
        if path == "/v1/responses":
            _refuse_background(body)
        caller = server.tenancy.caller(headers, is_flex=_is_flex(body))
        timing.request_class = caller.request_class
        call = Call(
            caller,
            timing,
            states_priority=PRIORITY_HEADER in headers,
            most_priority=server.tenancy.capped(caller.tenant, MAX_PRIORITY),
            asked=Asked.of_call(path),
        )
        if is_queued:
            server.tenancy.check_offline(caller)
            server.admission.check_queue(caller)
        if path == CONVERSATIONS_URL and isinstance(conversations := decoded(body).get("messages"), list):
            server.admission.check_requests(call, len(conversations))
        if path in SEARCH_URLS:
            call.num_searched, num_beams = beam_search(body)
        if call.num_searched:  # later, a refusal would lose the tokens that the search has found
            server.admission.check_requests(call, call.num_searched * num_beams)
        server.admission.check_open()  # again, because a long body takes time
        passed = _Passed(body, receive, send, call, is_last=server.is_draining)
        call.hang_up = passed.gone.set
        return passed


class _Passed:
    """What vLLM receives and sends for one request."""

    def __init__(self, body: bytes, receive: Receive, send: Send, call: Call, *, is_last: bool) -> None:
        self.status: int | None = None
        self.is_complete = False
        self.gone = asyncio.Event()
        """Set when vLLM should believe that the client is gone."""
        self._body: bytes | None = body
        self._receive, self._send = receive, send
        self.call = call
        self._is_last = is_last

    async def receive(self) -> Message:
        """Return the body, then wait until the client closes the connection."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        tasks = {asyncio.ensure_future(self._receive()), asyncio.ensure_future(self.gone.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass on a part of the response. If Ballast refuses or aborts the call, vLLM's answer is left out."""
        if self.status is None and (self.call.refused is not None or self.gone.is_set()):
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.call.responded_at = time.monotonic()
            if self._is_last:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        elif not message.get("more_body", False):
            self.is_complete = True
        await send_in_parts(self._send, message)


def _path(scope: Scope) -> str:
    """Return the path of a request as vLLM's routes see it: without `--root-path`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _own(server: VllmServer, method: str, path: str, exchange: HttpExchange) -> bool:
    """Answer a path of Ballast. Return whether it is one."""
    if path.startswith("/metrics"):  # vLLM's exporter names adapters, and answers all of these, by any method
        if path not in METRICS_PATHS or method not in {"GET", "HEAD"}:
            raise Refused(404, f"There is no {method} {path[:200]}. Use GET /metrics.", code="not_found")
    elif path in SCALING_PATHS:
        raise Refused(400, SCALING, code="unsupported_scaling")
    elif method != "GET":
        return False
    match path:
        case "/health":
            status, body = (200, b"") if server.failure is None else (503, compact({"reason": server.failure}))
            await exchange.answer(status, body)
        case "/ready":
            why = server.failure or ("The server is draining." if server.is_draining else None)
            state: Mapping[str, object] = {"status": "ready"} if why is None else {"status": "not ready", "reason": why}
            await exchange.answer(200 if why is None else 503, compact(state))
        case "/metrics" | "/metrics/":
            await exchange.answer(200, server.metrics.render(), [TEXT])
        case "/ballast/status":
            await exchange.answer(200, server.status().public().encode())
        case "/ballast/metrics":
            if not server.has_keys:
                raise Refused(403, "These metrics name tenants: configure API keys, and send one.", code="no_keys")
            server.tenancy.check_key(exchange.headers)
            await exchange.answer(200, server.tenant_metrics.render(), [TEXT])
        case "/v1/realtime":  # vLLM's only WebSocket: its input arrives while the request is computed
            raise Refused(400, STREAMED_INPUT, code="unsupported_stream")
        case _:
            return False
    return True


def _refuse_background(body: bytes) -> None:
    """Refuse a response that goes on after its call: neither the drain nor the counts of requests would see it."""
    if decoded(body).get("background"):
        raise Refused(400, BACKGROUND, code="unsupported_background", param="background")


def _is_flex(body: bytes) -> bool:
    """Return whether the body asks for the class offline. Only a body with the plain words is decoded here."""
    return _FLEX.search(body) is not None and decoded(body).get("service_tier") == "flex"
