"""Fields of the OpenAI and vLLM APIs that Ballast's own engine does not support yet.

The engine accepts a value that changes nothing (`n: 1`, a penalty of 0), and refuses any other value by name. If vLLM
runs the model, it checks the bodies itself, and none of this code runs.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from ballast_openai.errors import Unsupported, describe

_COMMON: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "Ballast generates one completion per request: send the request several times"),
    "presence_penalty": ((0,), "penalties are not supported yet: leave it out"),
    "frequency_penalty": ((0,), "penalties are not supported yet: leave it out"),
    "repetition_penalty": ((1,), "penalties are not supported yet: leave it out"),
    "length_penalty": ((1,), "beam search is not supported: leave it out"),
    "use_beam_search": ((False,), "beam search is not supported: leave it out"),
    "early_stopping": ((False,), "beam search is not supported: leave it out"),
    "logit_bias": (({},), "biasing tokens is not supported yet: leave it out"),
    "logits_processors": (([],), "logits processors are not supported: leave it out"),
    "allowed_token_ids": ((), "restricting tokens is not supported yet: leave it out"),
    "bad_words": (([],), "restricting tokens is not supported yet: leave it out"),
    "min_tokens": ((0,), "a minimum length is not supported yet: use ignore_eos with max_tokens for a fixed length"),
    "prompt_logprobs": ((), "log probabilities are not supported yet: leave it out"),
    "skip_special_tokens": ((True,), "special tokens are never part of the text: leave it out"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of the text: leave it out"),
    "truncate_prompt_tokens": ((), "Ballast does not shorten prompts: send a shorter prompt"),
    "add_special_tokens": ((), "Ballast uses the default of the tokenizer: leave it out"),
    "return_tokens_as_token_ids": ((False,), "the answer is text: leave it out"),
    "return_token_ids": ((False,), "the answer is text: leave it out"),
    "response_format": (({"type": "text"},), "structured output is not supported yet: use {'type': 'text'}"),
    "structured_outputs": ((), "structured output is not supported yet: leave it out"),
    "guided_json": ((), "structured output is not supported yet: leave it out"),
    "guided_regex": ((), "structured output is not supported yet: leave it out"),
    "guided_choice": ((), "structured output is not supported yet: leave it out"),
    "guided_grammar": ((), "structured output is not supported yet: leave it out"),
    "guided_decoding_backend": ((), "structured output is not supported yet: leave it out"),
    "guided_whitespace_pattern": ((), "structured output is not supported yet: leave it out"),
    "request_id": ((), "send the header x-request-id instead"),
    "kv_transfer_params": ((), "KV transfer is not supported: leave it out"),
    "vllm_xargs": ((), "only vLLM knows it: leave it out"),
    "prompt_cache_retention": (
        ("in_memory", "in-memory"),
        "the prefix cache keeps what fits into memory: leave it out",
    ),
    "prompt_cache_options": (({}, {"mode": "implicit"}), "the prefix cache finds shared prefixes itself: leave it out"),
    "moderation": ((), "moderation is not supported: leave it out"),
    "store": ((False,), "Ballast does not store answers: leave it out or send false"),
}

_COMPLETION: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "Ballast generates one completion per request: leave it out"),
    "logprobs": ((), "log probabilities are not supported yet: leave it out"),
    "echo": ((False,), "Ballast does not repeat the prompt in the answer: put it before the text yourself"),
    "suffix": (("",), "insertion is not supported: leave it out"),
    "prompt_embeds": ((), "prompts are text or token ids: leave it out"),
    "max_completion_tokens": ((), "/v1/completions names it max_tokens"),
    "chat_template_kwargs": (({},), "a completion has no chat template: leave it out"),
    "messages": ((), "messages belong to /v1/chat/completions; /v1/completions takes prompt"),
}

_CHAT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), "log probabilities are not supported yet: leave it out"),
    "top_logprobs": ((0,), "log probabilities are not supported yet: leave it out"),
    "tools": (([],), "tool calls are not supported yet: leave it out"),
    "tool_choice": (("none", "auto"), "tool calls are not supported yet: leave it out"),
    "parallel_tool_calls": ((True, False), "tool calls are not supported yet: leave it out"),
    "functions": (([],), "function calls are not supported yet: leave it out"),
    "function_call": (("none", "auto"), "function calls are not supported yet: leave it out"),
    "modalities": ((["text"],), "answers are text: use ['text']"),
    "audio": ((), "answers are text: leave it out"),
    "prediction": ((), "predicted output is not supported: leave it out"),
    "web_search_options": ((), "web search is not supported: leave it out"),
    "reasoning_effort": ((), "reasoning effort is not supported: leave it out"),
    "verbosity": (("medium",), "verbosity is not supported: leave it out"),
    "echo": ((False,), "Ballast does not repeat the prompt in the answer: leave it out"),
    "add_generation_prompt": ((True,), "Ballast always asks for an answer of the assistant: leave it out"),
    "continue_final_message": ((False,), "the last message cannot be continued yet: leave it out"),
    "chat_template": ((), "Ballast uses the model's own chat template: leave it out"),
    "documents": (([],), "retrieval is not supported: put the documents into the messages"),
    "include_reasoning": ((True, False), "reasoning is part of the text: leave it out"),
    "mm_processor_kwargs": ((), "messages are text: leave it out"),
    "prompt": ((), "prompt belongs to /v1/completions; /v1/chat/completions takes messages"),
}

_CHAT_ALONE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    field: (neutral, f"{field} belongs to /v1/chat/completions, and there too {advice}")
    for field, (neutral, advice) in _CHAT.items()
    if field != "prompt"
}

REFUSED_BY_URL: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "/v1/completions": {**_COMMON, **_CHAT_ALONE, **_COMPLETION},
    "/v1/chat/completions": {**_COMMON, **_CHAT},
}
"""URL -> field -> (values that change nothing, in addition to null; what to do instead)."""

IN_VLLM = frozenset(
    {
        *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
        *("bad_words", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "response_format"),
        *("structured_outputs", "tools", "tool_choice", "parallel_tool_calls", "continue_final_message"),
    }
)
"""The fields that vLLM supports, on the URL that they belong to."""
OR_VLLM = ", or use engine.backend: vllm"
"""The end of a refusal of something that vLLM supports."""


def _is_same(found: object, neutral: object) -> bool:
    # 1 == True and 0 == False in Python, never in JSON.
    if isinstance(found, bool) or isinstance(neutral, bool):
        return found is neutral
    return found == neutral


def drop_neutral(url: str, body: MutableMapping[str, Any]) -> None:
    """Remove the refused fields whose values change nothing from `body`.

    Raises:
        Unsupported: names the first field whose value changes something.
    """
    refused = REFUSED_BY_URL[url]
    for field in [name for name in body if name in refused]:
        neutral, advice = refused[field]
        value = body.pop(field)
        if value is not None and not any(_is_same(value, known) for known in neutral):
            other = OR_VLLM if field in IN_VLLM else ""
            raise Unsupported(field, f"{field}: found {describe(value)}; {advice}{other}")
