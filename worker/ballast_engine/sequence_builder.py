"""Build the engine's record of a request: check it, and compute its tokens, block digests and place in the order."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

import numpy as np

from ballast_engine.batch import Ints
from ballast_engine.detokenizer import Detokenizer
from ballast_engine.errors import InvalidRequest
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.sequence import Sequence
from ballast_engine.token_bytes import TokenBytes
from ballast_policy.request import Request
from ballast_policy.snapshot import PolicyConfig


class Vocabulary(Protocol):
    """The part of a tokenizer that the engine needs."""

    @property
    def token_bytes(self) -> TokenBytes: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class SequenceBuilder:
    """Turn requests into sequences, on the callers' threads."""

    vocabulary: Vocabulary
    vocab_size: int
    max_tokens: int
    """The largest number of tokens of prompt and answer together."""
    block_tokens: int
    has_prefix_cache: bool
    isolates_tenants: bool
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: count(1))

    def _sequence(self, generation: GenerationRequest, request: Request, tokens: Ints) -> Sequence:
        sampling, prompt = generation.sampling, generation.prompt
        token_bytes = self.vocabulary.token_bytes
        return Sequence(
            generation=generation,
            request=request,
            text=Detokenizer(token_bytes, prompt=prompt, stop=sampling.stop, keep_stop=sampling.include_stop),
            tokens=tokens,
            block_tokens=self.block_tokens,
            ends=self._ends(sampling),
            salt=f"{generation.tenant}\0{generation.cache_salt}" if self.isolates_tenants else generation.cache_salt,
        )

    def make(self, generation: GenerationRequest, policy: PolicyConfig, now: float) -> Sequence:
        """Check a request and return its sequence.

        Raises:
            InvalidRequest: the engine can never serve the request. The message is for the user.
        """
        _check_sampling(generation.sampling)
        num_prompt = len(generation.prompt)
        if not num_prompt:
            raise InvalidRequest("The prompt has no tokens: send at least one.")
        if num_prompt >= self.max_tokens:
            raise InvalidRequest(
                f"The prompt has {num_prompt} tokens, but this model serves {self.max_tokens} tokens of prompt and "
                f"answer together: shorten the prompt to {self.max_tokens - 1} tokens or fewer."
            )
        max_output = min(generation.sampling.max_tokens, self.max_tokens - num_prompt)
        generated = generation.generated[:max_output]
        tokens = np.array([*generation.prompt, *generated], np.int64)
        self._check_tokens(tokens)
        num_tokens, seq = len(tokens), next(self._numbers)
        share = policy.tenants.get(generation.tenant)
        request = Request(
            seq=seq,
            request_class=generation.request_class,
            arrival=now if generation.arrival is None else generation.arrival,
            num_prompt=num_prompt,
            max_output=max_output,
            tenant=generation.tenant,
            priority=generation.priority if share is None else min(generation.priority, share.max_priority),
            slack=generation.slack,
            prefix_key=generation.prefix_key,
            num_tokens=num_tokens,
            num_output=len(generated),
            most_computed=max(generation.num_computed, num_tokens - 1 if generated else 0),
        )
        policy.set_slo(request, generation.ttft_seconds, generation.tpot_seconds)
        sequence = self._sequence(generation, request, tokens)
        if generated:
            sequence.last_token, sequence.num_reported = generated[-1], len(generated)
            sequence.end = sequence.find_end()
        if self.has_prefix_cache:
            sequence.hash_blocks(num_tokens)
        return sequence

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        ends = frozenset() if sampling.ignore_eos else self.vocabulary.eos_ids
        return ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends

    def _check_tokens(self, tokens: Ints) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(wrong):
            raise InvalidRequest(
                f"Token id {wrong[0]} is outside this model's vocabulary of {self.vocab_size} tokens: encode the "
                "prompt with this model's tokenizer."
            )


def _check_sampling(sampling: SamplingParams) -> None:
    checks: Items[tuple[bool, str, object, str]] = (
        (sampling.max_tokens >= 1, "max_tokens", sampling.max_tokens, "1 or more"),
        (0 <= sampling.temperature < inf, "temperature", sampling.temperature, "0 or more"),
        (0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0, at most 1"),
        (0 <= sampling.top_k < 2**31, "top_k", sampling.top_k, "0 (every token) to 2147483647"),
        (0 <= sampling.min_p <= 1, "min_p", sampling.min_p, "from 0 to 1"),
        (all(sampling.stop), "stop", "", "strings with at least one character"),
    )
    for is_right, name, found, wanted in checks:
        if not is_right:
            raise InvalidRequest(f"{name} is {found!r}; expected {wanted}.")
