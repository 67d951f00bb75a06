"""The KV of an engine's residents (`host.Kv`): blocks and block tables, with the policy's counts of them."""

from __future__ import annotations

from ballast_engine.block_tables import BlockTables
from ballast_engine.kv import BlockPool
from ballast_engine.sequence import Sequence
from ballast_policy.request import Request


class ResidentKv:
    """The blocks of an engine's residents. The policy host says which request becomes a resident."""

    def __init__(self, pool: BlockPool, tables: BlockTables) -> None:
        self.pool = pool
        self.live: dict[int, Sequence] = {}
        """Every request in the engine, by `seq`."""
        self.num_unused = 0
        """Token positions in the residents' blocks that hold no token yet."""
        self.tables = tables
        """The rows of the residents, with the blocks that `extend` allocated."""
        self._residents: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_free(self) -> int:
        """Blocks that no resident uses, cached ones among them."""
        return self.pool.num_available

    def count_private(self) -> None:
        """Set the private blocks in the records of all residents."""
        private = self.pool.num_private
        for seq, sequence in self._residents.items():
            sequence.request.num_private_blocks = private[seq]

    def hint(self, request: Request) -> None:
        """Set how many tokens of a waiting request the prefix cache has now."""
        if self.pool.has_prefix_cache:
            blocks = self._cached_blocks(self.live[request.seq])
            request.num_cached = len(blocks) * self.pool.block_tokens
            request.num_cached_idle = self.pool.num_idle(blocks)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of a prompt. At least one token is left to compute, for its logits."""
        digests = sequence.digests
        most = (sequence.request.num_tokens - 1) // self.pool.block_tokens
        return self.pool.match(digests if len(digests) <= most else digests[:most])

    def admit(self, request: Request) -> None:
        """Assign to a request a row of the block tables and its blocks in the prefix cache."""
        sequence = self.live[request.seq]
        blocks = self._cached_blocks(sequence)
        self.pool.share(request.seq, blocks)
        sequence.blocks = blocks
        sequence.num_registered = len(blocks)
        sequence.row = self.tables.take_row()
        self.tables.write(sequence, 0)
        request.num_blocks = len(blocks)
        request.num_computed = request.num_cached = len(blocks) * self.pool.block_tokens
        self._residents[request.seq] = sequence

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` more; return False and change nothing if too few are free."""
        size = self.pool.block_tokens
        missing = -(-(request.num_computed + num_tokens) // size) - request.num_blocks
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        sequence = self._residents[request.seq]
        sequence.blocks += self.pool.allocate(request.seq, missing)
        self.tables.write(sequence, request.num_blocks)
        request.num_blocks += missing
        self.num_unused += missing * size
        return True

    def settle(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the step has written `num_tokens` more. Full blocks can be shared from now on."""
        request = sequence.request
        request.num_computed += num_tokens
        self.num_unused -= num_tokens
        num_full = request.num_computed // self.pool.block_tokens
        if num_full > sequence.num_registered and self.pool.has_prefix_cache:
            sequence.hash_blocks(request.num_computed)
            for i in range(sequence.num_registered, num_full):
                self.pool.register(sequence.blocks[i], sequence.digests[i])
            sequence.num_registered = num_full

    def release(self, request: Request) -> None:
        """Free the blocks of a resident; full blocks stay in the prefix cache until they are needed."""
        sequence = self._residents.pop(request.seq)
        self.num_unused -= request.num_blocks * self.pool.block_tokens - request.num_computed
        self.tables.free_row(sequence)
        self.pool.release(request.seq, sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = 0
        request.num_computed = request.num_blocks = request.num_private_blocks = 0
