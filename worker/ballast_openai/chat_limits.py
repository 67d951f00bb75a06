"""Limits the text that a chat template writes.

A template may repeat parts of a request for each message, for each tool, or for each level of JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST_MESSAGES = 4096
"""Limit of messages in a chat. OpenAI allows 2,048. Some templates read all messages for each of them."""
MOST_TOOLS = 1024
"""Limit of tools in a chat. OpenAI allows 128."""
MOST_INDENTS = 300_000
"""Limit of the levels of all values in a request. A template may write four blanks for each of them.

A hundred tools of 2 KB have some 80,000.
"""
MOST_WRITTEN = 8 * 1024 * 1024
"""Limit of characters of the text: twice the usual body. With vLLM, it is what the context holds if that is more."""
SPECIAL_TOKENS = frozenset(
    {
        *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        *("additional_special_tokens", "extra_special_tokens"),
    }
)
"""Variables of templates that the tokenizer sets, unless a request does. Many templates write one in each message."""
MOST_TOKEN = 64
"""Limit of characters of a special token in a request. Those of models are shorter."""
_CONTAINERS = (dict, list, tuple)

TOO_NESTED = (
    f"tools and chat_template_kwargs: found more than {MOST_INDENTS} levels of JSON values, expected fewer. "
    "Send less JSON, or nest it less."
)


class TooLong(ValueError):
    """The text of a chat is longer than the limit."""


def wrong_token(options: Mapping[str, object], names: frozenset[str] = SPECIAL_TOKENS) -> str | None:
    """Return the name of a special token that is too long, or no text, among the arguments of a template."""
    for name in sorted(options.keys() & names):
        value = options[name]
        if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > MOST_TOKEN):
            return name
    return None


def joined(parts: Iterable[str], most: int = MOST_WRITTEN) -> str:
    """Return the parts as one text, and take no further part when the text is too long.

    Raises:
        TooLong: the text has more than `most` characters.
    """
    found: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > most:
            raise TooLong(
                f"The chat template makes more than {most} characters of the request. "
                "Shorten the messages, the tools, or chat_template_kwargs."
            )
        found.append(part)
    return "".join(found)


def num_indents(value: object, most: int = MOST_INDENTS) -> int:
    """Return the sum of the levels of all values inside a decoded JSON text. Counting ends above `most`.

    It reads one level after the other, without an object for each value, because it runs on the event loop of vLLM.
    """
    total, level = 0, 0
    parts: list[Any] = [(value,)]
    while parts and total <= most:
        total += level * sum(map(len, parts))
        if total <= most:
            values = (part.values() if isinstance(part, dict) else part for part in parts)
            parts = [inner for of_part in values for inner in of_part if isinstance(inner, _CONTAINERS)]
        level += 1
    return total
