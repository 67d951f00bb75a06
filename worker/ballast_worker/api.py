"""The HTTP API: OpenAI's routes, probes, metrics and status."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send

from ballast_engine.errors import InvalidRequest
from ballast_engine.request import GenerationRequest
from ballast_log import Log
from ballast_openai.body import CHAT_URL, COMPLETIONS_URL, not_yet
from ballast_policy.request import RequestClass
from ballast_worker.errors import Refused
from ballast_worker.http_exchange import ClientGone, HttpExchange, by_name, compact, read_json, request_id
from ballast_worker.loop import Stream
from ballast_worker.metrics import CONTENT_TYPE
from ballast_worker.openai import Body, Caller
from ballast_worker.openapi import description
from ballast_worker.requests import RequestOutcome, RequestTiming, outcome_of_refusal
from ballast_worker.responses import DONE, KEEPALIVE, AnswerBuffer, ResponseFormat, error_event, model_card, model_list
from ballast_worker.version import installed
from ballast_worker.worker import Worker

log = Log(__name__)

JSON = "application/json"
KNOWN = (
    "/v1/models, /v1/completions, /v1/chat/completions, /health, /ready, /metrics, /version, /ballast/status, "
    "/openapi.json"
)


def routes(worker: Worker, lifespan: Lifespan[Starlette]) -> Starlette:
    """Return the app of one worker."""
    read = ReadRoutes(worker)
    app = Starlette(
        routes=[
            Route(COMPLETIONS_URL, GenerateRoute(worker, COMPLETIONS_URL), methods=["POST"]),
            Route(CHAT_URL, GenerateRoute(worker, CHAT_URL), methods=["POST"]),
            Route("/v1/models", read.models),
            Route("/v1/models/{name:path}", read.model),
            Route("/health", read.health),
            Route("/ready", read.ready),
            Route("/metrics", read.metrics),
            Route("/version", read.version),
            Route("/ballast/status", read.status),
            Route("/openapi.json", read.openapi),
        ],
        exception_handlers={HTTPException: _not_routed, Refused: _refused, Exception: _internal_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # the client chooses the host that a redirect names
    return app


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request that the engine has, and how to answer it."""

    stream: Stream
    timing: RequestTiming
    is_streamed: bool
    includes_usage: bool


class GenerateRoute:
    """One of the two routes that generate text, as an ASGI app."""

    def __init__(self, worker: Worker, url: str) -> None:
        self._worker = worker
        self._url = url
        self._prefix = "chatcmpl-" if url == CHAT_URL else "cmpl-"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = HttpExchange(scope, receive, send, is_last=self._worker.is_draining)
        try:
            await self._answer(call, await self._accept(call))
        except ClientGone:
            log.debug("client went away", request=call.request_id.decode())
        except Refused as refused:
            if call.is_started:
                await call.event(error_event(refused) + DONE, is_last=True)
            else:
                await call.refuse(refused)

    async def _accept(self, call: HttpExchange) -> _Accepted:
        """Submit the request to the engine. Nothing else of the body stays in memory."""
        worker = self._worker
        request_class = RequestClass.ONLINE
        try:
            worker.check_open()
            worker.tenancy.check_key(call.headers)
            with worker.bodies.share() as share:
                raw = await call.body(worker.config.limits.max_body_kibibytes * 1024, share)
                arrival = time.monotonic()  # the client decides how long its upload takes
                async with worker.readers.reader(len(raw)) as reader:
                    body, caller = await reader.run(partial(self._read, raw, call.headers))
                    del raw
                    request_class = caller.request_class
                    worker.check_queue(caller)
                    request = await reader.run(partial(self._request, body, caller))
            worker.check_open()  # again, because a long body takes time
            worker.check_queue(caller)
            stream = worker.loop.stream(replace(request, arrival=arrival))
        except InvalidRequest as error:
            worker.recorder.refused(request_class, RequestOutcome.INVALID)
            raise Refused(400, str(error), code="invalid_request") from None
        except Refused as refused:
            worker.recorder.refused(request_class, outcome_of_refusal(refused))
            raise
        except ClientGone:
            raise
        except Exception:  # a defect, which gets 500
            worker.recorder.refused(request_class, RequestOutcome.FAILED)
            raise
        return _Accepted(stream, worker.began(request, arrival, stream), body.stream, body.includes_usage)

    def _read(self, raw: bytearray, headers: dict[bytes, bytes]) -> tuple[Body, Caller]:
        body = self._worker.served.read(self._url, read_json(raw))
        return body, self._worker.tenancy.caller(headers, body.band, is_flex=body.service_tier == "flex")

    def _request(self, body: Body, caller: Caller) -> GenerationRequest:
        served = self._worker.served
        return served.request(self._prefix + uuid4().hex, body, served.tokens(body), caller)

    async def _answer(self, call: HttpExchange, accepted: _Accepted) -> None:
        worker, stream = self._worker, accepted.stream
        shape = ResponseFormat(
            is_chat=self._url == CHAT_URL,
            id=stream.request_id,
            created=int(time.time()),
            model=worker.served.name,
            include_usage=accepted.includes_usage,
        )
        answer = AnswerBuffer()
        watcher = asyncio.create_task(_watch(call, stream))
        try:
            if accepted.is_streamed:
                await _send_events(call, stream, shape, answer)
            else:
                await _send_whole(call, stream, shape, answer)
        finally:
            watcher.cancel()
            if not answer.is_over:
                worker.loop.abort(stream.request_id)
            worker.ended(accepted.timing, stream, answer)


