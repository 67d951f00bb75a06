"""A request inside the engine: its tokens, its blocks, and the record that the policy reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ballast_engine.batch import Ints
from ballast_engine.detokenizer import Detokenizer
from ballast_engine.kv import Digest, chain_digest, root_digest
from ballast_engine.request import FinishReason, GenerationRequest
from ballast_policy.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from submission to its last output. Only the engine's thread touches it once it is taken in."""

    generation: GenerationRequest
    request: Request
    text: Detokenizer
    tokens: Ints
    """Prompt and generated tokens; the first `request.num_tokens` count."""
    block_tokens: int
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    """Row of the block tables while resident."""
    digests: list[Digest] = field(default_factory=list)
    """One per full block of tokens, each computed once."""
    num_registered: int = 0
    """Leading blocks whose content can be found, or came from the cache."""
    most_computed: int = 0
    """Furthest `num_computed` ever: what lies below is computed again."""
    num_cached: int | None = None
    """Prompt tokens that the prefix cache gave at the first admission; None before."""
    num_text: int = 0
    """Tokens that the text has seen."""
    is_announced: bool = False
    """`num_cached` stood in an output."""
    end: FinishReason | None = None
    """Set when the answer was complete before it began (a continuation of a finished one)."""

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.generation.request_id

    @property
    def generated(self) -> tuple[int, ...]:
        """Everything generated so far, by earlier attempts too."""
        request = self.request
        return tuple(self.tokens[request.num_prompt : request.num_tokens].tolist())

    def append(self, token: int) -> None:
        """Add the token that was drawn."""
        request = self.request
        if request.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(64, len(self.tokens)), np.int64)])
        self.tokens[request.num_tokens] = token
        request.num_tokens += 1
        request.num_output += 1

    def hash_blocks(self, num_tokens: int) -> None:
        """Compute the digests of the full blocks among the first tokens that have none yet."""
        size = self.block_tokens
        digests = self.digests
        for i in range(len(digests), num_tokens // size):
            parent = digests[-1] if digests else root_digest(self.generation.cache_salt)
            digests.append(chain_digest(parent, self.tokens[i * size : (i + 1) * size]))
