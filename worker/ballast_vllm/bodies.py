"""The bodies of calls in vLLM's API server: the memory that they take, and what vLLM makes of their lists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

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
MOST_REPEATED = 20 * 1024 * 1024
"""Characters and values of a body that vLLM writes once for each entry of a list, with all copies.

That is a query of 10,240 characters for 2,048 documents, or 40 tools of 2 KB for 256 conversations. The tokens of the
copies take some 250 MiB, at most 810 MiB. Of empty lists, the copies take 1.3 GiB.
"""
CONVERSATIONS_URL = "/v1/chat/completions/batch"
"""The path of calls with several conversations. vLLM renders all of them before EngineCore gets a request."""

_ENTRIES = {CONVERSATIONS_URL: "messages", "/generative_scoring": "items", "/v1/systemone": "questions"}
"""Path of a model that generates text -> the field whose entries become a prompt each, with the rest of the body."""
_MEDIA = ("images", "audio", "videos")
"""Fields with media of a body, which vLLM reads once."""
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_OTHER = bytes(set(range(256)) - set(b'",[{'))


def decoded_bytes(body: bytes) -> int:
    """Return about how much memory a body takes with its objects. A body within the free bytes counts as it is."""
    if len(body) <= FREE_BYTES:
        return len(body)
    return len(body) + OBJECT_BYTES * _num_objects(body)


def _num_objects(body: bytes) -> int:
    """Return the number of commas, `[` and `{` outside of strings. The call takes about 10 ms for each MiB."""
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER)
    found = np.frombuffer(marks, np.uint8)
    is_quote = found == ord('"')
    if b"\0" in body:  # no UTF-8: zeros are between the bytes of an escape, so its quote does not show
        return int(np.count_nonzero(~is_quote))
    return int(np.count_nonzero(~(is_quote | np.bitwise_xor.accumulate(is_quote))))


def decoded(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body; none if it is no JSON object, which vLLM refuses."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Search(BaseModel):
    """The fields of a call that vLLM reads as a beam search, by the rules with which vLLM reads them."""

    use_beam_search: bool = False
    n: int | None = None


def beam_search(body: bytes) -> tuple[int, int]:
    """Return the prompts of a beam search, and the beams of each; zeros if the call asks for none."""
    if not _may_search(body):
        return 0, 0
    fields = decoded(body)
    try:
        search = _Search.model_validate(fields)
    except ValidationError:
        return 0, 0  # vLLM refuses it
    if not search.use_beam_search:
        return 0, 0
    return num_inputs({field: fields.get(field) for field in ("prompt", "prompt_embeds")}), search.n or 1


def _may_search(body: bytes) -> bool:
    """Return whether a body may name the field of a beam search. To decode each body would double its cost."""
    is_escaped = rb"\u00" in body and _ESCAPED_LETTER.search(body) is not None
    return b"use_beam_search" in body or is_escaped or b"\0" in body  # zeros: no UTF-8


def check_lists(path: str, body: bytes, *, is_encoder: bool) -> None:
    """Refuse a body whose lists become too many inputs, or too large prompts, before vLLM makes them.

    vLLM makes a task of each input of an encoder before Ballast sees its request. The body is decoded only if its
    commas could be between that many entries.

    Raises:
        Refused: 400 with the number or the size that was found.
    """
    if not is_encoder and path not in _ENTRIES:
        return
    num_entries = 1 + body.count(b",")
    if num_entries <= MOST_REQUESTS and len(body) * num_entries <= MOST_REPEATED:
        return
    fields = decoded(body)
    if is_encoder and (number := num_inputs(fields)) > MOST_REQUESTS:
        raise Refused(
            400,
            f"The call has {number} inputs, the limit is {MOST_REQUESTS}. Divide it into several calls.",
            code="too_many_requests",
        )
    check_repeated_fields(path, fields, is_encoder=is_encoder)


def check_repeated_fields(path: str, fields: Mapping[str, Any], *, is_encoder: bool) -> None:
    """Check in a decoded body what vLLM writes once for each entry of a list.

    In a call to an encoder, any field may hold a list of inputs. Lists of several inputs are pairs, such as those of
    scores, and each of the other fields belongs to every input.
    """
    if path in _ENTRIES:
        entries = fields.get(_ENTRIES[path])
        number = len(entries) if isinstance(entries, list | dict) else 1
        others = [value for name, value in fields.items() if name not in (_ENTRIES[path], *_MEDIA)]
    elif is_encoder:
        number = num_inputs(fields)
        others = [value for name, value in fields.items() if num_inputs({name: value}) == 1]
    else:
        return
    if number > 1 and (size := number * _size(others, has_media=path not in _ENTRIES)) > MOST_REPEATED:
        raise Refused(
            400,
            f"Each of the {number} inputs gets the rest of the body, which makes {size} characters and values, "
            f"expected at most {MOST_REPEATED}. Divide it into several calls.",
            code="too_many_requests",
        )


def _size(value: object, *, has_media: bool) -> int:
    """Return the number of all values inside a value, with the characters of its texts, names and long integers.

    With `has_media`, the base64 of images and other media in parts of messages does not count.
    """
    size, parts = 0, [value]
    while parts:
        part = parts.pop()
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += sum(map(len, part))
            parts += [inner for name, inner in part.items() if not (has_media and _is_media(name, inner))]
            if has_media and isinstance(audio := part.get("input_audio"), dict):
                parts.append({**audio, "data": None})
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int):
            size += max(0, part.bit_length() - 64) // 4  # at most its digits
    return size


def _is_media(name: str, value: object) -> bool:
    """Return whether a field of a part of a message has media. Of audio, only the data does not count: see `_size`."""
    if name == "input_audio":
        return isinstance(value, dict)
    return name.endswith("url") and isinstance(value, str) and value[:5].lower() == "data:"
