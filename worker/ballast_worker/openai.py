"""From an OpenAI request body to an engine's request, and the refusals on the way; for HTTP and for items of jobs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast_engine.errors import InvalidChat
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.tokenizer import Tokenizer
from ballast_openai.body import ChatBody, CompletionBody, parse_body
from ballast_openai.errors import InvalidBody
from ballast_policy.request import RequestClass
from ballast_worker.errors import Refused

Body = CompletionBody | ChatBody

SHORT_PROMPT_CHARS = 4096
"""Up to here a prompt takes about a millisecond to tokenize, less than handing it to another thread is worth."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is for, however it came."""

    tenant: str = "default"
    request_class: RequestClass = RequestClass.ONLINE
    priority: int = 0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The model that this worker serves, as far as requests are concerned."""

    name: str
    revision: str
    """Names the weights: a generated prefix is continued under the same revision only."""
    created: int
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer

    def read(self, url: str, data: object) -> Body:
        """Check a decoded JSON body.

        Raises:
            Refused: names the field, what was found and what was wanted; 404 for another model.
        """
        try:
            body = parse_body(url, data)
        except InvalidBody as error:
            raise Refused(400, str(error), code=error.code, param=error.field) from None
        self.check_name(body.model)
        return body

    def check_name(self, name: str) -> None:
        """Refuse another model with 404."""
        if name != self.name:
            raise Refused(
                404,
                f"The model {name[:200]!r} is not served here; this worker serves {self.name!r}.",
                code="model_not_found",
                param="model",
            )

    def tokens(self, body: Body) -> tuple[int, ...]:
        """The prompt in tokens.

        Raises:
            Refused: the model cannot read it, or it leaves no room for what is asked.
        """
        prompt = self._encode(body)
        field = "prompt" if isinstance(body, CompletionBody) else "messages"
        if not prompt:
            raise Refused(400, f"{field}: found no token, wanted at least one", code="invalid_value", param=field)
        asked = body.num_output
        if len(prompt) >= self.max_model_len or len(prompt) + (asked or 1) > self.max_model_len:
            wanted = f" and {asked} tokens of output were asked for" if asked else ""
            raise Refused(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {len(prompt)} "
                f"tokens{wanted}: shorten the prompt or ask for less.",
                code="context_length_exceeded",
                param=field,
            )
        return prompt

    def request(
        self, request_id: str, body: Body, prompt: tuple[int, ...], caller: Caller, *, seed: int | None = None
    ) -> GenerationRequest:
        """What the engine is asked for. `seed` is what an unseeded body samples with; by default a random one."""
        if body.seed is not None:
            seed = body.seed
        elif seed is None:
            seed = random.getrandbits(63)
        sampling = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
            max_tokens=body.num_output or self.max_model_len - len(prompt),
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            include_stop=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
        )
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            request_class=caller.request_class,
            tenant=caller.tenant,
            priority=caller.priority,
            ttft_seconds=caller.ttft_seconds,
            tpot_seconds=caller.tpot_seconds,
            stream=body.stream,
        )

    def _encode(self, body: Body) -> tuple[int, ...]:
        if isinstance(body, ChatBody):
            messages: Sequence[dict[str, Any]] = [message.model_dump() for message in body.messages]
            try:
                return tuple(self.tokenizer.apply_chat_template(messages))
            except InvalidChat as error:
                raise Refused(400, str(error), code="invalid_chat", param="messages") from None
        if isinstance(body.prompt, str):
            return tuple(self.tokenizer.encode(body.prompt))
        largest = max(body.prompt)
        if largest >= self.vocab_size:
            raise Refused(
                400,
                f"prompt: found token id {largest}, wanted ids under {self.vocab_size}, this model's vocabulary",
                code="invalid_value",
                param="prompt",
            )
        return body.prompt


def of_job(
    request: GenerationRequest, *, generated: tuple[int, ...], slack: float, prefix_key: int
) -> GenerationRequest:
    """The request as an item of a job: behind what an earlier attempt generated, and with one text at its end."""
    return replace(request, generated=generated, slack=slack, prefix_key=prefix_key, stream=False)


def num_chars(body: Body) -> int:
    """Size of the text to tokenize."""
    if isinstance(body, ChatBody):
        return sum(len(message.content) for message in body.messages)
    return len(body.prompt) if isinstance(body.prompt, str) else 0
