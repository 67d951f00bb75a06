"""KV blocks of a simulated replica (`host.Kv`): counts instead of memory, with prefix reuse and LRU eviction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ballast_policy.request import Request
from ballast_sim.errors import PolicyDefect
from ballast_sim.replay.simulated_request import SimulatedRequest


@dataclass(slots=True)
class _Entry:
    blocks: int
    users: int = 0


@dataclass
class SimulatedKv:
    """Counts the blocks of one replica."""

    num_blocks: int
    block_tokens: int
    items: Mapping[int, SimulatedRequest]
    """Every request of the replica, by `seq`."""
    has_prefix_cache: bool = False
    num_free: int = field(init=False)
    """Blocks that no request uses. Cached blocks are among them."""
    _cached: dict[tuple[str, int | None], _Entry] = field(init=False, default_factory=dict)
    """Shared prefixes by ("prefix", key), and the KV of preempted requests by ("own", seq). Entries without users are
    ordered by age, the oldest first."""

    def __post_init__(self) -> None:
        self.num_free = self.num_blocks

    @property
    def _num_idle(self) -> int:
        return sum(entry.blocks for entry in self._cached.values() if not entry.users)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for a number of tokens."""
        return -(-tokens // self.block_tokens)

    def hint(self, request: Request) -> None:
        """Set the number of tokens that the cache holds for a waiting request."""
        if not self.has_prefix_cache:
            return
        shared, own = self._hit(self.items[request.seq])
        request.num_cached = (shared + own) * self.block_tokens
        is_idle = shared > 0 and not self._cached["prefix", request.prefix_key].users
        request.num_cached_idle = (shared if is_idle else 0) + own

    def admit(self, request: Request) -> None:
        """Assign to a waiting request the blocks that the cache holds for it."""
        item = self.items[request.seq]
        shared, own = self._hit(item)
        if shared:
            entry = self._cached["prefix", request.prefix_key]
            self.num_free -= 0 if entry.users else entry.blocks
            entry.users += 1
        if own:
            del self._cached["own", request.seq]
            self.num_free -= own
        item.shared_blocks = shared
        request.num_blocks = shared + own
        request.num_private_blocks = own
        request.num_computed = (shared + own) * self.block_tokens

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate the blocks for computing `num_tokens` more; return False if there are not enough."""
        needed = self.blocks_for(request.num_computed + num_tokens) - request.num_blocks
        if needed > self.num_free:
            return False
        if needed > 0:
            self._take(needed)
            request.num_blocks += needed
            request.num_private_blocks += needed
        return True

    def publish(self, item: SimulatedRequest) -> None:
        """Add the prefix of a request to the cache, if the last step completed it."""
        request = item.request
        blocks = item.prefix_tokens // self.block_tokens
        key = "prefix", request.prefix_key
        if not self.has_prefix_cache or item.shared_blocks or not blocks or key in self._cached:
            return
        if request.num_computed >= blocks * self.block_tokens:
            self._cached[key] = _Entry(blocks, users=1)
            item.shared_blocks = blocks
            request.num_private_blocks -= blocks

    def release(self, request: Request) -> None:
        """Free all blocks of a preempted request. Its content stays cached until the blocks are needed."""
        self.free(self.items[request.seq], is_kept=self.has_prefix_cache)

    def free(self, item: SimulatedRequest, *, is_kept: bool = False) -> None:
        """Free all blocks of a request. Blocks that only this request used stay cached if it `is_kept`."""
        request = item.request
        kept = request.num_computed // self.block_tokens - item.shared_blocks
        self.num_free += request.num_private_blocks
        if item.shared_blocks:
            key = "prefix", request.prefix_key
            entry = self._cached[key]
            entry.users -= 1
            if not entry.users:
                self.num_free += entry.blocks
                self._cached[key] = self._cached.pop(key)  # the youngest
        if not is_kept:
            self._cached.pop(("own", request.seq), None)
        elif kept > 0:
            self._cached["own", request.seq] = _Entry(kept)
        item.shared_blocks = request.num_blocks = request.num_private_blocks = request.num_computed = 0

    def check(self, residents: Iterable[SimulatedRequest]) -> None:
        """Check that every block is counted once (G8); raise PolicyDefect if it is not."""
        private = sum(item.request.num_private_blocks for item in residents)
        shared = sum(entry.blocks for entry in self._cached.values() if entry.users)
        if private + shared + self.num_free != self.num_blocks:
            found = f"{private} private, {shared} shared and {self.num_free} free"
            raise PolicyDefect(f"{found} KV blocks of {self.num_blocks}")
        if self._num_idle > self.num_free:
            raise PolicyDefect(f"{self._num_idle} cached KV blocks, {self.num_free} free")

    def _hit(self, item: SimulatedRequest) -> tuple[int, int]:
        """Return the cached blocks of the shared prefix of a request, and those behind it that only it used."""
        if not self.has_prefix_cache:
            return 0, 0
        request = item.request
        most = (request.num_tokens - 1) // self.block_tokens
        prefix = item.prefix_tokens // self.block_tokens
        entry = self._cached.get(("prefix", request.prefix_key)) if prefix else None
        shared = entry.blocks if entry and entry.blocks <= most else 0
        left = self._cached.get(("own", request.seq))
        own = min(left.blocks, most - shared) if left and shared == min(prefix, most) else 0
        return shared, own

    def _take(self, blocks: int) -> None:
        """Use free blocks, and evict the oldest entries of the cache if all others are used."""
        missing = blocks - (self.num_free - self._num_idle)
        while missing > 0:
            key, entry = next(found for found in self._cached.items() if not found[1].users)
            taken = min(missing, entry.blocks)
            entry.blocks -= taken
            missing -= taken
            if not entry.blocks:
                del self._cached[key]
        self.num_free -= blocks
