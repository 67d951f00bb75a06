"""Any bytes are lines: each is accepted, rejected with a reason, or blank, and none costs more than it may."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from ballast_queue.batch_lines import CHUNK_LINES, bounded_lines, read_line, read_lines, take
from ballast_queue.functions import Line
from ballast_queue.settings import QueueSettings

MOST = 512
SETTINGS = QueueSettings(max_line_bytes=MOST, models=("m",))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from(
        [
            "model",
            "prompt",
            "messages",
            "max_tokens",
            "temperature",
            "stop",
            "seed",
            "stream",
            "priority",
            "n",
            "logprobs",
        ]
    ),
    VALUES | st.sampled_from(["m", [{"role": "user", "content": "p"}], -1, 1e308, "x" * 600]),
)
REQUESTS = st.fixed_dictionaries(
    {"body": st.fixed_dictionaries({"model": st.just("m"), "prompt": st.just("p")}) | BODIES | VALUES},
    optional={
        "custom_id": st.text(max_size=300) | VALUES,
        "method": st.just("POST") | VALUES,
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]) | VALUES,
        "extra": VALUES,
    },
)
TEXTS = (REQUESTS | VALUES).map(lambda value: json.dumps(value).encode())
PIECES = st.one_of(
    TEXTS,
    st.binary(max_size=80),
    st.sampled_from([b"\xef\xbb\xbf", b"\r", b"\x00", b"[" * 400, b'{"custom_id":"a"', b"9" * 500, b"x" * 2000]),
)


def check(line: Line) -> None:
    """Assert what the store relies on."""
    match line.kind:
        case "a":
            json.loads(line.text)
            line.custom_id.encode()
            assert 0 < len(line.text) <= MOST
            assert line.asked_out is None or line.asked_out >= 0
        case "r":
            reason = json.loads(line.text)
            assert reason["code"]
            assert reason["message"]
            line.text.decode()
            assert len(line.text) < 8 * MOST, "a rejection quotes only the start of a line"
        case _:
            assert (line.kind, line.text) == ("b", b"")


@given(PIECES | st.tuples(PIECES, PIECES).map(b"".join))
def test_any_bytes_are_a_line_that_is_accepted_rejected_or_blank(raw: bytes):
    line, body = read_line(raw, SETTINGS)

    check(line)
    assert (body is not None) == (line.kind == "a")


@given(st.text(max_size=60, alphabet=st.characters()))
def test_any_text_is_a_line(raw: str):
    check(read_line(raw, SETTINGS)[0])


@given(st.lists(PIECES, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"]))
def test_any_file_is_read_line_by_line_with_little_memory(pieces: list[bytes], end: bytes):
    content = end.join(pieces)
    cut = list(bounded_lines(io.BytesIO(content), MOST))
    rest = iter(cut)
    found = [read_lines(chunk, SETTINGS) for chunk in iter(lambda: take(rest), [])]

    assert all(len(line) <= MOST + 3 for line in cut)
    assert len(cut) == content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    assert sum(len(lines) for lines, _ in found) == len(cut)
    for lines, prefix_key in found:
        assert 0 < len(lines) <= CHUNK_LINES
        assert bool(prefix_key) <= any(line.kind == "a" for line in lines)
        for line in lines:
            check(line)
