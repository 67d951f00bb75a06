"""Parameters of one request that would hold up all others in EngineCore or in the API server, or end EngineCore.

vLLM checks the values of these parameters, and not what they cost. Its V2 model runner, the usual one on GPUs, has
tables of fixed sizes, and raises an exception in the step that would exceed one, which ends EngineCore.
"""

from __future__ import annotations

from typing import Any

MOST_COMPARISONS = 500
"""Comparisons of tokens after each new token, in Python. Each step waits for them: 500 take about 60 us."""
MOST_TOKENS = 1024
"""Tokens with a bias, allowed tokens, and tokens of bad words: the sizes of the tables."""
MOST_STOP_TOKENS = 128
"""Tokens that end an answer, with those of the model."""
MOST_CHARACTERS = 16 * 1024
"""Characters of bad words. vLLM tokenizes them on its event loop. 1,024 tokens are hardly ever longer."""
MOST_CHOICES = 10_000
"""Choices of an answer. The time to check them grows with the square of their number: 60,000 take 3 s, twice."""
MOST_GRAMMAR = 64 * 1024
"""Characters of a grammar. vLLM translates 1 MB in 4 s, in which it stops other threads for up to 0.5 s."""

COMPARISONS = (
    "comparisons of tokens after each new token: the sum of all sizes from min_pattern_size to max_pattern_size, times "
    "min_count - 1. Choose smaller numbers"
)
WORDS = "tokens. Most words count twice, with and without a space in front"


def excess(params: Any) -> tuple[str, str] | None:
    """Return a parameter that costs too much, and the sentence that refuses it; None if there is none.

    vLLM makes tokens of bad words, and adds the stop tokens of the model, after it has read the request. So its final
    parameters have to be checked, too.
    """

    def part(name: str, owner: Any = params) -> Any:
        return getattr(owner, name, None) or ()

    form = part("structured_outputs")
    for name, number, most, unit in (
        ("repetition_detection", _comparisons(part("repetition_detection")), MOST_COMPARISONS, COMPARISONS),
        ("logit_bias", len(part("logit_bias")), MOST_TOKENS, "tokens"),
        ("allowed_token_ids", len(part("allowed_token_ids")), MOST_TOKENS, "tokens"),
        ("stop_token_ids", len(part("stop_token_ids")), MOST_STOP_TOKENS, "tokens"),
        ("stop_token_ids", len(part("all_stop_token_ids")), MOST_STOP_TOKENS, "tokens, with those of the model"),
        ("bad_words", sum(map(len, part("bad_words"))), MOST_CHARACTERS, "characters"),
        ("bad_words", sum(map(len, part("bad_words_token_ids"))), MOST_TOKENS, WORDS),
        ("structured_outputs", len(part("choice", form)), MOST_CHOICES, "choices"),
        ("structured_outputs", len(part("grammar", form)), MOST_GRAMMAR, "characters of a grammar"),
    ):
        if number > most:
            return name, f"{name} asks for more than {most} {unit}."
    return None


def _comparisons(detection: Any) -> int:
    """Return how many tokens vLLM compares at most after each new token."""
    if not detection:
        return 0
    least, most = max(1, detection.min_pattern_size), detection.max_pattern_size
    num_pairs: int = max(0, detection.min_count - 1) * max(0, most - least + 1) * (least + most) // 2
    return num_pairs
