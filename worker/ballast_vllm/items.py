"""Items of jobs, sent through vLLM's own app in this process.

An item takes the path of an online request: the same routes, validation, templates, parsers and sampling. So it may use
what a request may use, and gets the same answer. There is no socket between: the app is called as ASGI describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp, Message

from ballast_engine.request import FinishReason, Output
from ballast_engine.stats import EngineStats
from ballast_log import Log
from ballast_openai.errors import InvalidBody
from ballast_openai.item_body import parse_item
from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.job import Claimed, Prefix
from ballast_vllm.calls import CALL, Call
from ballast_vllm.engine_client import EngineTap
from ballast_worker.errors import Refused
from ballast_worker.http_exchange import TOO_DEEP
from ballast_worker.items import NO_PLACE, ItemFailure
from ballast_worker.loop import Ended, EndedItems
from ballast_worker.openai import MODEL_NOT_FOUND, Caller
from ballast_worker.requests import RequestTiming
from ballast_worker.responses import AnswerBuffer

log = Log(__name__)

ABORT_SECONDS = 2.0
"""Time that vLLM has to end an item that is aborted."""
RETRYABLE = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which another attempt may succeed."""
NOT_JSON = "The answer is not JSON, as the result of an item must be. Leave out `encoding_format`, or set it to base64."
CROWDED = "Online requests of other adapters hold all places, and items of the adapter {!r} wait for one already."
UNSUPPORTED = json.dumps({"error": {"code": "unsupported_encoding", "message": NOT_JSON}}).encode()
USAGE = b'"usage":'
MOST_USAGES = 8
"""Places of a response that may hold its usage. A client can repeat the name in the schema of a tool without end."""


@dataclass(slots=True, eq=False)
class HttpItem:
    """One item as a request to vLLM's app."""

    request_id: str
    url: str
    body: bytes
    model: str
    call: Call
    seed: int
    start: Callable[[HttpItem], None]
    status: int = 0
    answer: bytes = b""
    """The JSON text of the response. It stays one: decoding vectors would stop all threads of the process meanwhile."""
    is_given_back: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when vLLM should stop computing the item."""

    @property
    def num_requests(self) -> int:
        if not self.has_begun:
            return self.call.num_expected
        return max(1, sum(not request.is_over for request in list(self.call.requests)))

    @property
    def has_begun(self) -> bool:
        return self.call.timing.first_at is not None

    @property
    def num_held_up(self) -> int:
        return 0 if self.has_begun else sum(request.is_held_up for request in list(self.call.requests))

    def submit(self) -> None:
        self.start(self)

    def whole(self, answer: AnswerBuffer) -> bytes:  # noqa: ARG002 - the response is complete already
        return self.answer

    def failure(self, claimed: Claimed, output: Output) -> ItemFailure:
        answer = _decode(self.answer)
        error = answer.get("error") if isinstance(answer, dict) else None
        stated = error if isinstance(error, dict) else {}
        is_refused = 400 <= self.status < 500
        code = stated.get("code")
        return ItemFailure(
            claimed,
            code=code if isinstance(code, str) else "invalid_request" if is_refused else "engine_failed",
            message=str(stated.get("message") or output.error),
            is_retryable=not is_refused or self.status in RETRYABLE,
            status_code=self.status or 500,
        )


class VllmEngine:
    """vLLM's engine as the feeder sees it. Any thread may read it."""

    def __init__(self, tap: EngineTap, stats: EngineStats, policy: PolicyConfig) -> None:
        self.policy = policy
        self.items: dict[str, HttpItem] = {}
        self.in_step: Mapping[str, int] = {}
        """Requests of an encoder's last step by class; empty for other models."""
        self.crowded: frozenset[str] = frozenset()
        """Adapters of which enough items wait here for a place, while online requests hold all places."""
        self._tap = tap
        self.take(stats)
        self.hang_up: Callable[[Sequence[str]], None] = lambda _: None

    def take(self, stats: EngineStats) -> None:
        """Keep the figures that the scheduler reports now."""
        begun = self._tap.num_begun
        # If more requests have an output than hold a slot, the others are preempted.
        self._num_preempted = {c: max(0, begun[c] - stats.of(c).running - stats.of(c).parked) for c in RequestClass}
        self.latest = stats

    def note_held_up(self, request_ids: Collection[str]) -> bool:
        """Note which requests are held up now. Return whether they are others than before."""
        if not self._tap.note_held_up(request_ids):
            return False
        numbers = Counter[str]()
        for item in list(self.items.values()):
            numbers[item.model] += item.num_held_up
        self.crowded = frozenset(model for model, number in numbers.items() if number >= LEAST_AHEAD)
        return True

    def stats(self) -> EngineStats:
        """Return the figures of the last poll, with the requests of each class as they are now.

        A request that had its first output since then holds a slot.
        """
        found, tap = self.latest, self._tap
        classes = {}
        for request_class in RequestClass:
            of = found.of(request_class)
            num_live = tap.num_live[request_class]
            num_begun = tap.num_begun[request_class] - self._num_preempted[request_class]
            residents = min(num_live, max(of.running + of.parked, num_begun))
            parked = min(of.parked, residents)
            classes[request_class] = replace(
                of, running=residents - parked, parked=parked, waiting=num_live - residents
            )
        return replace(found, online=classes[RequestClass.ONLINE], offline=classes[RequestClass.OFFLINE])

    def shown(self) -> EngineStats:
        """Return the figures for metrics and status.

        A request of an encoder holds its slot within one step, and the scheduler reports between steps. So as many
        requests as the last step had count as those in slots, if there are that many now.
        """
        found = self.stats()
        shown = {}
        for request_class in RequestClass:
            of = found.of(request_class)
            moved = max(0, min(of.waiting, self.in_step.get(str(request_class), 0) - of.running))
            running = of.running + moved
            shown[request_class] = replace(
                of, running=running, waiting=of.waiting - moved, borrowed=max(0, running - of.reserved)
            )
        return replace(found, online=shown[RequestClass.ONLINE], offline=shown[RequestClass.OFFLINE])

    def num_computed(self, request_id: str) -> int:
        """Return the tokens of an item computed so far, by this or an earlier attempt."""
        item = self.items.get(request_id)
        if item is None:
            return 0
        here = sum(r.num_prompt + len(r.replay) + r.num_output for r in list(item.call.requests) if r.is_begun)
        return max(item.call.num_computed, here)

    def give_back(self, request_ids: Sequence[str]) -> None:
        """End items with `FinishReason.GIVEN_BACK`."""
        for request_id in request_ids:
            item = self.items.get(request_id)
            if item is not None:
                item.is_given_back = True
        self.hang_up(request_ids)


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
                item.status, item.call.responded_at = message["status"], time.monotonic()
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


