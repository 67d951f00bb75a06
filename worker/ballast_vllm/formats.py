"""The parts of a structural tag that XGrammar computes slowly. A structural tag is a JSON text of nested formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

SLOW = (
    "This server accepts no grammar, and no repeated group with a repetition, in a structural tag, because each step "
    "of vLLM would wait for it. Send it as structured_outputs.grammar or structured_outputs.regex, without tools."
)
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+{]")


def has_slow_format(tag: str) -> bool:
    """Return whether a structural tag has a grammar, or a regular expression whose repetitions may be nested."""
    try:
        found = json.loads(tag)
    except (ValueError, RecursionError):
        return False  # vLLM refuses it
    return any(_is_slow(part) for part in _objects(found))


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
