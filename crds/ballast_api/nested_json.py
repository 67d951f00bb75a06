"""Decodes JSON of the API server, which stores up to 10,000 levels of lists and objects inside each other.

Python's decoder fails at some hundreds. Whoever may create a single object could then keep a whole list from being
read.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_LEVELS = 200
"""What is nested deeper may be left out."""

_DECODER = json.JSONDecoder()
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{}]')
"""A text, of which brackets have no meaning, or a bracket."""


def decoded(text: str) -> Any:
    """Decode JSON. If it is nested too deep for Python, the lists and objects of the last kept level are empty."""
    try:
        return json.loads(text)
    except RecursionError:
        return decoded_at(text.lstrip(), 0)[0]


def decoded_at(text: str, at: int) -> tuple[Any, int]:
    """Decode the value that begins at a position, as `decoded` does. Return it, and the position after it."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        shallow, end = _shallow(text, at)
        return json.loads(shallow), end


def _shallow(text: str, at: int) -> tuple[str, int]:
    """Return a list or object without what is nested deeper than `MOST_LEVELS`, and the position after it."""
    level, parts = 0, []
    for found in _TOKEN.finditer(text, at):
        sign = found[0]
        if sign in "[{":
            level += 1
            if level == MOST_LEVELS:
                parts.append(text[at : found.end()])
        elif sign in "]}":
            if level == MOST_LEVELS:
                at = found.start()
            level -= 1
            if level == 0:
                return "".join([*parts, text[at : found.end()]]), found.end()
    raise json.JSONDecodeError("Expecting the end of a list or object", text, len(text))
