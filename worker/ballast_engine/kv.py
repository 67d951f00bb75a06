"""The owners of KV blocks: reference counts, and a prefix cache of chained block digests.

A block is used (it has a holder), cached (it has no holder, and its digest is known) or free. Cached blocks count as
free: when no free block is left, they are evicted, least recently used first, tails before heads.

    digest(block i) = blake2b(digest(block i - 1), tokens of block i);  digest(block -1) = blake2b(salt)

A digest therefore names a whole prefix. Prefixes under different salts are never shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile

from ballast_engine.batch import Ints

Digest = bytes


def root_digest(salt: str) -> Digest:
    """Return the parent of the first block of a prompt."""
    return blake2b(salt.encode(), digest_size=16, person=b"ballast-root").digest()


def chain_digest(parent: Digest, tokens: Ints) -> Digest:
    """Return the digest of a full block after `parent`."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """All KV blocks of an engine. A holder is a number, and holds a block at most once."""

    def __init__(self, num_blocks: int, block_tokens: int, *, has_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.has_prefix_cache = has_prefix_cache
        self.num_private: dict[int, int] = {}
        """Per holder, the blocks without another holder."""
        self._count = [0] * num_blocks
        # The holders of a block, xor-ed. If one holder is left, this is its number.
        self._holders = [0] * num_blocks
        self._digest: list[Digest | None] = [None] * num_blocks
        self._known: dict[Digest, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks without a holder, including cached blocks."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose content is still known."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Return the blocks of the longest known prefix of `digests`."""
        return [self._known[digest] for digest in takewhile(self._known.__contains__, digests)]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` have no holder."""
        count = self._count
        return sum(1 for block in blocks if not count[block])

    def share(self, holder: int, blocks: Sequence[int]) -> None:
        """Make `holder` hold blocks that `match` found."""
        private = self.num_private
        own = 0
        for block in blocks:
            count = self._count[block]
            if count == 0:
                del self._idle[block]
                own += 1
            elif count == 1:
                private[self._holders[block]] -= 1
            self._count[block] = count + 1
            self._holders[block] ^= holder
        private[holder] = private.get(holder, 0) + own

    def allocate(self, holder: int, num: int) -> list[int]:
        """Allocate `num` blocks to `holder`. As many must be available."""
        blocks = []
        for _ in range(num):
            block = self._free.pop() if self._free else self._evict()
            self._count[block] = 1
            self._holders[block] = holder
            blocks.append(block)
        self.num_private[holder] = self.num_private.get(holder, 0) + num
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        digest = self._digest[block]
        assert digest is not None
        del self._known[digest]
        self._digest[block] = None
        return block

    def release(self, holder: int, blocks: Sequence[int]) -> None:
        """Release all blocks of `holder`. `blocks` are in the order of its tokens."""
        for block in reversed(blocks):
            count = self._count[block] - 1
            self._count[block] = count
            self._holders[block] ^= holder
            if count == 1:
                self.num_private[self._holders[block]] += 1
            elif count == 0:
                if self._digest[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None
        self.num_private.pop(holder, None)

    def register(self, block: int, digest: Digest) -> None:
        """Make a block known by its content, after the step that wrote it. Of equal blocks the first stays known."""
        if self.has_prefix_cache and digest not in self._known and self._digest[block] is None:
            self._known[digest] = block
            self._digest[block] = digest

    def forget(self) -> None:
        """Forget every cached prefix. Used blocks stay used."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._digest = [None] * self.num_blocks
