"""Turn OpenAI request bodies into engine requests, or refuse them; for HTTP and for items of jobs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ballast_engine.errors import InvalidChat
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.tokenizer import Tokenizer
from ballast_openai.body import ChatBody, CompletionBody, parse_body
from ballast_openai.chat_limits import MOST_INDENTS, TOO_NESTED, num_indents
from ballast_openai.errors import InvalidBody
from ballast_policy.request import RequestClass
from ballast_worker.errors import Refused

Body = CompletionBody | ChatBody

MODEL_NOT_FOUND = "model_not_found"


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant, class and priority of a request from HTTP or from a job."""

    tenant: str = "default"
    request_class: RequestClass = RequestClass.ONLINE
    priority: int = 0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The model that this worker publishes to clients: its names and its limits for requests."""

    names: tuple[str, ...]
    """The names that clients use. The first one is in answers, metrics and the status."""
    revision: str
    """The name of the weights. A generated prefix is continued only under the same revision."""
    created: int
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    sampling: Mapping[str, float]
    """Sampling parameters for requests that leave them out, by the name of the field."""
    longest_token_bytes: int | None = None
    """The most bytes of text in one token; None: unlimited."""

    @property
    def name(self) -> str:
        """The name in answers, metrics and the status."""
        return self.names[0]

    def read(self, url: str, data: object) -> Body:
        """Check a decoded JSON body.

        Raises:
            Refused: the message names the field and what was expected; 404 for another model.
        """
        self._check_counts(data)
        try:
            body = parse_body(url, data)
        except InvalidBody as error:
            raise Refused(400, str(error), code=error.code, param=error.field) from None
        self.check_name(body.model)
        return body

    def check_name(self, name: str) -> None:
        """Refuse any other model with 404."""
        if name not in self.names:
            raise Refused(
                404,
                f"The model {name[:200]!r} does not exist. This worker serves {', '.join(map(repr, self.names))}.",
                code=MODEL_NOT_FOUND,
                param="model",
            )

    def tokens(self, body: Body) -> tuple[int, ...]:
        """Return the tokens of the prompt.

        Raises:
            Refused: the model cannot read the prompt, or it leaves too few tokens for the output.
        """
        field = "prompt" if isinstance(body, CompletionBody) else "messages"
        prompt = self._encode(body, field)
        if not prompt:
            raise Refused(400, f"{field}: found no tokens, expected at least one", code="invalid_value", param=field)
        asked = body.num_output
        if len(prompt) >= self.max_model_len or len(prompt) + (asked or 1) > self.max_model_len:
            wanted = f", and max_tokens is {asked}" if asked else ""
            raise Refused(
                400,
                f"The maximum context length of this model is {self.max_model_len} tokens, but the prompt has "
                f"{len(prompt)} tokens{wanted}. Shorten the prompt or reduce max_tokens.",
                code="context_length_exceeded",
                param=field,
            )
        return prompt

    def request(
        self, request_id: str, body: Body, prompt: tuple[int, ...], caller: Caller, *, seed: int | None = None
    ) -> GenerationRequest:
        """Return the engine request of a body. `seed` is for a body without a seed; by default it is random."""
        body = body.model_copy(
            update={n: value for n, value in self.sampling.items() if n not in body.model_fields_set}
        )
        if body.seed not in {None, -1}:  # as in vLLM, -1 is no seed
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
            prefix_key=body.prefix_key if caller.request_class is RequestClass.OFFLINE else None,
            stream=body.stream,
        )

    def _check_counts(self, data: object) -> None:
        """Refuse more token ids or messages than the context has tokens, before each of them is checked."""
        for field, what in (("prompt", "token ids"), ("messages", "messages")):
            value = data.get(field) if isinstance(data, dict) else None
            if isinstance(value, list) and len(value) > self.max_model_len:
                raise self._too_long(field, f"{len(value)} {what}")

    def _check_bytes(self, text: str, field: str) -> str:
        """Return the text, unless it has more bytes than the tokens of the context can stand for."""
        longest = self.longest_token_bytes
        if (
            longest is not None and len(text) * 4 > longest * self.max_model_len
        ):  # UTF-8 has at most 4 bytes a character
            num_bytes = len(text.encode())
            if num_bytes > longest * self.max_model_len:
                raise self._too_long(field, f"{num_bytes} bytes, and a token has at most {longest}")
        return text

    def _too_long(self, field: str, found: str) -> Refused:
        return Refused(
            400,
            f"The maximum context length of this model is {self.max_model_len} tokens, but {field} has {found}. "
            f"Shorten {field}.",
            code="context_length_exceeded",
            param=field,
        )

    def _encode(self, body: Body, field: str) -> tuple[int, ...]:
        if isinstance(body, ChatBody):
            try:
                messages = [message.for_template() for message in body.messages]
                if num_indents([messages, body.chat_template_kwargs]) > MOST_INDENTS:
                    raise Refused(400, f"{field}, {TOO_NESTED}", code="invalid_chat", param=field)
                text = self.tokenizer.render_chat(messages, body.chat_template_kwargs)
            except InvalidChat as error:
                raise Refused(400, str(error), code="invalid_chat", param="messages") from None
            except RecursionError:
                why = "messages: found arguments of a tool call that are nested too deeply, expected fewer levels"
                raise Refused(400, why, code="invalid_chat", param="messages") from None
            return tuple(self.tokenizer.encode(self._check_bytes(text, field), is_chat=True))
        if isinstance(body.prompt, str):
            return tuple(self.tokenizer.encode(self._check_bytes(body.prompt, field)))
        largest = max(body.prompt)
        if largest >= self.vocab_size:
            raise Refused(
                400,
                f"prompt: found token id {largest}, expected ids below {self.vocab_size}, the size of the vocabulary",
                code="invalid_value",
                param="prompt",
            )
        return body.prompt
