"""The requests that an engine takes, and its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from ballast_policy.request import RequestClass


class FinishReason(StrEnum):
    """Why a request ended. The first two names are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    GIVEN_BACK = "given_back"
    """The worker drains: another worker continues the request after its generated tokens."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, as OpenAI and vLLM define it. `temperature` 0 is greedy; `seed` is always set."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 considers every token."""
    min_p: float = 0.0
    seed: int = 0
    """A sample depends only on the seed, the position of the token and the logits."""
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, in tokens. Seconds are on the engine's monotonic clock."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_class: RequestClass
    tenant: str = "default"
    priority: int = 0
    arrival: float | None = None
    """None: the time of the submission."""
    ttft_seconds: float | None = None
    """SLO of this request; None: that of its class."""
    tpot_seconds: float | None = None
    slack: float = inf
    prefix_key: int | None = None
    """Groups requests with the same prompt prefix; None if no group is known."""
    cache_salt: str = ""
    """Requests with different salts never share prefix-cache blocks."""
    generated: tuple[int, ...] = ()
    """Tokens that an earlier attempt generated. Generation continues after them; they count towards `max_tokens`."""
    num_computed: int = 0
    """Tokens of prompt and answer that earlier attempts computed. They count as wasted when they are computed again."""
    stream: bool = True
    """False: the text comes once, at the end."""


@dataclass(slots=True)
class Output:
    """The output of one step for one request. `text` is the new text since the last output, in whole characters."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    """With FAILED: a sentence for the user."""
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    """Prompt tokens from the prefix cache. Only the first output has the number."""
    generated: tuple[int, ...] = ()
    """With GIVEN_BACK: all tokens generated so far, for the next attempt."""
    num_computed: int = 0
    """With GIVEN_BACK: tokens of prompt and answer computed so far, by this or an earlier attempt."""
