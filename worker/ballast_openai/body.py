"""Request bodies of `/v1/completions` and `/v1/chat/completions`, for HTTP and for jobs.

Ballast accepts a body as a whole, or refuses it and names the field. It ignores no unknown field and no value of a
wrong type.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self
from zlib import crc32

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ballast_openai.chat_limits import MOST_MESSAGES, MOST_TOKEN, wrong_token
from ballast_openai.errors import InvalidBody, Unsupported, describe
from ballast_openai.refused import OR_VLLM, drop_neutral
from ballast_openai.validation_errors import translate

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
URL_NAMES = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/moderations": "moderation",
    "/v1/images/generations": "image generation",
    "/v1/images/edits": "image editing",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/speech": "speech",
    "/v1/score": "scoring",
    "/v1/rerank": "reranking",
}
"""URLs that Ballast's own engine does not serve, and what they are for."""
VLLM_URLS = frozenset({"/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank"})
"""Those of them that Ballast serves with vLLM, if the model has them."""
MAX_STOPS = 16
"""Limit of stop strings in a request. OpenAI allows 4."""
MOST_STOP_CHARACTERS = 1024
"""Limit of a stop string. After each token, the engine compares the end of the answer with all of them."""
MOST_FIELDS = 256
"""Limit of fields in an object of a body."""
COUNT_LIMIT = 2**31
"""Counts are less than this, so that code with 32 or 64 bits can use them."""


def _refuse(message: str, *, field: str | None = None) -> PydanticCustomError:
    return PydanticCustomError("ballast", "{text}", {"text": message, "field": field})


def _as_tuple(value: object) -> object:
    # Strict mode rejects a list for a tuple, and JSON has only lists.
    return tuple(value) if isinstance(value, list) else value


def is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogate, which UTF-8 cannot express."""
    return text.isascii() or text.encode(errors="replace").decode() == text


def _check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise _refuse("found a lone surrogate, expected text that can be written as UTF-8")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=64, fail_fast=True), BeforeValidator(_as_tuple)]


def _check_stop(value: object) -> object:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refuse(f"found {describe(value)}, expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _refuse(f"found {len(stops)} stop strings, expected at most {MAX_STOPS}")
    if "" in stops:
        raise _refuse("found an empty stop string, expected at least one character")
    longest = max(map(len, stops), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise _refuse(f"found a stop string of {longest} characters, expected at most {MOST_STOP_CHARACTERS}")
    return tuple(stops)


def _check_prompt(value: object) -> object:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        [value] = value  # some clients send each prompt as a list
    if isinstance(value, str):
        return _check_unicode(value)
    if not isinstance(value, list):
        raise _refuse(f"found {describe(value)}, expected a string or a list of token ids")
    if not value:
        raise _refuse("found an empty list, expected a string or at least one token id")
    if isinstance(value[0], str | list):
        raise _refuse("found a list of prompts, expected one prompt (text or token ids): send one request for each")
    for token in value:
        if type(token) is not int or not 0 <= token < 2**31:
            raise _refuse(f"found {describe(token)} in the list, expected token ids (integers from 0)")
    return tuple(value)


def _check_content(value: object) -> object:
    if value is None:
        return value
    if isinstance(value, str):
        return _check_unicode(value)
    if not isinstance(value, list):
        raise _refuse(f"found {describe(value)}, expected a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise _refuse(f"found {describe(part)}, expected parts like {{'type': 'text', 'text': '...'}}")
        if kind != "text":
            raise _refuse(f"found a part of type {kind!r}, expected text: other parts are not supported")
        text = part.get("text")
        if not isinstance(text, str) or len(part) != 2:
            raise _refuse("found a text part with other fields, expected {'type': 'text', 'text': '...'}")
        texts.append(_check_unicode(text))
    return texts[0] if len(texts) == 1 else tuple(texts)


_SET_BY_SERVER = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_EMPTY_IN_ANSWERS = frozenset(
    {
        *("refusal", "annotations", "audio", "function_call", "name", "tool_calls", "tool_call_id"),
        *("reasoning", "reasoning_content"),
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: object) -> object:
        return _check_fields(value)


def _check_fields(value: object) -> object:
    # pydantic collects an error for each wrong field, and only the first is shown.
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise _refuse(f"found an object with {len(value)} fields, expected at most {MOST_FIELDS}")
    return value


def _without_null(value: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """Leave out the known fields of null, which OpenAI's clients send for fields without a value."""
    return {name: item for name, item in value.items() if item is not None or name not in known}


