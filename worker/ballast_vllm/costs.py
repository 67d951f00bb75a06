"""Parameters of one call that would hold up all others in EngineCore or in the API server, or end EngineCore.

vLLM checks the values of these parameters, and not what they cost. Its V2 model runner, the usual one on GPUs, has
tables of fixed sizes, and raises an exception in the step that would exceed one, which ends EngineCore. The V1 model
runner has no tables, but works off long lists in each step.

`Asked` adds up what the requests of one call ask for. vLLM builds the answer of a call at once, on its event loop.

A chat template can write a small request as gigabytes of text: see `ballast_openai.chat_limits`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
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
from ballast_openai.item_body import LIMITS
from ballast_vllm.bodies import CONVERSATIONS_URL

SPEECH_URLS = "/v1/audio/"
"""How the paths of transcriptions and translations begin."""
_LIMITS = {**LIMITS, SPEECH_URLS: ("max_completion_tokens",)}
"""How a path begins -> the fields that limit the tokens of an answer. For others, it is `max_tokens`."""
MOST_PATTERN = 512
"""Tokens of the longest repeated pattern. For each size of a pattern, vLLM calls a function after each new token."""
MOST_COMPARISONS = 6000
"""Comparisons of tokens after each new token, in Python. Each step waits for them: 0.5 ms, and at most 1 ms."""
MOST_TOKENS = 1024
"""Tokens with a bias, allowed tokens, and tokens that end an answer: the sizes of the tables."""
MOST_STOP_TOKENS = 128
"""Tokens that end an answer, with those of the model, in the table of requests with `min_tokens`."""
MOST_ALLOWED = 256 * 1024
"""Allowed tokens where there is no table: about as many as a large vocabulary has."""
BAD_WORD_TOKENS = "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
"""vLLM's variable for the tokens of bad words: the size of the table, and by default `MOST_TOKENS`."""
MOST_CHARACTERS = 16 * 1024
"""Characters of bad words. vLLM tokenizes them on its event loop. 1,024 tokens are hardly ever longer."""
MOST_CHOICES = 10_000
"""Choices of an answer. The time to check them grows with the square of their number: 60,000 take 3 s, twice."""
MOST_GRAMMAR = 64 * 1024
"""Characters of a grammar. vLLM translates 1 MB in 4 s, in which it stops other threads for up to 0.5 s."""
MOST_LOGPROBS = 640 * 1024
"""Logprobs of generated tokens in an answer that is not streamed. Each takes 14 us and 1 KiB, so the most take 9 s.

Evaluations echo 128 prompts of 2,048 tokens with `logprobs: 1`, which is a little above 512 Ki.
"""
MOST_PROMPT_LOGPROBS = 1024 * 1024
"""Logprobs of prompts in an answer. Each takes 2 us and 300 bytes."""
MOST_COPIED = 64 * 1024 * 1024
"""Bytes of prompts and parameters that vLLM sends EngineCore again and again for one call. There, they take more."""
MOST_SEARCHED = 256 * 1024 * 1024
"""Bytes of the tokens that a beam search keeps. It may keep each beam of each step, with the whole prompt."""

ABOVE_LOGPROBS = f"more than {MOST_LOGPROBS} logprobs of generated or echoed tokens."
EACH = "Each token of each choice has one more than the call asks for."
"""What the sentences about logprobs add to their number."""
COMPARISONS = (
    "comparisons of tokens after each new token. Each size from min_pattern_size to max_pattern_size counts as itself, "
    "at most as min_pattern_size * min_count, and the sum is multiplied by min_count - 1. Choose a smaller "
    "min_pattern_size first"
)
WORDS = "tokens. Most words count twice, with and without a space in front"


