"""Read lines in OpenAI's batch format, for files and for the inbox.

Each line is accepted, or rejected with a reason. A rejected line does not delay the rest of its job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any, NoReturn

from ballast_openai.body import Body, is_unicode, parse_body
from ballast_openai.errors import InvalidBody, describe
from ballast_openai.item_body import ItemBody, parse_item
from ballast_queue.functions import Line
from ballast_queue.settings import QueueSettings

CHUNK_LINES = 500
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk ends with the line that reaches either limit. One call stores one chunk."""
MOST_LINE_END = 2
"""Bytes of the longest end of a line. A reader that cuts a line leaves one byte more than the limit and these."""
MAX_CUSTOM_ID = 256
_RESERVED = re.compile(r"line:(lost-)?\d+")
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_PARTS = "custom_id, method, url and body"
_BOM = b"\xef\xbb\xbf"
_NO_STREAM = "a job stores complete results, which `ballast results --follow` prints"
MOST_NESTING = 200
"""Limit of lists and objects inside each other. Decoders have limits of their own, which depend on their callers."""


def bounded_lines(stream: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file. A line longer than `max_bytes` is cut, so that memory use stays small."""
    most = max_bytes + MOST_LINE_END + 1
    while line := stream.readline(most):
        yield line
        while not line.endswith(b"\n") and (line := stream.readline(most)):
            pass


def as_bytes(raw: bytes | str) -> bytes:
    """Return the bytes of a line."""
    return raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw


def content_of(raw: bytes) -> bytes:
    """Return a line without its end, its byte order mark, and the blanks around it."""
    return raw.removeprefix(_BOM).strip()


def read_line(raw: bytes | str, settings: QueueSettings) -> tuple[Line, Body | ItemBody | None]:
    """Validate one line. Return it, or its rejection with the reason, and the body of an accepted line."""
    raw, most = as_bytes(raw), settings.max_line_bytes
    # Before blanks are removed: the reader has cut the line.
    if len(raw) > most and (len(raw.rstrip(b"\r\n")) > most or len(raw) > most + MOST_LINE_END):
        found = f"more than {settings.max_line_bytes} bytes"
        return reject("", wrong("line", found, "no more", code="line_too_long")), None
    line = content_of(raw)
    if not line:
        return Line("b", "", b""), None
    custom_id = ""
    try:
        data = _decode(line)
        if "custom_id" in data:
            custom_id = _check_custom_id(data["custom_id"])
        body = _check(data, settings)
    except InvalidBody as error:
        return reject(custom_id, error), None
    except RecursionError as error:
        return reject(custom_id, _unreadable(error)), None
    return Line("a", custom_id, line, asked_out=body.num_output), body


def reject(custom_id: str, error: InvalidBody) -> Line:
    """Return the line that stores a rejection and its reason."""
    text = json.dumps({"code": error.code, "message": error.message, "param": error.field})
    return Line("r", custom_id, text.encode())


def wrong(field: str, found: str, expected: str, *, code: str) -> InvalidBody:
    """Return the error of a field, or of the whole `line` or `entry`."""
    name = None if field in {"line", "entry"} else field
    return InvalidBody(name, f"{field}: found {found}, expected {expected}", code)


def _refuse_constant(name: str) -> NoReturn:
    raise wrong("line", name, "a JSON number", code="invalid_json")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _unreadable(error: Exception) -> InvalidBody:
    return wrong("line", f"unreadable JSON ({error})", "plain values", code="invalid_json")


def _decode(line: bytes) -> dict[str, Any]:
    try:
        data = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at {error.start}"
        raise wrong("line", found, "UTF-8: convert the file", code="invalid_utf8") from error
    except json.JSONDecodeError as error:
        found = f"no JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        raise wrong("line", found, "one JSON object per line", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error
    if not isinstance(data, dict):
        raise wrong("line", describe(data), f"a JSON object with {_PARTS}", code="invalid_json")
    if line.count(b"{") + line.count(b"[") > MOST_NESTING and _is_deep(data):
        found = f"more than {MOST_NESTING} lists and objects inside each other"
        raise wrong("line", found, "no more", code="invalid_json")
    return data


def _is_deep(data: dict[str, Any]) -> bool:
    """Return whether a value is inside more than `MOST_NESTING` lists and objects."""
    level: list[Any] = [data]
    for _ in range(MOST_NESTING):
        inner = (value for found in level for value in (found.values() if isinstance(found, dict) else found))
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


def _check_custom_id(found: object) -> str:
    shown = problem = ""
    if not isinstance(found, str) or not found:
        shown, problem = describe(found), f"a string of 1 to {MAX_CUSTOM_ID} characters"
    elif len(found) > MAX_CUSTOM_ID:
        shown, problem = f"{len(found)} characters", f"at most {MAX_CUSTOM_ID}"
    elif _RESERVED.fullmatch(found):
        shown, problem = repr(found), "another name: Ballast names lines line:<number> or line:lost-<number>"
    elif not is_unicode(found):
        shown, problem = "a lone surrogate", "text that can be written as UTF-8"
    if not isinstance(found, str) or problem:
        raise wrong("custom_id", shown, problem, code="invalid_custom_id")
    return found


def _check(data: dict[str, Any], settings: QueueSettings) -> Body | ItemBody:
    missing = sorted(_FIELDS - data.keys() - {"method"})
    if missing:
        raise wrong(missing[0], "nothing", f"a value: a line has {_PARTS}", code="missing_required_parameter")
    unknown = sorted(data.keys() - _FIELDS)
    if unknown:
        raise wrong("line", f"an unknown field ({describe(unknown[0])})", _PARTS, code="unknown_parameter")
    if data.get("method", "POST") != "POST":
        raise wrong("method", describe(data["method"]), "POST", code="invalid_method")
    if not isinstance(data["url"], str):
        raise wrong("url", describe(data["url"]), "a string", code="invalid_url")
    url, urls = data["url"], settings.urls
    # Before the body, whose check asks for a stream beside the options.
    if isinstance(data["body"], dict) and (options := data["body"].get("stream_options")) is not None:
        wanted = f"no value, and no stream: {_NO_STREAM}"
        raise wrong("stream_options", describe(options), wanted, code="invalid_value")
    is_native = settings.serves_items and not urls
    body = parse_body(url, data["body"]) if is_native else parse_item(url, data["body"], urls)
    if body.stream:
        raise wrong("stream", "true", f"false: {_NO_STREAM}", code="invalid_value")
    if body.priority:
        wanted = "no value: set the priority of the whole job when you submit it"
        raise wrong("priority", str(body.priority), wanted, code="invalid_value")
    if settings.models and body.model not in settings.models:
        wanted = f"a model that this queue serves: {', '.join(settings.models)}"
        raise wrong("model", repr(body.model[:100]), wanted, code="model_not_found")
    return body


def take(lines: Iterator[bytes]) -> list[bytes]:
    """Take the lines of the next chunk. An empty list is the end."""
    taken: list[bytes] = []
    size = 0
    for raw in lines:
        taken.append(raw)
        size += len(raw)
        if len(taken) >= CHUNK_LINES or size >= CHUNK_BYTES:
            break
    return taken


def read_lines(raws: Iterable[bytes], settings: QueueSettings) -> tuple[list[Line], int]:
    """Validate lines. Return them, and the prefix key of the first accepted line (0: none is accepted)."""
    lines: list[Line] = []
    prefix_key = 0
    for raw in raws:
        line, body = read_line(raw, settings)
        if body is not None and not prefix_key:
            prefix_key = body.prefix_key
        lines.append(line)
    return lines, prefix_key