def _check_arguments(text: str) -> str:
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise _refuse(f"found {describe(text)}, expected a JSON object as text")
    return text


def _check_messages(value: object) -> object:
    if isinstance(value, list) and len(value) > MOST_MESSAGES:
        raise _refuse(f"found {len(value)} messages, expected at most {MOST_MESSAGES}")
    return _as_tuple(value)


def _check_template_arguments(value: object) -> object:
    _check_fields(value)
    reserved = sorted(_SET_BY_SERVER.intersection(value)) if isinstance(value, dict) else []
    if reserved:
        raise _refuse(f"found {reserved[0]!r}, expected arguments of the model's template: the server sets this one")
    if isinstance(value, dict) and (name := wrong_token(value)) is not None:
        raise _refuse(f"found {describe(value[name])}, expected at most {MOST_TOKEN} characters", field=name)
    return value


def opening_of_prompt(prompt: str | Sequence[object]) -> str:
    """Return the start of a prompt, which is a text or a list of tokens."""
    return prompt[:256] if isinstance(prompt, str) else ",".join(map(str, prompt[:64]))


def opening_of_chat(role: object, text: str | None) -> str:
    """Return the start of a conversation: the role and the text of its first message."""
    return f"{role}:{(text or '')[:1024]}"


def prefix_key(model: str, opening: str) -> int:
    """Return the key of a model and the start of a prompt. It is never 0."""
    return crc32(f"{model}\n{opening}".encode(errors="replace")) or 1


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    """OpenAI's padding of chunks, which Ballast does not add."""
    continuous_usage_stats: Literal[False] = False
    """vLLM's usage in each chunk, which Ballast does not add."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, value: object) -> object:
        return _without_null(value, cls.model_fields) if isinstance(value, dict) else value


class FunctionCall(_Strict):
    """A function that the assistant called."""

    name: Annotated[Text, Field(min_length=1)]
    arguments: Annotated[Text, AfterValidator(_check_arguments)] = ""
    """A JSON object as text; empty without arguments."""


class ToolCall(_Strict):
    """A call in a message of the assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | tuple[str, ...] | None, BeforeValidator(_check_content)]
    """A text, or the texts of several parts. None only in a message of the assistant."""
    name: Annotated[Text, Field(max_length=512)] | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(fail_fast=True), BeforeValidator(_as_tuple)] | None = None
    tool_call_id: Text | None = None
    """The call that a message of role `tool` answers."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: object) -> object:
        """Remove fields that OpenAI's clients send back without a value; the content may be left out beside calls."""
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if key not in _EMPTY_IN_ANSWERS or item not in (None, [])}
        if kept.get("role") == "assistant" and kept.get("tool_calls"):
            kept.setdefault("content", None)
        return kept

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise _refuse("found null, expected a string or a list of text parts", field="content")
        if self.tool_calls and self.role != "assistant":
            raise _refuse(f"found it in a message of role {self.role!r}, expected role 'assistant'", field="tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise _refuse("found nothing, expected the id of the call that the message answers", field="tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise _refuse(f"found it in a message of role {self.role!r}, expected role 'tool'", field="tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: arguments of calls as objects."""
        found = self.model_dump(exclude_none=True)
        found.setdefault("content", None)
        if isinstance(self.content, tuple):
            found["content"] = [{"type": "text", "text": text} for text in self.content]
        for call in found.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        return found


class Body(_Strict):
    """The fields of both kinds of request."""

    model: Annotated[Text, Field(min_length=1, max_length=512)]
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=COUNT_LIMIT)
    """0 and -1 set no limit."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[Text, ...], BeforeValidator(_check_stop)] = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    """As in vLLM, a lower number is more urgent. See `band`."""
    user: Annotated[Text, Field(max_length=512)] | None = None
    """The client's name for its end user. Ballast keeps it and does not use it."""
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(_check_fields)] = None
    """The client's notes. Ballast keeps them and does not use them."""
    prompt_cache_key: Annotated[Text, Field(max_length=512)] | None = None
    """Not used: the prefix cache finds shared prefixes itself."""
    safety_identifier: Annotated[Text, Field(max_length=512)] | None = None
    """The client's name for its end user. Ballast keeps it and does not use it."""
    service_tier: Literal["auto", "default", "flex"] | None = None
    """`flex` asks for the offline class. The header `x-ballast-class` overrides it."""

    @property
    def band(self) -> int:
        """Return the priority as Ballast orders it: a higher number is more important. Nothing else converts it."""
        return -self.priority

    @property
    def includes_usage(self) -> bool:
        """Return whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_output(self) -> int | None:
        """Return the limit of generated tokens; None: the context is the limit."""
        raise NotImplementedError

    @property
    def opening(self) -> str:
        """Return the start of the prompt, which requests with the same instructions share."""
        raise NotImplementedError

    @property
    def prefix_key(self) -> int:
        """Return the integer by which requests with the same model and opening are grouped. It is never 0."""
        return prefix_key(self.model, self.opening)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refuse("found it without stream, expected stream: true in the same request", field="stream_options")
        return self


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_check_prompt)]
    max_tokens: int = Field(default=16, ge=1, lt=COUNT_LIMIT)

    @property
    def num_output(self) -> int | None:
        return self.max_tokens

    @property
    def opening(self) -> str:
        return opening_of_prompt(self.prompt)


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1, fail_fast=True), BeforeValidator(_check_messages)]
    max_tokens: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT)
    """OpenAI's newer name for `max_tokens`."""
    chat_template_kwargs: Annotated[dict[Text, Any], BeforeValidator(_check_template_arguments)] = Field(
        default_factory=dict
    )
    """Arguments for the model's chat template, such as `enable_thinking`."""

    @property
    def num_output(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def opening(self) -> str:
        first = self.messages[0]
        return opening_of_chat(
            first.role, "\n".join(first.content) if isinstance(first.content, tuple) else first.content
        )

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise _refuse(f"found {new} and max_tokens {old}, expected one of the two", field="max_completion_tokens")
        return self


def not_yet(url: str) -> str | None:
    """Return what to use instead of a URL that Ballast's own engine does not support yet; None for any other URL."""
    what = URL_NAMES.get(url)
    other = OR_VLLM if url in VLLM_URLS else ""
    return what and f"found {url} ({what}), which is not supported yet: use {CHAT_URL} or {COMPLETIONS_URL}{other}"


def parse_body(url: str, body: object) -> CompletionBody | ChatBody:
    """Validate the decoded JSON body of a request to `url`.

    Raises:
        InvalidBody: names the field, the value that was found, and the wanted value.
        Unsupported: Ballast knows the URL or the field's value, and does not support it yet.
    """
    kind = _KINDS.get(url)
    if kind is None:
        if later := not_yet(url):
            raise Unsupported(None, f"url: {later}")
        raise InvalidBody("url", f"url: found {url[:100]!r}, expected {CHAT_URL} or {COMPLETIONS_URL}", "invalid_url")
    if not isinstance(body, dict):
        raise InvalidBody(None, f"body: found {describe(body)}, expected a JSON object", "invalid_type")
    if len(body) > MOST_FIELDS:
        raise InvalidBody(None, f"body: found {len(body)} fields, expected at most {MOST_FIELDS}")
    fields = dict(body)
    drop_neutral(url, fields)
    try:
        return kind.model_validate(_without_null(fields, kind.model_fields))
    except ValidationError as error:
        raise translate(error.errors(include_url=False)[0]) from None


_KINDS: dict[str, type[CompletionBody | ChatBody]] = {COMPLETIONS_URL: CompletionBody, CHAT_URL: ChatBody}