def excess(params: Any, *, has_tables: bool) -> tuple[str, str] | None:
    """Return a parameter that costs too much, and the sentence that refuses it; None if there is none.

    `has_tables` is whether vLLM runs its V2 model runner. vLLM makes tokens of bad words, and adds the stop tokens of
    the model, after it has read the request. So its final parameters have to be checked, too.
    """

    def part(name: str, owner: Any = params) -> Any:
        return getattr(owner, name, None) or ()

    form, detection = part("structured_outputs"), part("repetition_detection")
    most_allowed = MOST_TOKENS if has_tables else MOST_ALLOWED
    most_stop = MOST_STOP_TOKENS if has_tables and part("min_tokens") else MOST_TOKENS
    most_bad = int(os.environ.get(BAD_WORD_TOKENS, MOST_TOKENS))
    for name, number, most, unit in (
        ("repetition_detection", part("max_pattern_size", detection) or 0, MOST_PATTERN, "tokens of a pattern"),
        ("repetition_detection", _comparisons(detection), MOST_COMPARISONS, COMPARISONS),
        ("logit_bias", len(part("logit_bias")), MOST_TOKENS, "tokens"),
        ("allowed_token_ids", len(part("allowed_token_ids")), most_allowed, "tokens"),
        ("stop_token_ids", len(part("stop_token_ids")), most_stop, "tokens"),
        ("stop_token_ids", len(part("all_stop_token_ids")), most_stop, "tokens, with those of the model"),
        ("bad_words", sum(map(len, part("bad_words"))), MOST_CHARACTERS, "characters"),
        ("bad_words", sum(map(len, part("bad_words_token_ids"))), most_bad, WORDS),
        ("structured_outputs", len(part("choice", form)), MOST_CHOICES, "choices"),
        ("structured_outputs", len(part("grammar", form)), MOST_GRAMMAR, "characters of a grammar"),
    ):
        if number > most:
            return name, f"{name} asks for more than {most} {unit}."
    return None


