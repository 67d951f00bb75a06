"""The KV of the fake engine: the block pool of the real one, with names in place of digests of tokens."""

from __future__ import annotations

from engine_integrity import check_pool
from workloads import Arrival

from ballast_engine.kv import BlockPool
from ballast_policy.request import Request


class PagedKv:
    """Blocks with reference counts and a prefix cache, as the policy host asks for them."""

    def __init__(self, num_blocks: int, block_tokens: int, arrivals: dict[Request, Arrival]) -> None:
        self.pool, self.arrivals = BlockPool(num_blocks, block_tokens), arrivals
        self.tables: dict[Request, list[int]] = {}

    @property
    def num_free(self) -> int:
        return self.pool.num_available

    def hint(self, request: Request) -> None:
        found = self._found(request)
        request.num_cached, request.num_cached_idle = len(found) * self.pool.block_tokens, self.pool.num_idle(found)

    def admit(self, request: Request) -> None:
        found = self.tables[request] = self._found(request)
        self.pool.share(request.seq, found)
        request.num_blocks, request.num_computed = len(found), len(found) * self.pool.block_tokens

    def extend(self, request: Request, num_tokens: int) -> bool:
        end = -(-(request.num_computed + num_tokens) // self.pool.block_tokens)
        missing = max(0, end - request.num_blocks)
        if missing > self.num_free:
            return False
        self.tables[request] += self.pool.allocate(request.seq, missing)
        request.num_blocks += missing
        return True

    def release(self, request: Request) -> None:
        self.pool.release(request.seq, self.tables.pop(request))
        request.num_blocks = request.num_private_blocks = request.num_computed = 0

    def publish(self, request: Request) -> None:
        """Let the cache find the blocks that a step has filled."""
        for block, name in zip(self.tables[request], self._names(request, request.num_computed), strict=False):
            self.pool.register(block, name)

    def count_private(self) -> None:
        for request in self.tables:
            request.num_private_blocks = self.pool.num_private[request.seq]

    def check(self) -> None:
        check_pool(self.pool, {request.seq: blocks for request, blocks in self.tables.items()})

    def _found(self, request: Request) -> list[int]:
        return self.pool.match(self._names(request, request.num_tokens - 1))

    def _names(self, request: Request, num_tokens: int) -> list[bytes]:
        """Name the full blocks by whose they are: of the prefix group, then of the request alone."""
        num_shared, num_full = (n // self.pool.block_tokens for n in (self.arrivals[request].shared, num_tokens))
        return [b"%d %d" % (-request.prefix_key if i < num_shared else request.seq, i) for i in range(num_full)]
