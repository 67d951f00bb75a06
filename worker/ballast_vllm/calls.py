"""One HTTP request or one item, and the requests that vLLM makes of it.

The context variable `CALL` carries the call from the middleware to the engine client: every task that vLLM starts for
a request inherits it. So each request to EngineCore finds its class and tenant, whatever the route, and no body is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ballast_engine.request import FinishReason
from ballast_policy.request import RequestClass
from ballast_queue.settings import MAX_PRIORITY, MIN_PRIORITY
from ballast_vllm.costs import Asked
from ballast_vllm.media import PLACES, Media
from ballast_vllm.requests import RequestPlace
from ballast_worker.errors import Refused
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming

GREEDY_TEMPERATURE = 1e-5
"""vLLM samples greedily below this temperature."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request in EngineCore. A call with several prompts or with `n` has several."""

    request_id: str
    """The id that vLLM gave it."""
    call: Call
    num_prompt: int
    can_continue: bool
    """Whether it is of an item, and another worker can continue it with the same tokens."""
    replay: tuple[int, ...] = ()
    """Tokens of an earlier attempt that go in front of its first output."""
    num_cached: int = 0
    num_output: int = 0
    num_logprobs: int = 0
    """Logprobs of each of its tokens that vLLM keeps until the answer ends."""
    token_ids: list[int] = field(default_factory=list)
    """What it computed of its output, if it can be continued."""
    first_at: float | None = None
    """When its first output came."""
    last_at: float = 0.0
    """When its newest output came."""
    is_held_up: bool = False
    """Whether it waits for a place of its adapter, while online requests hold all places."""
    is_over: bool = False
    is_aborted: bool = False
    is_failed: bool = False
    """Whether EngineCore ended it with an error. The status of a stream does not show it."""
    is_cut: bool = False
    """Whether its limit of tokens ended it."""

    @property
    def is_begun(self) -> bool:
        """Whether it has an output."""
        return self.first_at is not None

    @property
    def decode_seconds(self) -> float:
        """Return the time between its first and its newest output."""
        return 0.0 if self.first_at is None else self.last_at - self.first_at

    @property
    def is_counted(self) -> bool:
        """Whether it counts in the waiting queue of HTTP requests by itself."""
        return not (self.call.is_item or self.call.counts_once)


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request or one item."""

    caller: Caller
    timing: RequestTiming
    is_item: bool = False
    is_entering: bool = False
    """Whether it counts as waiting, although EngineCore has no request of it yet."""
    was_alone: bool = False
    """Whether no other call of its class waited when it came."""
    counts_once: bool = False
    """Whether it counts as one request in the waiting queue, however many requests it makes."""
    num_searched: int = 0
    """Prompts of a beam search, which makes a request of each beam for each token; 0 for any other call."""
    states_priority: bool = False
    """Whether the priority of the caller is that of a header or a job. It overrides the priority in the body."""
    most_priority: int = MAX_PRIORITY
    """The highest priority of its tenant."""
    slack: float = inf
    prefix_key: int | None = None
    generated: tuple[int, ...] = ()
    """Tokens that an earlier attempt generated."""
    num_expected: int = 1
    """Requests that vLLM makes of it."""
    num_computed: int = 0
    """Tokens that earlier attempts computed."""
    num_taken: int = 0
    """Those of them that `take_computed` has returned."""
    requests: list[EngineRequest] = field(default_factory=list)
    last_at: float | None = None
    """When the newest output came."""
    responded_at: float | None = None
    """When vLLM began its response."""
    on_begin: Callable[[], None] | None = None
    """Called at the first output."""
    refused: Refused | None = None
    """Why the call gets an error after vLLM read its body."""
    media: Media = field(default_factory=Media)
    asked: Asked = field(default_factory=Asked)
    hang_up: Callable[[], None] = lambda: None
    """Makes vLLM believe that the client closed the connection, so that it aborts the call."""

    @property
    def request_class(self) -> RequestClass:
        """The class of the call."""
        return self.caller.request_class

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts of the call."""
        # A beam search begins with the prompts. Its other requests repeat them.
        return sum(request.num_prompt for request in self.requests[: self.num_searched or None])

    @property
    def num_output(self) -> int:
        """Tokens of the longest answer of the call."""
        if not self.num_searched:
            return max((request.num_output for request in self.requests), default=0)
        # The prompt of a beam has its answer so far. The prompts of a search count as equally long.
        longest = max((request.num_prompt + request.num_output for request in self.requests), default=0)
        return max(0, longest - self.num_prompt // self.num_searched)

    @property
    def ended_at(self) -> float | None:
        """When its answer was there: its newest token or, if it has none, the response that vLLM builds of vectors."""
        return self.last_at if self.num_output else self.responded_at or self.last_at

    @property
    def slowest(self) -> tuple[float, int]:
        """Return the time from first to last token, and the tokens, of the answer with the largest TPOT."""
        if self.num_searched and self.timing.first_at is not None and self.last_at is not None:
            return self.last_at - self.timing.first_at, self.num_output
        answers = [(request.decode_seconds, request.num_output) for request in self.requests if request.num_output > 1]
        return max(answers, key=lambda answer: answer[0] / (answer[1] - 1), default=(0.0, 1))

    @property
    def is_aborted(self) -> bool:
        """Whether EngineCore gave up a request of the call."""
        return any(request.is_aborted for request in self.requests)

    @property
    def is_waited_for(self) -> bool:
        """Whether EngineCore computes a request of the call."""
        return any(not request.is_over for request in reversed(self.requests))

    async def take_media(self, *, is_large: bool = False) -> None:
        """Return when the call may decode media, with a large place up to its limit."""
        await PLACES[self.request_class].take(self.media, is_large=is_large)

    def leave_media(self) -> None:
        """Let another call decode media: vLLM has prepared a request of this one for EngineCore, or it ended."""
        PLACES[self.request_class].leave(self.media)

    def ending(self, *, is_complete: bool, is_dead: bool) -> FinishReason:
        """Return how it ended. `is_complete`: its response is. `is_dead`: EngineCore ended, maybe after the call.

        If the client leaves before the response begins, vLLM makes an empty response.
        """
        if any(request.is_failed for request in self.requests):
            return FinishReason.FAILED
        if self.is_aborted or not is_complete or self.is_waited_for:
            return FinishReason.FAILED if is_dead else FinishReason.ABORTED
        return FinishReason.LENGTH if any(request.is_cut for request in self.requests) else FinishReason.STOP

    def take_computed(self, num_prompt: int) -> int:
        """Return how many of the computed tokens belong to its next request. Each token is returned once.

        An item keeps the sum over its requests. If it has several, each of them gets as many tokens as its prompt has,
        until none is left.
        """
        left = self.num_computed - self.num_taken
        taken = left if self.num_expected == 1 else min(left, num_prompt)
        self.num_taken += taken
        return taken

    def place(self, body_priority: int, *, num_computed: int) -> RequestPlace:
        """Return the place of a request in the policy. `body_priority` is vLLM's: lower is more urgent."""
        caller = self.caller
        stated = caller.priority if self.states_priority else -body_priority
        return RequestPlace(
            request_class=caller.request_class,
            tenant=caller.tenant,
            priority=max(MIN_PRIORITY, min(stated, self.most_priority)),
            ttft=caller.ttft_seconds,
            tpot=caller.tpot_seconds,
            slack=self.slack,
            prefix_key=self.prefix_key,
            num_computed=num_computed,
        )


CALL: ContextVar[Call | None] = ContextVar("ballast_call", default=None)


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "structured_outputs": (None,),
    "bad_words": (None, []),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "trace_decode_token_ids": (None,),
}
"""Sampling parameters whose effect depends on the answer so far, and their values without an effect."""


def can_continue(request: Any) -> bool:
    """Return whether a request with its generated tokens in the prompt generates the same tokens as without a break.

    That holds for greedy decoding of a base model, if nothing else depends on what is prompt and what is answer.
    """
    params = request.sampling_params
    return (
        params is not None
        and request.lora_request is None
        and bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not request.resumable
        and params.temperature < GREEDY_TEMPERATURE
        and all(getattr(params, name) in values for name, values in NEUTRAL.items())
    )
