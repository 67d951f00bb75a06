"""The accounts of one step, KV blocks and predicted time, and the requests whose preemption frees blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import WAITING, Request, computed


@dataclass(slots=True)
class Blocks:
    """The account of KV blocks. `free` never exceeds the blocks that the engine will have."""

    free: int
    block_tokens: int
    promised: dict[Request, int] = field(default_factory=dict)
    """Free blocks that the rest of a prompt will take."""
    num_promised: int = 0
    _shared: int = 0
    """Cached blocks in use that admissions of this step share. A later preemption does not free these blocks."""
    _has_victims: bool = False

    def needed(self, request: Request, num_tokens: int) -> int:
        """Return the free blocks that a request takes until its first `num_tokens` tokens are computed.

        After a preemption in this step, cached blocks count as needed, because the preemption may free them.
        """
        blocks = -(-num_tokens // self.block_tokens)
        if request.phase is not WAITING:
            return max(0, blocks - request.num_blocks)
        return blocks if self._has_victims or not request.num_cached else blocks - self._hits_in_use(request)

    def whole(self, request: Request) -> int:
        """Return the free blocks that a request takes until all of its known tokens are computed."""
        return self.needed(request, request.num_tokens)

    def more(self, request: Request, granted: int, num_tokens: int) -> int:
        """Return the free blocks that `num_tokens` tokens take beyond the `granted` tokens of this step."""
        done = computed(request) + granted
        blocks = self.needed(request, done + num_tokens)
        return blocks - self.needed(request, done) if granted else blocks

    def capacity(self, request: Request, granted: int) -> int:
        """Return the tokens for which a request finds blocks beyond the `granted` tokens of this step."""
        done = computed(request) + granted
        return (max(request.num_blocks, -(-done // self.block_tokens)) + self.free) * self.block_tokens - done

    def missing(self, num_blocks: int, newcomer: Request | None = None) -> int:
        """Return how many blocks preemptions must free so that `num_blocks` are free.

        A preemption may free the cached blocks that `newcomer` counts as used by others.
        """
        shared = 0 if self._has_victims else self._shared + (self._hits_in_use(newcomer) if newcomer else 0)
        return num_blocks - self.free + shared

    def promise(self, request: Request) -> None:
        """Promise blocks to the rest of a prompt; `take` reduces the promise."""
        if request.num_cached and request.phase is WAITING and not self._has_victims:
            self._shared += self._hits_in_use(request)
        whole = self.promised[request] = self.whole(request)
        self.num_promised += whole

    def take(self, request: Request, granted: int, num_tokens: int) -> None:
        """Take the blocks for `num_tokens` tokens beyond the `granted` tokens of this step."""
        taken = self.more(request, granted, num_tokens)
        self.free -= taken
        if request in self.promised:
            self.promised[request] -= taken
            self.num_promised -= taken

    def release(self, request: Request) -> None:
        """Free the blocks of a preempted request that no other request uses."""
        if not self._has_victims:
            self.free -= self._shared
            self._has_victims = True
        self.free += request.num_private_blocks

    def forget(self, gone: Collection[Request]) -> None:
        """Cancel the promises to requests that were parked or preempted."""
        for request in self.promised.keys() & gone:
            self.num_promised -= self.promised.pop(request)

    def _hits_in_use(self, request: Request) -> int:
        return request.num_cached // self.block_tokens - request.num_cached_idle


@dataclass(slots=True)
class StepTime:
    """The account of time. It grows with every grant, and shrinks when decodes are parked or preempted."""

    cost: CostModel
    chunk: int
    """Prefill tokens that the step may still compute."""
    seconds: float
    """Predicted time of the grants so far."""
    fixed_seconds: float
    """The time of the decodes without prefill."""
    num_tokens: int = 0
    num_decodes: int = 0

    def add_decodes(self, num_decodes: int, context: int) -> None:
        """Add decodes, whose contexts sum up to `context`; negative numbers remove them."""
        seconds = self.cost.k3 * num_decodes + self.cost.k4 * context
        self.seconds += seconds + self.cost.experts(num_decodes, self.num_tokens)
        self.fixed_seconds += seconds + self.cost.experts(num_decodes, self.num_decodes)
        self.num_tokens += num_decodes
        self.num_decodes += num_decodes

    def add_prefill(self, num_computed: int, num_tokens: int) -> None:
        self.chunk -= num_tokens
        self.seconds += self.cost.prefill(num_computed, num_tokens, self.num_tokens)
        self.num_tokens += num_tokens


def num_shared(request: Request) -> int:
    return request.num_blocks - request.num_private_blocks


def unrecoverable(request: Request, block_tokens: int) -> int:
    """Return the tokens to compute again after a preemption: those whose KV is in no shared block."""
    return max(0, request.num_computed - num_shared(request) * block_tokens)


def choose_victims(
    candidates: Iterable[Request], num_blocks: int, block_tokens: int, growing: Collection[Request] = ()
) -> list[Request] | None:
    """Return requests whose preemption frees at least `num_blocks`; None if all candidates free fewer.

    Lower priorities go first, then the least unrecoverable work. A chosen request is spared if those chosen after it
    free enough. A request of `growing` needs one of the `num_blocks` itself, so its preemption gains one more.
    """
    gains = {request: request.num_private_blocks + (request in growing) for request in candidates}
    if sum(gains.values()) < num_blocks:
        return None
    usable = (request for request, gain in gains.items() if gain)
    chosen: list[Request] = []
    surplus = -num_blocks
    for request in sorted(usable, key=lambda r: (r.priority, unrecoverable(r, block_tokens), -r.seq)):
        if surplus >= 0:
            break
        chosen.append(request)
        surplus += gains[request]
    for request in reversed(chosen.copy()):
        if gains[request] <= surplus:
            chosen.remove(request)
            surplus -= gains[request]
    return chosen
