"""Items of jobs as requests to vLLM's app."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ballast_engine.request import Output
from ballast_openai.errors import InvalidBody
from ballast_openai.item_body import parse_item
from ballast_policy.request import RequestClass
from ballast_queue.job import Claimed, Prefix
from ballast_vllm.bodies import check_repeated_fields
from ballast_vllm.calls import Call
from ballast_vllm.costs import Asked
from ballast_worker.errors import Refused
from ballast_worker.http_exchange import TOO_DEEP
from ballast_worker.items import NO_PLACE, ItemFailure
from ballast_worker.openai import MODEL_NOT_FOUND, Caller
from ballast_worker.requests import RequestTiming
from ballast_worker.responses import AnswerBuffer

RETRYABLE = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which another attempt may succeed."""
CROWDED = "Online requests of other adapters hold all places, and items of the adapter {!r} wait for one already."


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
        check_repeated_fields(claimed.url, claimed.body, is_encoder=self.is_encoder)
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
            asked=Asked.of_call(claimed.url, is_item=True),
        )
        item = HttpItem(request_id, claimed.url, text, body.model, call, claimed.seed, self.start)
        call.hang_up = item.gone.set
        return item


def _decode(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
