"""Parameters of one request that would hold up all others in EngineCore or in the API server, or end EngineCore.

vLLM checks the values of these parameters, and not what they cost. Its V2 model runner, the usual one on GPUs, has
tables of fixed sizes, and raises an exception in the step that would exceed one, which ends EngineCore.

A chat template can write a small request as gigabytes of text: see `ballast_openai.chat_limits`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ballast_openai.chat_limits import (
    MOST_INDENTS,
    MOST_MESSAGES,
    MOST_TOKEN,
    MOST_TOOLS,
    TOO_NESTED,
    num_indents,
    wrong_token,
)
from ballast_openai.errors import describe

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


def excess_of_chat(messages: Sequence[Any], options: Mapping[str, Any], tokens: frozenset[str]) -> str | None:
    """Return the sentence that refuses a chat, or None. `tokens` names the special tokens among the options."""
    if len(messages) > MOST_MESSAGES:
        return f"messages: found {len(messages)} messages, expected at most {MOST_MESSAGES}. Send fewer messages."
    tools = options.get("tools")
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        return f"tools: found {len(tools)} tools, expected at most {MOST_TOOLS}. Send fewer tools."
    if (name := wrong_token(options, tokens)) is not None:
        found = f"found {describe(options[name])}, expected at most {MOST_TOKEN} characters"
        return f"chat_template_kwargs.{name}: {found}. Leave it out, because the tokenizer sets it."
    if num_indents([options, messages, list(_arguments(messages))]) > MOST_INDENTS:
        return f"messages, {TOO_NESTED}"
    return None


def _arguments(messages: Sequence[Any]) -> Iterator[object]:
    """Yield the arguments of tool calls as templates get them."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if calls is not None and not isinstance(calls, list):
            calls = message["tool_calls"] = list(calls)  # pydantic's iterator can be read once
        for call in calls or ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            try:
                yield json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):  # vLLM does not pass them on
                continue
