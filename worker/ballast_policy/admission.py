"""Whether the KV will do for one more: the peak that residents will come to, by what answers usually come to.

Of `n` residents that compute in step, the k-th longest to last ends after `b_k` more tokens. Those that last as long
have grown by `b_k` each by then, and the others have given their blocks back. So the most blocks that are missing
beside those in use is

    max over k of  k * blocks(b_k) - (private blocks of those that end before)

which must be free (Past-Future, arXiv 2507.10150). How long an answer will be is not known: it is taken from the
answers of its class that ended lately and were longer than what it has generated so far.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from ballast_policy.request import Request, RequestClass

QUANTILES = {RequestClass.ONLINE: 0.5, RequestClass.OFFLINE: 0.3}
"""Online must seldom run short. Offline may be preempted, and what that costs is less than slots left empty:
`benchmarks/kv_admission.py`."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What answers come to and what online asks for, as seen lately."""

    outputs: Mapping[RequestClass, tuple[int, ...]] = field(default_factory=dict)
    """Lengths of answers, sorted; a class without any is not known."""
    guard_share: float | None = None
    """Share of the KV that online may ask for at once; None while it is not known."""
    unknown_share: float = 0.0
    """What a request is expected to generate of the most it may, in a class without any."""
    online_rate: float = 0.0
    """Online requests that come in per second."""
    online_until: float = -inf
    """Until when the next online request is expected; no request came before that."""
    online_spread: float = 0.0
    """Standard deviation of the online prompt tokens of one second; of `t` seconds it is `sqrt(t)` times that."""
    online_answer: float = 0.0
    """Tokens of an online answer, on average; 0 while nothing is known."""
    online_short: int = 0
    """Tokens that all but one in a hundred online answers come to; 0 while nothing is known."""

    def remaining(self, request: Request, unknown: int) -> int:
        """Give the tokens that a request will probably still generate; at least `unknown` where nothing is known.

        Who outlived all that ended counts as if it began anew.
        """
        most = request.max_output - request.num_output
        lengths = self.outputs.get(request.request_class)
        if not lengths:
            return min(max(unknown, int(self.unknown_share * most)), most)
        quantile, num_output = QUANTILES[request.request_class], request.num_output
        shorter = bisect_right(lengths, num_output)
        longer = len(lengths) - shorter
        if not longer:
            return min(most, lengths[int(quantile * shorter)])
        return min(most, lengths[shorter + int(quantile * longer)] - num_output)


UNKNOWN = Expectation()


class Peak:
    """Who will hold KV, by how long they last."""

    __slots__ = ("_block_tokens", "_bound", "_ends", "_expectation", "_most", "_new", "_unknown")

    def __init__(self, expectation: Expectation, block_tokens: int, unknown: int) -> None:
        self._expectation = expectation
        self._block_tokens = block_tokens
        self._unknown = unknown
        """Tokens that a request is expected to generate where nothing is known."""
        self._new: list[tuple[Request, int]] = []
        """Who is counted in `_most` alone: how long it will last is asked once that is too much."""
        self._most = 0
        """All that everybody would begin, were each answer as long as it may be."""
        self._ends: list[tuple[int, int]] = []
        """The blocks that each will still begin, and those that come free when it ends."""
        self._bound = 0
        """All that they will begin: more than the peak, which falls short of it by what comes free on the way."""

    def add_all(self, requests: Iterable[Request], promised: Mapping[Request, int]) -> None:
        """Count residents, with the blocks that were promised to them."""
        for request in requests:
            self.add(request, request.num_private_blocks + promised.get(request, 0))

    def add(self, request: Request, num_blocks: int) -> None:
        """Count one that is admitted into so many free blocks."""
        self._new.append((request, num_blocks))
        self._most += self._longest(request)

    def missing(self, request: Request, num_blocks: int, free: int) -> int:
        """Give the most blocks that will be missing beside those in use and promised, were one more admitted.

        It is exact where the answer is more than `free`; else it may be any figure up to that.
        """
        most = self._most + self._longest(request)
        if most <= free:
            return most
        for other, given_back in self._new:
            growth = self._growth(other)
            self._ends.append((growth, given_back))
            self._bound += growth
        self._new.clear()
        growth = self._growth(request)
        if self._bound + growth <= free:
            return self._bound + growth
        self._ends.sort()
        ends = self._ends.copy()
        insort(ends, (growth, num_blocks))
        freed = most = 0
        lasting = len(ends)
        for blocks, given_back in ends:
            here = lasting * blocks - freed
            if here > most:
                most = here
            freed += given_back
            lasting -= 1
        return most

    def _growth(self, request: Request) -> int:
        """Give the blocks behind those of the tokens known now."""
        size, num_tokens = self._block_tokens, request.num_tokens
        return -(-(num_tokens + self._expectation.remaining(request, self._unknown)) // size) - -(-num_tokens // size)

    def _longest(self, request: Request) -> int:
        """Give the blocks behind those of the tokens known now, or one more, were its answer as long as it may be."""
        return (request.max_output - request.num_output) // self._block_tokens + 1
