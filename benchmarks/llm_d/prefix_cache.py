"""A prefix cache for the KV blocks of a simulated replica, with reuse and LRU eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_policy.request import Request
from ballast_sim.errors import PolicyDefect
from ballast_sim.replay.kv import SimulatedKv
from ballast_sim.replay.simulated import SimulatedRequest


@dataclass(slots=True)
class _Entry:
    blocks: int
    users: int = 0


@dataclass
class CachedKv(SimulatedKv):
    """Counts the blocks of one replica. Cached blocks are free until a request uses them."""

    _cached: dict[tuple[str, int | None], _Entry] = field(init=False, default_factory=dict)
    """Shared prefixes by ("prefix", key), and the KV of preempted requests by ("own", seq). Entries without users are
    ordered by age, the oldest first."""
    _shared: dict[int, int] = field(init=False, default_factory=dict)
    """By `seq`, the leading blocks of a resident that belong to the cache entry of its prefix key."""

    @property
    def _num_idle(self) -> int:
        return sum(entry.blocks for entry in self._cached.values() if not entry.users)

    def hint(self, request: Request) -> None:
        shared, own = self._hit(request)
        request.num_cached = (shared + own) * self.block_tokens
        is_idle = shared > 0 and not self._cached["prefix", request.prefix_key].users
        request.num_cached_idle = (shared if is_idle else 0) + own

    def admit(self, request: Request) -> None:
        shared, own = self._hit(request)
        if shared:
            entry = self._cached["prefix", request.prefix_key]
            self.num_free -= 0 if entry.users else entry.blocks
            entry.users += 1
        if own:
            del self._cached["own", request.seq]
            self.num_free -= own
        self._shared[request.seq] = shared
        request.num_blocks = shared + own
        request.num_private_blocks = own
        request.num_computed = (shared + own) * self.block_tokens

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Evict the oldest entries of the cache if other blocks are not enough.

        A plan may count a prefix as cached that another request of the step evicts, so the grant finds too few blocks.
        """
        if not self.take(request, num_tokens):
            return False
        missing = self._num_idle - self.num_free
        while missing > 0:
            key, entry = next(found for found in self._cached.items() if not found[1].users)
            taken = min(missing, entry.blocks)
            entry.blocks -= taken
            missing -= taken
            if not entry.blocks:
                del self._cached[key]
        return True

    def publish(self, item: SimulatedRequest) -> None:
        request = item.request
        blocks = item.prefix_tokens // self.block_tokens
        key = "prefix", request.prefix_key
        if self._shared[request.seq] or not blocks or key in self._cached:
            return
        if request.num_computed >= blocks * self.block_tokens:
            self._cached[key] = _Entry(blocks, users=1)
            self._shared[request.seq] = blocks
            request.num_private_blocks -= blocks

    def release(self, request: Request) -> None:
        """Free all blocks of a preempted request. Its content stays cached until the blocks are needed."""
        kept = request.num_computed // self.block_tokens - self._shared[request.seq]
        self._give_up(request)
        if kept > 0:
            self._cached["own", request.seq] = _Entry(kept)

    def free(self, request: Request) -> None:
        self._give_up(request)
        self._cached.pop(("own", request.seq), None)

    def _give_up(self, request: Request) -> None:
        if self._shared.pop(request.seq):
            key = "prefix", request.prefix_key
            entry = self._cached[key]
            entry.users -= 1
            if not entry.users:
                self.num_free += entry.blocks
                self._cached[key] = self._cached.pop(key)  # the youngest
        super().free(request)

    def check(self) -> None:
        private = sum(item.request.num_private_blocks for item in self.items.values())
        shared = sum(entry.blocks for entry in self._cached.values() if entry.users)
        if private + shared + self.num_free != self.num_blocks:
            found = f"{private} private, {shared} shared and {self.num_free} free"
            raise PolicyDefect(f"{found} KV blocks of {self.num_blocks}")
        if self._num_idle > self.num_free:
            raise PolicyDefect(f"{self._num_idle} cached KV blocks, {self.num_free} free")

    def _hit(self, request: Request) -> tuple[int, int]:
        """Return the cached blocks of the shared prefix of a request, and those behind it that only it used."""
        most = (request.num_tokens - 1) // self.block_tokens
        prefix = self.items[request.seq].prefix_tokens // self.block_tokens
        entry = self._cached.get(("prefix", request.prefix_key)) if prefix else None
        shared = entry.blocks if entry and entry.blocks <= most else 0
        left = self._cached.get(("own", request.seq))
        own = min(left.blocks, most - shared) if left and shared == min(prefix, most) else 0
        return shared, own
