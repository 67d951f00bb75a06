"""Read traffic: times and lengths from the common formats of traces.

The columns determine the format: the Azure LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`), the arena
trace of VTC (`req_time_s,client,prompt_len,output_len`), Vidur's length tables (`num_prefill_tokens,num_decode_tokens`,
without times), and Mooncake's JSONL (`timestamp` in milliseconds, `input_length`, `output_length`). Any other CSV or
JSONL needs the columns `arrival_seconds`, `prompt_tokens`, `output_tokens`, and `tenant` if there are tenants.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import StringIO
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ballast_sim.errors import BadInput, BadTrace

_PROMPT = ("prompt_tokens", "context_tokens", "ContextTokens", "prompt_len", "num_prefill_tokens", "input_length")
_OUTPUT = ("output_tokens", "generated_tokens", "GeneratedTokens", "output_len", "num_decode_tokens", "output_length")
_TENANT = ("tenant", "client")
_SECONDS = ("arrival_seconds", "req_time_s")
_MILLISECONDS = ("timestamp",)
_DATES = ("TIMESTAMP",)
_MOST_SECONDS = 1e12


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `seconds` counts from the first request of the trace."""

    seconds: float
    num_prompt: int
    num_output: int
    tenant: str = "default"
    prefix_key: int = 0
    """Requests with the same value share `prefix_tokens` of prompt; 0 is no group."""
    prefix_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt + self.num_output


Trace = Sequence[Arrival]
"""Sorted by `seconds`, never empty."""


def read(path: Path) -> list[Arrival]:
    """Read traffic with times.

    Raises:
        BadTrace: the file has no times, is empty, is not sorted, or has an invalid line.
    """
    arrivals = []
    last = -inf
    for line, arrival in _records(path, needs_times=True):
        if arrival.seconds < last:
            earlier = f"{last - arrival.seconds:g} s before the line above it"
            raise BadTrace(str(path), line, f"the request arrives {earlier}. Sort the file by time")
        last = arrival.seconds
        arrivals.append(arrival)
    return at_zero(arrivals)


def at_zero(trace: Trace) -> list[Arrival]:
    """Return the trace with times that count from its first request."""
    first = trace[0].seconds
    return [replace(arrival, seconds=arrival.seconds - first) for arrival in trace]


def read_lengths(path: Path) -> list[Arrival]:
    """Read lengths for an offline pool as `read` does, from any format. Times are ignored."""
    return [replace(record, seconds=0.0) for _, record in _records(path, needs_times=False)]


def tokens_per_second(trace: Trace) -> float:
    """Return the prompt and answer tokens per second over the span of the trace; raise BadInput if it has none."""
    if len(trace) < 2 or trace[-1].seconds <= 0:
        raise BadInput(f"a rate needs two requests at different times, found {len(trace)} request(s)")
    return sum(arrival.num_tokens for arrival in trace) / trace[-1].seconds


def excerpt(trace: Trace, wanted: float, seconds: float) -> list[Arrival]:
    """Return the first requests that have `wanted * seconds` tokens, with their times scaled to `wanted` per second.

    The first minutes of a trace can be quieter than the whole trace. A trace that is too short is returned whole.
    BadInput is raised if the rate is not above 0, or the trace has no span.
    """
    if not (isfinite(wanted) and wanted > 0):
        raise BadInput(f"the load must be above 0 tokens/s, found {wanted:g}")
    tokens, number = 0, 0
    while number < len(trace) and (tokens < wanted * seconds or number < 2):
        tokens += trace[number].num_tokens
        number += 1
    factor = tokens_per_second(trace[:number]) / wanted
    return [replace(arrival, seconds=arrival.seconds * factor) for arrival in trace[:number]]


def peak_rate(trace: Trace, seconds: float) -> float:
    """Return the most tokens per second over any `seconds` of the trace, or over the whole of a shorter trace."""
    if trace[-1].seconds <= seconds:
        return tokens_per_second(trace)
    times, sums = _times_and_sums(trace)
    return max(sums[bisect_left(times, time + seconds)] - sums[at] for at, time in enumerate(times)) / seconds


def busiest(trace: Trace, tokens: float) -> range:
    """Return the rows, in sequence, that have these tokens in the least time; all rows if they have fewer."""
    times, sums = _times_and_sums(trace)
    ends = ((at, bisect_left(sums, sums[at] + tokens, at + 1)) for at in range(len(trace)))
    found = (range(at, end) for at, end in ends if end <= len(trace) and times[end - 1] > times[at])
    return min(found, key=lambda rows: times[rows[-1]] - times[rows[0]], default=range(len(trace)))


