"""A request inside the engine: its tokens, its blocks, and the record that the policy reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ballast_engine.batch import Ints
from ballast_engine.detokenizer import Detokenizer
from ballast_engine.kv import Digest, chain_digest, root_digest
from ballast_engine.request import FinishReason, GenerationRequest, Output
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
    last_token: int = -1
    """The newest token; -1 before the first generated one."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    salt: str = ""
    """Of the prefix cache."""
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    """Row of the block tables while resident."""
    digests: list[Digest] = field(default_factory=list)
    """One per full block of tokens, each computed once."""
    num_registered: int = 0
    """Leading blocks whose content can be found, or came from the cache."""
    num_told: int = 0
    """Generated tokens that stood in an output, or came with the request."""
    num_read: int = 0
    """Generated tokens that `text` has seen."""
    settled: str = ""
    """Text that `text` gave out and no output has told yet."""
    is_announced: bool = False
    """An output was told."""
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
        self.tokens[request.num_tokens] = self.last_token = token
        request.num_tokens += 1
        request.num_output += 1

    def read(self) -> None:
        """Let the text see what was generated, but not the token that ended the answer."""
        request = self.request
        upto = request.num_output
        if upto and self.last_token in self.ends and not self.generation.sampling.include_stop:
            upto -= 1
        if upto > self.num_read:
            self.settled += self.text.add(self._generated(self.num_read, upto))
            self.num_read = upto

    def _generated(self, start: int, end: int) -> list[int]:
        """Generated tokens from one index to another; mostly that is the newest alone."""
        request = self.request
        if start + 1 == end == request.num_output:
            return [self.last_token]
        found: list[int] = self.tokens[request.num_prompt + start : request.num_prompt + end].tolist()
        return found

    def find_end(self) -> FinishReason | None:
        """Tell whether the answer is complete, and why; reads the text where a stop string may end it."""
        if self.last_token in self.ends:
            return FinishReason.STOP
        if self.text.has_stop:
            self.read()
            if self.text.is_stopped:
                return FinishReason.STOP
        request = self.request
        return FinishReason.LENGTH if request.num_output >= request.max_output else None

    def take_text(self) -> str:
        """Give out the text that is settled since the last call."""
        text, self.settled = self.settled, ""
        return text

    def tell(self, text: str) -> Output:
        """Write an output with the tokens that none has told yet."""
        request = self.request
        output = Output(
            request_id=self.generation.request_id,
            token_ids=self._generated(self.num_told, request.num_output),
            text=text,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
        )
        if not self.is_announced:
            output.num_cached = request.num_prompt_cached
            self.is_announced = True
        self.num_told = request.num_output
        return output

    def hash_blocks(self, num_tokens: int) -> None:
        """Compute the digests of the full blocks among the first tokens that have none yet."""
        size = self.block_tokens
        digests = self.digests
        for i in range(len(digests), num_tokens // size):
            parent = digests[-1] if digests else root_digest(self.salt)
            digests.append(chain_digest(parent, self.tokens[i * size : (i + 1) * size]))