@dataclass(frozen=True, slots=True)
class HttpReader:
    """Turns claimed items into requests to vLLM's app."""

    revision: str
    urls: Sequence[str]
    models: Callable[[], Sequence[str]]
    start: Callable[[HttpItem], None]
    is_encoder: bool = False
    crowded: Callable[[], Collection[str]] = tuple
    """Returns the adapters of which no further item shall wait here. The items wait in the queue, for any worker."""

    def prepare(self, request_id: str, claimed: Claimed, slack: float) -> HttpItem:
        """Return the item, with `slack` as the slack of its job.

        Raises:
            Refused: the engine does not serve its URL, Ballast cannot read its body, or its adapter has no place now.
        """
        fields = {**claimed.body, "stream": False}
        if claimed.url == "/v1/responses":
            fields["store"] = False  # no client reads it again
        try:
            body = parse_item(claimed.url, claimed.body, self.urls)
            text = json.dumps(fields).encode()
        except InvalidBody as error:
            raise Refused(400, error.message, code=error.code, param=error.field) from None
        except RecursionError:
            raise Refused(400, TOO_DEEP, code="invalid_json") from None
        if body.model not in self.models():
            message = f"The model {body.model[:200]!r} does not exist. This server has {', '.join(self.models())}."
            raise Refused(404, message, code=MODEL_NOT_FOUND, param="model")
        if body.model in self.crowded():
            raise Refused(503, CROWDED.format(body.model[:200]), code=NO_PLACE, param="model")
        earlier = claimed.prefix or Prefix()
        call = Call(
            Caller(claimed.tenant, RequestClass.OFFLINE, claimed.priority),
            RequestTiming(RequestClass.OFFLINE, time.monotonic(), is_whole=self.is_encoder),
            is_item=True,
            states_priority=True,
            slack=slack,
            prefix_key=body.prefix_key,
            generated=earlier.token_ids if earlier.model_revision == self.revision else (),
            num_expected=body.num_requests,
            num_computed=earlier.num_computed,
        )
        return HttpItem(request_id, claimed.url, text, body.model, call, claimed.seed, self.start)


def _decode(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


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
