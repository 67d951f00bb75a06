"""A request inside the engine: its tokens, its blocks, and the policy's record of it."""

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
    """One request from submission to its last output. After the inbox, only the engine's thread uses it."""

    generation: GenerationRequest
    request: Request
    text: Detokenizer
    tokens: Ints
    """Prompt and generated tokens: the first `request.num_tokens` entries."""
    block_tokens: int
    last_token: int = -1
    """The newest token; -1 before the first generated one."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    salt: str = ""
    """The salt of the prefix cache."""
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    """Row of the block tables while resident."""
    digests: list[Digest] = field(default_factory=list)
    """The digest of each full block of tokens."""
    num_registered: int = 0
    """Leading blocks that the prefix cache knows."""
    num_reported: int = 0
    """Generated tokens that were in an output, or came with the request."""
    num_read: int = 0
    """Generated tokens that were added to `text`."""
    pending: str = ""
    """Final text that no output has contained yet."""
    is_announced: bool = False
    """Whether there was an output."""
    end: FinishReason | None = None
    """Set if the answer was complete at submission, as a continuation of a finished answer."""

    @property
    def request_id(self) -> str:
        """The caller's id of the request."""
        return self.generation.request_id

    @property
    def generated(self) -> tuple[int, ...]:
        """All tokens generated so far, including those of earlier attempts."""
        request = self.request
        return tuple(self.tokens[request.num_prompt : request.num_tokens].tolist())

    def append(self, token: int) -> None:
        """Append a new token."""
        request = self.request
        if request.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(64, len(self.tokens)), np.int64)])
        self.tokens[request.num_tokens] = self.last_token = token
        request.num_tokens += 1
        request.num_output += 1

    def read(self) -> None:
        """Add new tokens to the text, except the token that ended the answer."""
        request = self.request
        upto = request.num_output
        if upto and self.last_token in self.ends and not self.generation.sampling.include_stop:
            upto -= 1
        if upto > self.num_read:
            self.pending += self.text.add(self._generated(self.num_read, upto))
            self.num_read = upto

    def _generated(self, start: int, end: int) -> list[int]:
        """Return the generated tokens from one index to another; mostly only the newest."""
        request = self.request
        if start + 1 == end == request.num_output:
            return [self.last_token]
        found: list[int] = self.tokens[request.num_prompt + start : request.num_prompt + end].tolist()
        return found

    def find_end(self) -> FinishReason | None:
        """Return why the answer is complete, or None. Read the text if a stop string may end it."""
        if self.last_token in self.ends:
            return FinishReason.STOP
        if self.text.has_stop:
            self.read()
            if self.text.is_stopped:
                return FinishReason.STOP
        request = self.request
        return FinishReason.LENGTH if request.num_output >= request.max_output else None

    def take_text(self) -> str:
        """Return the text that became final since the last call."""
        text, self.pending = self.pending, ""
        return text

    def output(self, text: str) -> Output:
        """Return an output with the tokens since the last output."""
        request = self.request
        output = Output(
            request_id=self.generation.request_id,
            token_ids=self._generated(self.num_reported, request.num_output),
            text=text,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
        )
        if not self.is_announced:
            output.num_cached = request.num_prompt_cached
            self.is_announced = True
        self.num_reported = request.num_output
        return output

    def hash_blocks(self, num_tokens: int) -> None:
        """Compute the missing digests of the full blocks among the first `num_tokens` tokens."""
        size = self.block_tokens
        digests = self.digests
        for i in range(len(digests), num_tokens // size):
            parent = digests[-1] if digests else root_digest(self.salt)
            digests.append(chain_digest(parent, self.tokens[i * size : (i + 1) * size]))
