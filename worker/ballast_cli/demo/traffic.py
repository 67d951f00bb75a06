"""The traffic of the demo: times and lengths from real traces, scaled by stated factors, with random prompts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from ballast_sim.replay.traffic import Arrival

_TRACES = Path(__file__).parent / "traces"
ONLINE_TRACE = _TRACES / "azure_conv_2023.csv"
OFFLINE_TRACE = _TRACES / "arxiv_summarization.csv"


def scale(arrivals: Sequence[Arrival], *, length: float, speed: float = 1.0) -> list[Arrival]:
    """Multiply lengths by `length` (rounded up, at least one token), and divide times by `speed`."""
    return [
        replace(
            arrival,
            seconds=arrival.seconds / speed,
            num_prompt=math.ceil(arrival.num_prompt * length),
            num_output=math.ceil(arrival.num_output * length),
        )
        for arrival in arrivals
    ]


def cut(arrivals: Sequence[Arrival], slices: Sequence[tuple[float, float]]) -> list[Arrival]:
    """Return the arrivals of slices, one slice after the other, with times that count from the start of the first.

    Each slice is a start and a length in seconds. It includes its start, and excludes its end.

    Raises:
        ValueError: the trace ends before a slice.
    """
    joined: list[Arrival] = []
    began, last = 0.0, arrivals[-1].seconds
    for start, seconds in slices:
        end = start + seconds
        if end > last:
            raise ValueError(f"the trace has {last:.0f} s, and the slice is {start:.0f} to {end:.0f} s")
        joined += [replace(a, seconds=began + a.seconds - start) for a in arrivals if start <= a.seconds < end]
        began += seconds
    return joined


@dataclass(frozen=True, slots=True)
class Words:
    """Makes prompts with an exact length in tokens that share no KV block."""

    vocabulary: tuple[str, ...]
    """Words that are one token each, with the space before them."""

    @classmethod
    def of_tokenizer(cls, tokenizer_json: Path) -> Words:
        """Read the whole words of a byte-level BPE tokenizer.

        Raises:
            ValueError: the tokenizer has fewer than 100 whole words.
        """
        vocabulary: dict[str, int] = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
        words = sorted(word.replace("Ġ", " ") for word in vocabulary if re.fullmatch(r"Ġ[a-z]{2,}", word))
        if len(words) < 100:
            raise ValueError(
                f"{tokenizer_json} has {len(words)} whole words, expected at least 100 for distinct prompts"
            )
        return cls(tuple(words))

    def prompt(self, tokens: int, random: Random) -> str:
        """Draw a prompt of random words with a length in tokens."""
        return "".join(random.choices(self.vocabulary, k=tokens))


def completion(arrival: Arrival, words: Words, random: Random, *, model: str, stream: bool) -> dict[str, Any]:
    """Build the body of `/v1/completions` for one arrival, with exactly its output length."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": words.prompt(arrival.num_prompt, random),
        "max_tokens": arrival.num_output,
        "ignore_eos": True,
        "temperature": 0,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
