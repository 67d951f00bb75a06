"""The bodies of calls in vLLM's API server: the memory that they take, and the inputs of a call to an encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ballast_openai.item_body import MOST_REQUESTS, num_inputs
from ballast_worker.bodies import FREE_BYTES
from ballast_worker.errors import Refused

MOST_BODY_BYTES = 256 * 1024 * 1024
"""Memory for bodies and their objects, besides the free bytes of each body.

vLLM keeps both until the response ends, so the limit is above that of a native worker, which keeps them for a moment.
It is enough for 60 calls with an image of 4 MiB, or 35 with 100,000 token ids, at a time. It is small beside the 4 GiB
that a pod requests if its template names no memory.
"""
OBJECT_BYTES = 64
"""Memory of a small object: an empty list takes 56 bytes, and its place in another list 8."""


def decoded_bytes(body: bytes) -> int:
    """Return about how much memory a body takes with its objects. A body within the free bytes counts as it is."""
    if len(body) <= FREE_BYTES:
        return len(body)
    num_objects = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    return len(body) + OBJECT_BYTES * num_objects


def decoded(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body; none if it is no JSON object, which vLLM refuses."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_inputs(body: bytes) -> None:
    """Refuse a call to an encoder with too many inputs: vLLM makes a task of each before Ballast sees its request.

    Raises:
        Refused: 400 with the number of inputs.
    """
    if body.count(b",") < MOST_REQUESTS:
        return  # the commas between more inputs than that
    number = num_inputs(decoded(body))
    if number > MOST_REQUESTS:
        raise Refused(
            400,
            f"The call has {number} inputs, the limit is {MOST_REQUESTS}. Divide it into several calls.",
            code="too_many_requests",
        )