def _comparisons(detection: Any) -> int:
    """Return about how many tokens vLLM compares at most after each new token.

    vLLM ends a request at the first match. So if a text repeats itself in less than the least size, fewer tokens than
    the least size times the count match, and only those are compared for each larger size.
    """
    if not detection:
        return 0
    least, most, count = max(1, detection.min_pattern_size), detection.max_pattern_size, detection.min_count
    if most < least or count < 2:  # vLLM looks for nothing
        return 0
    longest = least * count
    last = min(most, longest)
    num_pairs: int = (count - 1) * ((last - least + 1) * (least + last) // 2 + (most - last) * longest)
    return num_pairs


@dataclass(slots=True)
class Asked:
    """What the requests of one call ask for together: logprobs, and bytes of copies and of beam searches."""

    num_requests: int = 0
    num_logprobs: int = 0
    """Those of echoed tokens, and of the tokens that were generated so far and are not streamed."""
    num_expected: int = 0
    """Those that the client allows its requests to generate, as far as they were known before the first output."""
    num_prompt_logprobs: int = 0
    num_copied: int = 0
    num_searched: int = 0
    hides_logprobs: bool = False
    """Whether its answer has none. vLLM itself uses those of a transcription."""
    limit: str = "max_tokens"
    """The field that limits the tokens of its answer."""
    can_stream: bool = True

    @classmethod
    def of_call(cls, path: str, *, is_item: bool = False) -> Asked:
        """Return what a call of this path asks for before vLLM has read its body."""
        return cls(
            hides_logprobs=path.startswith(SPEECH_URLS),
            limit=next((fields[0] for begin, fields in _LIMITS.items() if path.startswith(begin)), "max_tokens"),
            can_stream=not is_item and path != CONVERSATIONS_URL,
        )

    def kept_per_token(self, params: Any, vocabulary: int) -> int:
        """Return the logprobs of each generated token of a choice that vLLM keeps until the answer ends.

        A stream has them in small parts, and the steps of a beam search are no answers.
        """
        is_kept = getattr(getattr(params, "output_kind", None), "name", "") == "FINAL_ONLY"
        return self._per_token(params, vocabulary) if is_kept else 0

    def _per_token(self, params: Any, vocabulary: int) -> int:
        sampled = getattr(params, "num_logprobs", None)
        if sampled is None or self.hides_logprobs:
            return 0
        return 1 + (vocabulary if sampled < 0 else sampled)

    def excess(
        self, params: Any, num_prompt: int, *, context: int, vocabulary: int, is_begun: bool = False
    ) -> tuple[str, str] | None:
        """Count the logprobs of a further request. Return a parameter that asks for too many, and the refusal.

        Without a limit of the client, vLLM sets the rest of the context, and few answers are that long. So only lower
        limits count here, and only before the call has an output (`is_begun`): `excess_of_generated` counts the tokens.
        """
        of_prompt = getattr(params, "prompt_logprobs", None)
        is_first = not self.num_logprobs + self.num_expected
        if per_token := self._per_token(params, vocabulary) * getattr(params, "n", 1):
            num_echoed = 0 if of_prompt is None else num_prompt  # `echo` has the logprobs of the prompt twice
            self.num_logprobs += per_token * num_echoed
            most = params.max_tokens
            if self.kept_per_token(params, vocabulary) and most is not None and most < context - num_prompt:
                self.num_expected += per_token * most
            if self.num_logprobs + (0 if is_begun else self.num_expected) > MOST_LOGPROBS:
                fitting = MOST_LOGPROBS // per_token - num_echoed
                first = f"Set {self.limit} to at most {fitting}" if is_first and fitting > 0 else "Divide the call"
                remedy = self._remedy(first, is_streamable=self.num_logprobs <= MOST_LOGPROBS)
                return "logprobs", f"The answer may have {ABOVE_LOGPROBS} {EACH} {remedy}"
        if of_prompt is not None:
            self.num_prompt_logprobs += params.n * num_prompt * (1 + (vocabulary if of_prompt < 0 else of_prompt))
            if self.num_prompt_logprobs > MOST_PROMPT_LOGPROBS:
                found = f"The answer has more than {MOST_PROMPT_LOGPROBS} logprobs of prompt tokens. {EACH}"
                return "prompt_logprobs", f"{found} Ask for fewer logprobs or choices, or divide the call."
        return None

    def excess_of_generated(self, num_logprobs: int) -> str | None:
        """Count the logprobs of generated tokens that vLLM keeps. Return the sentence that ends the call, or None."""
        self.num_logprobs += num_logprobs
        if self.num_logprobs <= MOST_LOGPROBS:
            return None
        remedy = self._remedy(f"Set {self.limit} to a lower number, divide the call", is_streamable=True)
        return f"The answer has {ABOVE_LOGPROBS} {EACH} {remedy}"

    def _remedy(self, first: str, *, is_streamable: bool) -> str:
        if self.can_stream and is_streamable:
            return f"{first}, ask for fewer logprobs or choices, or stream the answer."
        return f"{first}, or ask for fewer logprobs or choices."

    def excess_of_copies(self, num_bytes: int) -> str | None:
        """Count the copies of a further request. Return the sentence that refuses it, or None."""
        self.num_copied += num_bytes
        if self.num_copied <= MOST_COPIED:
            return None
        return (
            f"The prompts and choices (n) of the call need more than {MOST_COPIED} bytes of copies of its prompts and "
            "parameters. Divide it into several calls."
        )

    def excess_of_search(self, num_beams: int, max_tokens: int, num_prompt: int) -> str | None:
        """Count the memory of a further beam search. Return the sentence that refuses it, or None."""
        is_first, per_step = not self.num_searched, 8 * num_beams
        # A beam is a list of its tokens and one of their logprobs, which grow to this length: both take it on average.
        self.num_searched += per_step * max_tokens * (num_prompt + max_tokens)
        if self.num_searched <= MOST_SEARCHED:
            return None
        fitting = (isqrt(num_prompt**2 + 4 * MOST_SEARCHED // per_step) - num_prompt) // 2
        remedy = f"Set {self.limit} to a lower number, divide the call"
        if is_first and fitting > 0:
            remedy = f"Set {self.limit} to at most {fitting}"
        return (
            f"The beam searches of the call may keep more than {MOST_SEARCHED // 2**20} MiB of tokens: {num_beams} "
            f"beams (n) for each of {max_tokens} tokens, each with the {num_prompt} tokens of the prompt. {remedy}, or "
            "ask for fewer beams."
        )


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
