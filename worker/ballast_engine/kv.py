"""Which KV blocks belong to whom: reference counts, and a prefix cache of chained block digests.

A block is used (somebody holds it), cached (nobody holds it, its digest is still known) or free. Cached blocks count
as free: they are given away when no free one is left, the longest unused first, tails before heads.

    digest(block i) = blake2b(digest(block i - 1), tokens of block i);  digest(block -1) = blake2b(salt)

so a digest names a whole prefix, and prefixes under different salts never meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from ballast_engine.batch import Ints
from ballast_engine.errors import IntegrityError

Digest = bytes


def root_digest(salt: str) -> Digest:
    """The parent of a prompt's first block."""
    return blake2b(salt.encode(), digest_size=16, person=b"ballast-root").digest()


def chain_digest(parent: Digest, tokens: Ints) -> Digest:
    """The digest of a full block behind `parent`."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """All KV blocks of an engine. Holders are identified by a number; a holder holds a block at most once."""

    def __init__(self, num_blocks: int, block_tokens: int, *, has_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.has_prefix_cache = has_prefix_cache
        self.num_private: dict[int, int] = {}
        """Per holder, the blocks that nobody else holds."""
        self._count = [0] * num_blocks
        # The holders of a block, xor-ed: when one is left, this is its number.
        self._holders = [0] * num_blocks
        self._digest: list[Digest | None] = [None] * num_blocks
        self._known: dict[Digest, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Find the blocks of the longest known prefix of `digests`."""
        blocks = []
        known = self._known
        for digest in digests:
            block = known.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds."""
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
        """Give `holder` that many blocks; there must be as many available."""
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
        """Take everything from `holder`: `blocks` are all it holds, in the order of its tokens."""
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
        """Let a block be found by its content; the step that wrote it has finished. The first of equals stays."""
        if self.has_prefix_cache and digest not in self._known and self._digest[block] is None:
            self._known[digest] = block
            self._digest[block] = digest

    def forget(self) -> None:
        """Drop every cached prefix; what is held stays held."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._digest = [None] * self.num_blocks

    def check_integrity(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Compare the books with what every holder says it holds.

        Raises:
            IntegrityError: names the first block or holder that does not balance.
        """
        holders: dict[int, list[int]] = {}
        for holder, blocks in tables.items():
            if len(set(blocks)) != len(blocks):
                raise IntegrityError(f"request {holder} holds a block twice: {blocks}")
            for block in blocks:
                holders.setdefault(block, []).append(holder)
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle:
            raise IntegrityError("a block stands in the free list twice")
        for block in range(self.num_blocks):
            held = holders.get(block, [])
            if self._count[block] != len(held):
                raise IntegrityError(f"block {block} counts {self._count[block]} holders, but {held} hold it")
            if bool(held) == (block in free or block in idle):
                raise IntegrityError(f"block {block} is {'free and held' if held else 'neither free nor held'}")
            digest = self._digest[block]
            if (block in idle and digest is None) or (block in free and digest is not None):
                raise IntegrityError(f"block {block} stands in the wrong free list")
            if digest is not None and self._known.get(digest) != block:
                raise IntegrityError(f"block {block} has a digest that does not lead to it")
        if len(self._known) != sum(digest is not None for digest in self._digest):
            raise IntegrityError("the prefix cache knows digests that no block has")
        private = {holder: sum(len(holders[b]) == 1 for b in blocks) for holder, blocks in tables.items() if blocks}
        if private != {holder: num for holder, num in self.num_private.items() if num or tables.get(holder)}:
            raise IntegrityError(f"private blocks are {self.num_private}, but the tables say {private}")
