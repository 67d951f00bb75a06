"""The peak of KV that the residents will reach, which decides whether one more request fits.

Sort the residents by their remaining answers: the k-th longest ends after `b_k` more tokens. By then, the k longest
have grown by `b_k` tokens each, and the others have freed their blocks. So the most blocks that will be missing are

    max over k of  k * blocks(b_k) - (private blocks of the residents that end before)

and must be free (Past-Future, arXiv 2507.10150). `Expectation.remaining` estimates the length of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_policy.learning.expectation import Expectation
from ballast_policy.request import Request


@dataclass(slots=True)
class KvPeak:
    expectation: Expectation
    block_tokens: int
    unknown: int
    """Tokens that a request is expected to generate while lengths are unknown."""
    _new: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that only `_most` counts. Their lengths are estimated once that bound is too high."""
    _most: int = 0
    """Blocks that all requests would begin with the longest answers."""
    _ends: list[tuple[int, int]] = field(default_factory=list)
    """For each request the blocks that it will begin, and those that it frees at its end."""

    def add(self, request: Request, num_blocks: int) -> None:
        """Count a request that is admitted into `num_blocks` free blocks."""
        self._new.append((request, num_blocks))
        self._most += self._longest(request)

    def missing(self, request: Request, num_blocks: int, free: int) -> int:
        """Return the blocks that will be missing if a request is admitted. If `free` suffices, it is an upper bound."""
        most = self._most + self._longest(request)
        if most <= free:
            return most
        self._ends += [(self._growth(other), given_back) for other, given_back in self._new]
        self._new.clear()
        self._ends.sort()
        ends = sorted([*self._ends, (self._growth(request), num_blocks)])
        freed = most = 0
        for num_shorter, (blocks, given_back) in enumerate(ends):
            most = max(most, (len(ends) - num_shorter) * blocks - freed)
            freed += given_back
        return most

    def _growth(self, request: Request) -> int:
        """Return the blocks that the expected answer begins."""
        size, num_tokens = self.block_tokens, request.num_tokens
        return -(-(num_tokens + self.expectation.remaining(request, self.unknown)) // size) - -(-num_tokens // size)

    def _longest(self, request: Request) -> int:
        """Return the blocks that the longest answer begins, or one more."""
        return (request.max_output - request.num_output) // self.block_tokens + 1
