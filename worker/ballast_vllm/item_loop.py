"""Items of jobs, sent through vLLM's own app in this process.

An item takes the path of an online request: the same routes, validation, templates, parsers and sampling. So it may use
what a request may use, and gets the same answer. There is no socket between: the app is called as ASGI describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from ballast_engine.request import FinishReason, Output
from ballast_log import Log
from ballast_vllm.calls import CALL
from ballast_vllm.engine_view import VllmEngine
from ballast_vllm.items import HttpItem
from ballast_worker.loop import Ended, EndedItems

log = Log(__name__)

ABORT_SECONDS = 2.0
"""Time that vLLM has to end an item that is aborted."""
NOT_JSON = "The answer is not JSON, as the result of an item must be. Leave out `encoding_format`, or set it to base64."
UNSUPPORTED = json.dumps({"error": {"code": "unsupported_encoding", "message": NOT_JSON}}).encode()
USAGE = b'"usage":'
MOST_USAGES = 8
"""Places of a response that may hold its usage. A client can repeat the name in the schema of a tool without end."""


class HttpItemLoop(EndedItems):
    """Runs items on the event loop of the API server, and passes their ends to the feeder's thread."""

    def __init__(self, app: ASGIApp, scope: Mapping[str, Any], engine: VllmEngine) -> None:
        """Run items with `app`; `scope` has what the scopes of all items have in common."""
        super().__init__()
        self.engine = engine
        self._app = app
        self._scope = scope
        self.events = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        engine.hang_up = self._hang_up

    # The feeder's thread

    @property
    def is_healthy(self) -> bool:
        """Whether EngineCore runs."""
        return self.failure is None

    def start(self, item: HttpItem) -> None:
        """Start an item. Its end comes from `take_ended`, or from the feeder if EngineCore ended."""
        self.engine.items[item.request_id] = item
        item.call.on_begin = self._began
        self.events.call_soon_threadsafe(self._spawn, item)

    def abort(self, request_id: str) -> None:
        """End an item. An id that is not known is ignored."""
        self._hang_up([request_id])

    def _hang_up(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            item = self.engine.items.get(request_id)
            if item is not None:
                self.events.call_soon_threadsafe(item.gone.set)

    # The event loop

    def fail(self, why: str) -> None:
        """State that EngineCore ended."""
        self.failure = why
        self.wake_feeder()

    def _began(self) -> None:
        self.num_started += 1
        self.wake_feeder()

    def _spawn(self, item: HttpItem) -> None:
        task = self.events.create_task(self._run(item))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, item: HttpItem) -> None:
        CALL.set(item.call)  # of this task only
        try:
            await self._request(item)
        except Exception as error:  # noqa: BLE001 - a defect of one route must not keep the item
            log.warning("item failed", item=item.request_id, error=repr(error))
        finally:
            item.call.leave_media()
        self._settle(item)

    async def _request(self, item: HttpItem) -> None:
        """Send the item through the app, until it has answered or is told that the client is gone for some time."""
        work = asyncio.ensure_future(self._send(item))
        gone = asyncio.ensure_future(item.gone.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.wait({work}, timeout=ABORT_SECONDS)
        finally:
            gone.cancel()
            work.cancel()
        if work.done() and not work.cancelled():
            work.result()

    async def _send(self, item: HttpItem) -> None:
        parts: list[bytes] = []
        is_read = is_json = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": item.body, "more_body": False}
            await item.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal is_json
            if message["type"] == "http.response.start":
                # Starlette passes on a member of `HTTPStatus`.
                item.status, item.call.responded_at = int(message["status"]), time.monotonic()
                kinds = [value for name, value in message.get("headers", ()) if name == b"content-type"]
                is_json = any(kind.startswith(b"application/json") for kind in kinds)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    item.answer = b"".join(parts)
                    if not is_json and item.status == 200 and not item.gone.is_set():
                        item.status, item.answer = 400, UNSUPPORTED

        length = (b"content-length", str(len(item.body)).encode())
        scope = {
            **self._scope,
            "path": item.url,
            "raw_path": item.url.encode(),
            "headers": [*self._scope["headers"], length],
            "state": {},
        }
        await self._app(scope, receive, send)

    def _settle(self, item: HttpItem) -> None:
        call, requests = item.call, item.call.requests
        # vLLM answers `null` to a client that left.
        has_answer = item.status == 200 and item.answer.startswith(b"{") and not call.is_aborted
        prompt, output = _usage(item.answer) if has_answer else (0, 0)
        reason = FinishReason.FAILED
        if has_answer:
            reason = FinishReason.LENGTH if any(request.is_cut for request in requests) else FinishReason.STOP
        elif call.refused is not None:  # vLLM has ended the item as if its client had left
            item.status, item.answer = call.refused.status, call.refused.as_openai()
        elif item.is_given_back or (call.is_aborted and item.status in {0, 200}):
            reason = FinishReason.GIVEN_BACK
        elif item.gone.is_set():
            reason = FinishReason.ABORTED
        generated: tuple[int, ...] = ()
        if len(requests) == 1 and requests[0].can_continue:
            generated = (*requests[0].replay, *requests[0].token_ids) or call.generated
        ended = Output(
            item.request_id,
            finish_reason=reason,
            error=f"vLLM answered with status {item.status}." if item.status else "vLLM did not answer.",
            num_prompt=prompt,
            num_output=output or call.num_output,
            generated=generated,
            num_computed=self.engine.num_computed(item.request_id),
        )
        self._end(item, ended, num_cached=sum(request.num_cached for request in requests))

    def _end(self, item: HttpItem, output: Output, *, num_cached: int = 0) -> None:
        if self.engine.items.pop(item.request_id, None) is None:
            return  # settled already
        timing = item.call.timing
        if timing.first_at is None and output.finish_reason is not FinishReason.FAILED:
            self.num_started += 1
        at = item.call.ended_at or time.monotonic()
        self._ended.append(Ended(output, at, timing.first_at, num_cached, item.call.slowest, timing.is_whole))
        self.wake_feeder()


def _usage(answer: bytes) -> tuple[int, int]:
    """Return the tokens of prompt and answer that a response states, in the words of any of the APIs.

    It decodes a response from its last usage on: no vectors follow it. No text of a response holds its name in quotes
    that are not escaped. A schema that the response repeats may, but the rest of the response from there is no object.
    """
    begin = len(answer)
    for _ in range(MOST_USAGES):
        begin = answer.rfind(USAGE, 0, begin)
        if begin < 0:
            break
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(b"{" + answer[begin:])["usage"]
            stated = found if isinstance(found, dict) else {}
            prompt = stated.get("prompt_tokens", stated.get("input_tokens", stated.get("total_tokens")))
            output = stated.get("completion_tokens", stated.get("output_tokens"))
            return prompt if isinstance(prompt, int) else 0, output if isinstance(output, int) else 0
    return 0, 0