async def _watch(call: HttpExchange, stream: Stream) -> None:
    """Wake the reader when the client closes the connection."""
    await call.gone()
    stream.hang_up()


async def _send_whole(call: HttpExchange, stream: Stream, shape: ResponseFormat, answer: AnswerBuffer) -> None:
    while True:
        await _receive(stream, answer)
        if answer.is_over:
            answer.check()
            await call.answer(200, compact(shape.whole(answer)))
            return


async def _send_events(call: HttpExchange, stream: Stream, shape: ResponseFormat, answer: AnswerBuffer) -> None:
    opening = shape.first()
    while True:
        if not await _receive(stream, answer):
            data = KEEPALIVE
        else:
            answer.check()
            data = opening + shape.delta(answer.take_text(), answer.finish_reason)
            opening = b""
        is_last = answer.is_over
        if is_last:
            data += shape.last(answer)
        if data:
            if not call.is_started:
                await call.start_events()
            await call.event(data, is_last=is_last)
        if is_last:
            return


async def _receive(stream: Stream, answer: AnswerBuffer) -> bool:
    """Wait for outputs and add them to the answer. Return False if there are none and a keepalive is due."""
    outputs = await stream.next()
    if stream.is_hung_up:
        raise ClientGone
    for output in outputs:
        answer.add(output)
    return bool(outputs)


class ReadRoutes:
    """The routes that only read."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def models(self, request: Request) -> Response:
        """Return OpenAI's list of models, which has an entry for each name of the served model."""
        self._check_key(request)
        return Response(model_list(*map(self._card, self._worker.served.names)), media_type=JSON)

    async def model(self, request: Request) -> Response:
        """Return the served model."""
        self._check_key(request)
        name = request.path_params["name"]
        self._worker.served.check_name(name)
        return Response(compact(self._card(name)), media_type=JSON)

    async def health(self, _: Request) -> Response:
        """Liveness: return 503 if only a restart helps."""
        why = self._worker.failure
        if why is None:
            return Response(b'{"status":"ok"}', media_type=JSON)
        return Response(compact({"status": "failed", "reason": why}), 503, media_type=JSON)

    async def ready(self, _: Request) -> Response:
        """Readiness: return 503 while new requests should go to other workers."""
        worker = self._worker
        if worker.is_ready:
            return Response(b'{"status":"ready"}', media_type=JSON)
        why = "The worker is draining." if worker.is_draining else "The engine failed."
        return Response(compact({"status": "not ready", "reason": why}), 503, media_type=JSON)

    async def metrics(self, _: Request) -> Response:
        """Return the metrics for routers and Prometheus, without tenants."""
        return Response(self._worker.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        """Return the version of Ballast."""
        return Response(compact({"version": installed("ballast") or "unknown"}), media_type=JSON)

    async def status(self, _: Request) -> Response:
        """Return the status of the worker, without tenants."""
        return Response(self._worker.status().public(), media_type=JSON)

    async def openapi(self, _: Request) -> Response:
        """Return the OpenAPI description of these routes."""
        return Response(description(), media_type=JSON)

    def _check_key(self, request: Request) -> None:
        self._worker.tenancy.check_key(by_name(request.scope["headers"]))

    def _card(self, name: str) -> dict[str, object]:
        served = self._worker.served
        return model_card(name, served.name, served.created, served.max_model_len)


def _answer_refused(request: Request, refused: Refused) -> Response:
    headers = {**refused.headers, "x-request-id": request_id(by_name(request.scope["headers"])).decode()}
    return Response(refused.as_openai(), refused.status, headers, JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _answer_refused(request, error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not support {request.method}: use {allowed}."
        return _answer_refused(
            request, Refused(405, message, code="method_not_allowed", headers={"allow": allowed} if allowed else {})
        )
    if later := not_yet(path):
        return _answer_refused(request, Refused(404, f"{later[0].upper()}{later[1:]}.", code="unsupported_url"))
    message = f"There is no {request.method} {path}. The routes are {KNOWN}."
    return _answer_refused(request, Refused(error.status_code, message, code="not_found"))


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("request failed", path=request.url.path, error=repr(error))
    return _answer_refused(
        request,
        Refused(
            500,
            "The worker failed while it handled the request. Its log has the reason.",
            code="internal_error",
            kind="server_error",
        ),
    )
