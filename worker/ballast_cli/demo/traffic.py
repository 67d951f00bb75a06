"""The traffic: times and lengths of real traces, scaled by stated factors; prompts made up, all different. PURE."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_TRACES = Path(__file__).parent / "traces"
ONLINE_TRACE = _TRACES / "azure_conv_2023.csv"
OFFLINE_TRACE = _TRACES / "arxiv_summarization.csv"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float
    """Seconds since the trace (or the slice) began."""
    prompt_tokens: int
    output_tokens: int


def read_online(path: Path = ONLINE_TRACE) -> list[Arrival]:
    """Read the conversation trace: `arrival_seconds, context_tokens, generated_tokens`."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return [
            Arrival(float(row["arrival_seconds"]), int(row["context_tokens"]), int(row["generated_tokens"]))
            for row in rows
        ]


def read_offline(path: Path = OFFLINE_TRACE) -> list[Arrival]:
    """Read the lengths of the summarization data set; offline items have no arrival time."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return [Arrival(0.0, int(row["context_tokens"]), int(row["generated_tokens"])) for row in rows]


def scale(arrivals: Sequence[Arrival], *, length: float, speed: float = 1.0) -> list[Arrival]:
    """Multiply lengths by `length` (rounded up, at least one token) and divide times by `speed`."""
    return [
        Arrival(a.at / speed, max(1, math.ceil(a.prompt_tokens * length)), max(1, math.ceil(a.output_tokens * length)))
        for a in arrivals
    ]


def cut(arrivals: Sequence[Arrival], *, start: float, seconds: float) -> list[Arrival]:
    """Take the arrivals in `[start, start + seconds)`, times counted from `start`.

    Raises:
        ValueError: the trace ends before the slice does.
    """
    if start + seconds > arrivals[-1].at:
        raise ValueError(f"the trace has {arrivals[-1].at:.0f} s, the slice wants {start:.0f} to {start + seconds:.0f}")
    return [
        Arrival(a.at - start, a.prompt_tokens, a.output_tokens) for a in arrivals if start <= a.at < start + seconds
    ]


@dataclass(frozen=True, slots=True)
class Words:
    """Makes prompts whose length in tokens is exact and whose first KV block no other prompt shares."""

    vocabulary: tuple[str, ...]
    """Words that the tokenizer maps to one token each, with the space before them."""

    @classmethod
    def of_tokenizer(cls, tokenizer_json: Path) -> Words:
        """Take the whole words of a byte-level BPE tokenizer."""
        vocabulary: dict[str, int] = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
        words = sorted(word.replace("Ġ", " ") for word in vocabulary if re.fullmatch(r"Ġ[a-z]{2,}", word))
        if len(words) < 100:
            raise ValueError(f"{tokenizer_json} has {len(words)} whole words, expected 100 to make distinct prompts of")
        return cls(tuple(words))

    def prompt(self, tokens: int, random: Random) -> str:
        """Draw a prompt of so many words, every word at random: nothing is shared but by accident."""
        return "".join(random.choices(self.vocabulary, k=tokens))


def completion(arrival: Arrival, words: Words, random: Random, *, model: str, stream: bool) -> dict[str, Any]:
    """Build the body of `/v1/completions` for one arrival, with exactly its output length."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": words.prompt(arrival.prompt_tokens, random),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