def _times_and_sums(trace: Trace) -> tuple[list[float], list[int]]:
    """Return the times of the requests, and the tokens before each of them and in all."""
    return [one.seconds for one in trace], list(accumulate((one.num_tokens for one in trace), initial=0))


def repeated(trace: Trace, tokens: float) -> Trace:
    """Repeat a trace until it has at least `tokens` tokens. The gap between two repetitions is the mean gap."""
    total = sum(arrival.num_tokens for arrival in trace)
    rounds = int(-(-tokens // total))
    span = trace[-1].seconds * len(trace) / max(len(trace) - 1, 1)
    if rounds < 2:
        return trace
    return [replace(arrival, seconds=arrival.seconds + turn * span) for turn in range(rounds) for arrival in trace]


def _records(path: Path, *, needs_times: bool) -> Iterator[tuple[int, Arrival]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadTrace(str(path), None, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        found = f"is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})"
        raise BadTrace(str(path), None, f"{found}. Unpack a compressed file, and save other text as UTF-8") from error
    if text.lstrip().startswith("["):
        raise BadTrace(str(path), None, "is a JSON array; expected JSONL: one object in each line")
    csv.field_size_limit(max(len(text), 1))  # a column may have whole prompts
    reader = csv.DictReader(StringIO(text, newline=""), skipinitialspace=True)
    is_json = text.lstrip().startswith("{")
    try:
        rows = list(_json_rows(path, text) if is_json else ((reader.line_num, row) for row in reader))
    except csv.Error as error:
        raise BadTrace(str(path), reader.line_num, f"is not CSV ({error})") from error
    if not rows:
        raise BadTrace(str(path), None, "holds no request; a trace needs a header and at least one line")
    time, *lengths, tenant = _columns(path, rows[0][1], needs_times=needs_times)
    for line, row in rows:
        num_prompt, num_output = (_count(path, line, column, row.get(column)) for column in lengths)
        seconds = 0.0 if time is None else _seconds(path, line, time, row.get(time))
        named = row.get(tenant) if tenant else None
        yield line, Arrival(seconds, num_prompt, num_output, "default" if named is None else str(named))


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadTrace(str(path), line, f"is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadTrace(str(path), line, f"found {type(row).__name__}, expected a JSON object")
        yield line, row


def _columns(path: Path, row: Mapping[str, Any], *, needs_times: bool) -> tuple[str | None, str, str, str | None]:
    """Return the columns of time, prompt, output and tenant."""

    def find(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in row), None)

    time = find((*_SECONDS, *_MILLISECONDS, *_DATES))
    prompt, output = find(_PROMPT), find(_OUTPUT)
    missing = [" or ".join((*_SECONDS, *_DATES))] if needs_times and time is None else []
    missing += [" or ".join(names) for names, found in ((_PROMPT, prompt), (_OUTPUT, output)) if found is None]
    if prompt is None or output is None or missing:
        found = ", ".join(str(name) for name in row) or "none"
        raise BadTrace(str(path), None, f"found the columns {found}; missing: {'; '.join(missing)}")
    if needs_times and time in _MILLISECONDS and prompt != "input_length":
        hint = f"Rename it to {_SECONDS[0]} if it has seconds, and to {_DATES[0]} if it has dates"
        raise BadTrace(str(path), None, f"only a Mooncake trace, with input_length, has the column {time}. {hint}")
    return time, prompt, output, find(_TENANT)


def _count(path: Path, line: int, column: str, found: object) -> int:
    try:
        number = float(found)  # type: ignore[arg-type]  # what float() does not take is the error below
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not (1 <= number < inf) or number != int(number):
        raise BadTrace(str(path), line, f"{column} is {found!r}; expected a whole number of tokens, 1 or more")
    return int(number)


def _seconds(path: Path, line: int, column: str, found: object) -> float:
    try:
        if column in _DATES:
            when = datetime.fromisoformat(str(found))
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        seconds = float(found) * (0.001 if column in _MILLISECONDS else 1.0)  # type: ignore[arg-type]  # likewise
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not 0 <= seconds <= _MOST_SECONDS:
        wanted = "a date and time" if column in _DATES else f"a number, 0 or more, up to {_MOST_SECONDS:g} s"
        raise BadTrace(str(path), line, f"{column} is {found!r}; expected {wanted}")
    return seconds
