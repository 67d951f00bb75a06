"""Read lines in OpenAI's batch format, for files and for the inbox.

Each line is accepted, or rejected with a reason. A rejected line does not delay the rest of its job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any, NoReturn

from ballast_openai.body import Body, parse_body
from ballast_openai.errors import InvalidBody, describe
from ballast_queue.functions import Line
from ballast_queue.settings import QueueSettings

CHUNK_LINES = 500
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk ends with the line that reaches either limit. One call stores one chunk."""
Chunk = tuple[list[Line], int]
"""Lines, and the prefix key of the first accepted line (0: none is accepted)."""
MAX_CUSTOM_ID = 256
_RESERVED = re.compile(r"line:\d+")
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_BOM = b"\xef\xbb\xbf"


def bounded_lines(stream: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file. A line longer than `max_bytes` is cut, so that memory use stays small."""
    while line := stream.readline(max_bytes + 2):
        yield line
        while not line.endswith(b"\n") and (line := stream.readline(max_bytes + 2)):
            pass


def read_line(raw: bytes | str, settings: QueueSettings) -> tuple[Line, Body | None]:
    """Validate one line. Return it, or its rejection with the reason, and the body of an accepted line."""
    line = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
    line = line.removeprefix(_BOM).strip()
    if not line:
        return Line("b", "", b""), None
    custom_id = ""
    try:
        data = _decode(line, settings.max_line_bytes)
        if "custom_id" in data:
            custom_id = _check_custom_id(data["custom_id"])
        body = _check(data, settings)
    except InvalidBody as error:
        return reject(custom_id, error), None
    return Line("a", custom_id, line, asked_out=body.num_output), body


def reject(custom_id: str, error: InvalidBody) -> Line:
    """Return the line that stores a rejection and its reason."""
    text = json.dumps({"code": error.code, "message": error.message, "param": error.field})
    return Line("r", custom_id, text.encode())


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidBody(None, f"line: found {name}, wanted a JSON number", "invalid_json")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(line: bytes, max_bytes: int) -> dict[str, Any]:
    if len(line) > max_bytes:
        raise InvalidBody(None, f"line: found more than {max_bytes} bytes, wanted no more", "line_too_long")
    try:
        data = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidBody(
            None,
            f"line: found byte 0x{line[error.start]:02x} at {error.start}, wanted UTF-8: convert the file",
            "invalid_utf8",
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidBody(
            None,
            f"line: found no JSON ({error.msg} at column {error.colno}), wanted one JSON object per line",
            "invalid_json",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidBody(
            None, f"line: found JSON that cannot be read ({error}), wanted plain values", "invalid_json"
        ) from error
    if not isinstance(data, dict):
        raise InvalidBody(
            None,
            f"line: found {describe(data)}, wanted a JSON object with custom_id, method, url and body",
            "invalid_json",
        )
    return data


def _check_custom_id(found: object) -> str:
    if not isinstance(found, str) or not found:
        raise InvalidBody(
            "custom_id",
            f"custom_id: found {describe(found)}, wanted a string of 1 to {MAX_CUSTOM_ID} characters",
            "invalid_custom_id",
        )
    if len(found) > MAX_CUSTOM_ID:
        raise InvalidBody(
            "custom_id",
            f"custom_id: found {len(found)} characters, wanted at most {MAX_CUSTOM_ID}",
            "invalid_custom_id",
        )
    if _RESERVED.fullmatch(found):
        raise InvalidBody(
            "custom_id",
            f"custom_id: found {found!r}, wanted another name: Ballast uses line:<number> for lines without a name",
            "invalid_custom_id",
        )
    try:
        found.encode()
    except UnicodeEncodeError:
        raise InvalidBody(
            "custom_id",
            "custom_id: found a lone surrogate, wanted text that can be written as UTF-8",
            "invalid_custom_id",
        ) from None
    return found


def _check(data: dict[str, Any], settings: QueueSettings) -> Body:
    missing = sorted(_FIELDS - data.keys() - {"method"})
    if missing:
        raise InvalidBody(
            missing[0],
            f"{missing[0]}: found nothing, wanted a value: a line has custom_id, method, url and body",
            "missing_required_parameter",
        )
    unknown = sorted(data.keys() - _FIELDS)
    if unknown:
        name = describe(unknown[0])
        raise InvalidBody(
            None, f"line: found an unknown field ({name}), wanted custom_id, method, url and body", "unknown_parameter"
        )
    if data.get("method", "POST") != "POST":
        raise InvalidBody("method", f"method: found {describe(data['method'])}, wanted POST", "invalid_method")
    if not isinstance(data["url"], str):
        raise InvalidBody("url", f"url: found {describe(data['url'])}, wanted a string", "invalid_url")
    body = parse_body(data["url"], data["body"])
    if body.stream:
        raise InvalidBody(
            "stream",
            "stream: found true, wanted false: a job stores complete results, which `ballast results --follow` prints",
        )
    if body.priority:
        raise InvalidBody(
            "priority",
            f"priority: found {body.priority}, wanted no value: set the priority of the whole job when you submit it",
        )
    if settings.models and body.model not in settings.models:
        raise InvalidBody(
            "model",
            f"model: found {body.model[:100]!r}, wanted a model that this queue serves: {', '.join(settings.models)}",
            "model_not_found",
        )
    return body


def chunks(lines: Iterable[bytes | str], settings: QueueSettings) -> Iterator[Chunk]:
    """Validate lines and group them into chunks."""
    chunk: list[Line] = []
    size = prefix_key = 0
    for raw in lines:
        line, body = read_line(raw, settings)
        if body is not None and not prefix_key:
            prefix_key = body.prefix_key
        chunk.append(line)
        size += len(line.text)
        if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
            yield chunk, prefix_key
            chunk, size, prefix_key = [], 0, 0
    if chunk:
        yield chunk, prefix_key
