"""Bodies of items for an engine that checks them itself, such as vLLM.

Ballast reads the few fields that it needs, and passes the body on unchanged. The engine accepts or refuses the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast_openai.body import (
    CHAT_URL,
    COMPLETIONS_URL,
    COUNT_LIMIT,
    URL_NAMES,
    CompletionBody,
    is_unicode,
    opening_of_chat,
    opening_of_prompt,
    prefix_key,
)
from ballast_openai.errors import InvalidBody, Unsupported, describe

RESPONSES_URL = "/v1/responses"
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
RERANK_URL = "/v1/rerank"
ITEM_URLS = (CHAT_URL, COMPLETIONS_URL, RESPONSES_URL, EMBEDDINGS_URL, SCORE_URL, RERANK_URL)
"""The URLs that an item may have. Which of them a worker serves depends on its engine and its model."""

LIMITS = {
    CHAT_URL: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS_URL: ("max_tokens",),
    RESPONSES_URL: ("max_output_tokens",),
}
"""URL -> the fields that limit generated tokens, the first that is set. The other URLs generate none."""
_PROMPTS = {CHAT_URL: (), COMPLETIONS_URL: ("prompt", "prompt_embeds"), RESPONSES_URL: ()}
"""URL -> the fields that may hold a list of prompts. With another URL, any field may hold a list of inputs."""
_CONVERSATIONS = ("messages", "input")
"""Fields in which a list of objects is one conversation."""
_OPENINGS = ("messages", "instructions", "prompt", "input", "query", "text_1")
"""Fields with the start of the prompt, the first found counts."""
MOST_REQUESTS = 2048
"""Requests of one item, and of one call to an encoder. OpenAI's API takes as many inputs in a call."""


@dataclass(frozen=True, slots=True)
class ItemBody:
    """What Ballast reads of a body."""

    model: str
    stream: bool
    priority: int
    num_output: int | None
    """Limit of all generated tokens; None: the context is the limit."""
    prefix_key: int
    num_requests: int
    """Requests that the engine makes of it: one for each prompt or input, times the choices."""


def parse_item(url: str, body: object, urls: Sequence[str]) -> ItemBody:
    """Read the body of an item for an engine that serves `urls`.

    Raises:
        InvalidBody: names the field, the value that was found, and the expected value.
        Unsupported: the engine does not serve the URL.
    """
    if not urls:
        raise Unsupported(None, f"url: found {url[:100]!r}, and the model of this queue serves no URL of items")
    if url not in urls:
        served = " or ".join((", ".join(urls[:-1]), urls[-1])) if len(urls) > 1 else urls[0]
        if what := URL_NAMES.get(url):
            raise Unsupported(None, f"url: found {url} ({what}), expected {served}, which this queue accepts")
        raise InvalidBody("url", f"url: found {url[:100]!r}, expected {served}", "invalid_url")
    if not isinstance(body, dict):
        raise InvalidBody(None, f"body: found {describe(body)}, expected a JSON object", "invalid_type")
    model = body.get("model")
    if not isinstance(model, str) or not model or not is_unicode(model):
        raise InvalidBody("model", f"model: found {describe(model)}, expected the name of a model", "invalid_type")
    if body.get("background"):
        raise InvalidBody("background", "background: found true, expected false: every item runs in the background")
    priority = body.get("priority") or 0
    if type(priority) is not int:
        raise InvalidBody("priority", f"priority: found {describe(priority)}, expected an integer", "invalid_type")
    num_requests = _num_prompts(url, body) * _num_choices(url, body)
    if num_requests > MOST_REQUESTS:
        message = f"body: found {num_requests} requests (prompts times choices), expected at most {MOST_REQUESTS}"
        raise InvalidBody(None, f"{message}: divide it into several items", "too_many_requests")
    num_output = _num_output(url, body, num_requests)
    return ItemBody(
        model, bool(body.get("stream")), priority, num_output, prefix_key(model, _opening(body)), num_requests
    )


def num_inputs(body: Mapping[str, Any]) -> int:
    """Return the inputs of a body whose fields may all hold a list of them: the longest list counts.

    A list of numbers is one prompt of tokens.
    """
    return max((_length(field, value) for field, value in body.items()), default=1)


def _length(field: str, value: object) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], (int, float)):
        return 1
    return 1 if field in _CONVERSATIONS and isinstance(value[0], dict) else len(value)


def _num_output(url: str, body: Mapping[str, Any], num_requests: int) -> int | None:
    fields = LIMITS.get(url)
    if fields is None:
        return 0
    field = next((field for field in fields if body.get(field) is not None), fields[-1])
    limit = body.get(field)
    if limit is None and url == COMPLETIONS_URL:
        limit = CompletionBody.model_fields["max_tokens"].default
    if type(limit) is not int or not 0 <= limit < COUNT_LIMIT:
        return None  # the engine refuses it
    total = limit * num_requests
    if total >= COUNT_LIMIT:
        found = f"{limit} tokens for each of {num_requests} requests"
        raise InvalidBody(field, f"{field}: found {found}, expected less than {COUNT_LIMIT} in all")
    return total


def _num_choices(url: str, body: Mapping[str, Any]) -> int:
    given = body.get("n")
    if given is None or url not in (CHAT_URL, COMPLETIONS_URL):
        return 1
    if type(given) is not int:  # vLLM would read "16384" as a number
        raise InvalidBody("n", f"n: found {describe(given)}, expected an integer", "invalid_type")
    return max(1, given)


def _num_prompts(url: str, body: Mapping[str, Any]) -> int:
    fields = _PROMPTS.get(url)
    return num_inputs(body if fields is None else {field: body.get(field) for field in fields})


def _opening(body: Mapping[str, Any]) -> str:
    """Return the start of the first prompt. Ballast's own engine has the same for a body that it accepts."""
    found = next((body[field] for field in _OPENINGS if body.get(field)), "")
    is_list = isinstance(found, list) and not isinstance(found[0], int)
    first = found[0] if is_list else found
    if isinstance(first, dict) and "role" in first:
        content = first.get("content")
        return opening_of_chat(
            first["role"], "\n".join(map(_text, content if isinstance(content, list) else [content]))
        )
    return opening_of_prompt(first if isinstance(first, str | list) else json.dumps(first))


def _text(part: object) -> str:
    """Return the text of a part of a message, or the JSON of another part."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part or ""
    return text if isinstance(text, str) else json.dumps(text)
