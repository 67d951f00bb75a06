"""What structured output asks for: slow parts of a structural tag, and schemas whose objects may be closed.

A structural tag is a JSON text of nested formats, which XGrammar carries out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ballast_openai.chat_limits import MOST_INDENTS
from ballast_vllm.format_trial import MOST_BYTES, MOST_SECONDS, TRIED_STACK_BYTES

SLOW = (
    "This server accepts no grammar, and no repeated group with a repetition, in a structural tag, because each step "
    "of vLLM would wait for it. Send it as structured_outputs.grammar or structured_outputs.regex, without tools."
)
MOST_TEXT = 256 * 1024
"""Characters of a text in a format that XGrammar checks. This many nested groups take less than half of the stack."""
TOO_LONG = f"A text in the format has {{}} characters, expected at most {MOST_TEXT}. Send a smaller one."
MOST_FORM = 1024 * 1024
"""Characters of a schema or tag that XGrammar checks. A chain of references of this length takes half of the stack."""
TOO_BIG = f"The format has {{}} characters, expected at most {MOST_FORM}. Send a smaller one, or fewer tools."
TOO_MANY_LEVELS = (
    f"structured_outputs asks for a schema with more than {MOST_INDENTS} levels of JSON: each value counts with its "
    "level. Make it smaller, or nest it less."
)
TOO_COSTLY = (
    f"The check of the format needs more than {MOST_SECONDS} s of a processor, {MOST_BYTES // 2**20} MiB, or "
    f"{TRIED_STACK_BYTES // 2**20} MiB of stack. Make it smaller: references that lead to further ones cost most."
)
DESCRIBING = ("properties", "$ref", "anyOf", "oneOf", "enum", "const")
"""Keywords of a JSON schema, besides `allOf`, that state which properties an object may have."""
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+{]")


def has_slow_format(tag: str) -> bool:
    """Return whether a structural tag has a grammar, or a regular expression whose repetitions may be nested."""
    try:
        found = json.loads(tag)
    except (ValueError, RecursionError):
        return False  # vLLM refuses it
    return any(_is_slow(part) for part in _objects(found))


def has_form(tag: str) -> bool:
    """Return whether a structural tag has the parts that vLLM reads before XGrammar checks it."""
    try:
        found = json.loads(tag)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    if "structures" not in found:
        return isinstance(found.get("format"), dict)
    parts, triggers = found["structures"], found.get("triggers")
    return (
        isinstance(parts, list)
        and all(isinstance(part, dict) and {"begin", "schema", "end"} <= part.keys() for part in parts)
        and isinstance(triggers, list)
    )


def longest_text(form: str) -> int:
    """Return the number of characters of the longest text in a JSON text, also of a name that is there twice.

    A text that is no JSON has none, because vLLM refuses it.
    """
    try:
        left = [json.loads(form, object_pairs_hook=tuple)]
    except (ValueError, RecursionError):
        return 0
    longest = 0
    while left:
        part = left.pop()
        if isinstance(part, str):
            longest = max(longest, len(part))
        elif isinstance(part, list | tuple):
            left += part
    return longest


def may_close(schema: Any) -> bool:
    """Return whether the objects of a JSON schema keep their meaning without properties that they do not name.

    They do not if several parts of the schema describe one object, or if an object requires a property elsewhere: each
    part would then forbid the properties of the others.
    """
    return not any(_is_combined(part) or _requires_others(part) for part in _objects(schema))


def _is_combined(part: dict[str, Any]) -> bool:
    every = part.get("allOf")
    num_every = len(every) if isinstance(every, list) else 0
    return num_every + sum(name in part for name in DESCRIBING) > 1


def _requires_others(part: dict[str, Any]) -> bool:
    required, named = part.get("required"), part.get("properties", {})
    return isinstance(required, list) and isinstance(named, dict) and any(name not in named for name in required)


def _is_slow(part: dict[str, Any]) -> bool:
    if part.get("type") == "grammar":
        return True
    pattern = part.get("pattern")
    return (
        part.get("type") == "regex"
        and isinstance(pattern, str)
        and _REPEATED_GROUP.search(pattern) is not None
        and len(_REPETITION.findall(pattern)) > 1
    )


def _objects(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects inside a decoded JSON text."""
    left = [found]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part
