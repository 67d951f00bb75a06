"""KV of models whose layers have different block tables, for example a sliding window beside full attention.

All block tables of vLLM take blocks from one pool. A table of full attention grows with the context. A table of a
sliding window, of chunked local attention or of Mamba layers keeps only the blocks that later tokens read.

The policy counts the blocks of one table. `KvTables.free` returns how many of them a step may give out:

- Residents take first what they lack for the tokens that are known. A prompt counts as if it had all its blocks. A
  parked decode takes its next block only if the others leave it.
- What is left is for newcomers and answers. A block of the policy is as many blocks of the pool as residents grow by on
  average.
- For the first waiting request of a class, the result is raised to its blocks if vLLM would admit it beside the
  residents, else cut below them. So an online request that does not fit may hold up an offline one that does.

While an online request does not fit, private blocks count in proportion to what it takes, so that a plan preempts
enough offline requests at once. That is an estimate: vLLM may admit a request of the plan some steps later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import floor, inf

from ballast_policy.request import OFFLINE, PARKED, Request

UNBOUNDED = 1 << 60
Newcomer = tuple[Request, int]
"""A waiting request, and the blocks of the pool that must be free so that vLLM admits it."""


@dataclass(frozen=True, slots=True)
class KvTable:
    """Tables of one kind."""

    number: int
    block_tokens: int
    skipped: Callable[[int], int]
    """Returns the tokens at the start that are no longer read, by the number of computed tokens."""
    grows_until: float = inf
    """Context from which a longer one holds no more blocks."""
    most: int = UNBOUNDED
    """Most blocks of a table while its request decodes."""
    most_in_prefill: int = UNBOUNDED

    def in_prefill(self, num_tokens: int, num_left: int, num_held: int = 0) -> int:
        """Return the blocks that the last `num_left` tokens of a prompt take for a time, beyond those of a decode."""
        size = self.block_tokens
        most = min(-(-num_tokens // size), self.most_in_prefill, self.most + -(-num_left // size))
        return self.number * max(0, most - max(num_held, self.most))


class KvTables:
    """The block tables of a model, except those whose blocks are all allocated at an admission."""

    def __init__(self, tables: Collection[KvTable], *, block_tokens: int, num_tables: int) -> None:
        """`block_tokens`: of the table that the policy counts."""
        self._tables = tables
        self._block_tokens = block_tokens
        self._num_tables = num_tables
        self._most_in_prefill = sum(table.number * (table.most_in_prefill - table.most) for table in tables)
        """Blocks that all prefill of a step takes at most beyond those of decodes."""

    def capacity(self, pool_size: int) -> int:
        """Return the KV as the policy counts it: beside a quarter in short requests fits one request of the rest."""
        size = self._block_tokens
        growing = sum(table.number * size / table.block_tokens for table in self._tables if table.most == UNBOUNDED)
        bounded = sum(table.number * table.most_in_prefill for table in self._tables if table.most < UNBOUNDED)
        whole = floor((pool_size - bounded) / (growing + (self._num_tables - growing) / 4))
        return max(whole, pool_size // self._num_tables)

    def allot(
        self, num_free: int, residents: Collection[Request], newcomers: Sequence[Newcomer], draft_blocks: int = 0
    ) -> int:
        """Add the blocks that parked and prefilling residents will need to theirs, and return the free blocks.

        All are as the policy counts them. If an online newcomer lacks blocks, residents get fewer private blocks.
        `num_free`: the free blocks of the pool.
        `newcomers`: the first waiting request of each class, the online one last.
        """
        size = self._block_tokens
        num_growing = in_prefill = 0
        rate = 0.0
        left = num_free - draft_blocks * self._num_tables
        held: list[int] = []
        parked: list[tuple[Request, int, int]] = []
        for record in residents:
            tokens, computed = record.num_tokens, record.num_computed
            is_prefill = tokens - computed > 1
            has = lacks = 0
            for table in self._tables:
                length = table.block_tokens
                skipped = table.skipped(computed) // length
                holds = -(-computed // length) - skipped
                needs = -(-tokens // length) - skipped
                if needs > table.most:
                    needs = table.most
                    if is_prefill:
                        in_prefill += table.in_prefill(tokens, tokens - computed, holds)
                has += table.number * holds
                lacks += table.number * max(0, needs - holds)
                if tokens < table.grows_until:
                    rate += table.number * size / length
            held.append(has + lacks)
            growth = -(-tokens // size) - record.num_blocks
            if growth > 0 and record.phase is PARKED and not is_prefill:
                parked.append((record, growth, lacks))
                continue
            left -= lacks
            if growth > 0:
                if is_prefill:
                    record.num_blocks += growth
                    record.num_private_blocks += growth
                else:
                    num_growing += 1
        in_prefill = min(in_prefill, self._most_in_prefill)
        left -= in_prefill
        for record, growth, lacks in parked:
            if lacks <= left:
                left -= lacks
                record.num_blocks += growth
                record.num_private_blocks += growth
            else:
                left = min(left, 0)  # else the plan may give a part of the blocks to this one
        rate = max(1.0, rate / len(residents)) if residents else self._num_tables
        free = floor(left / rate)
        for record, cost in newcomers if left >= 0 else ():
            needs, takes = self._needs(record), self._takes(record, cost, in_prefill)
            if takes <= left:
                free = max(free, needs)
            elif record.request_class is OFFLINE:
                free = min(free, needs - 1)
            else:
                # Offline requests may be preempted for it: all counts are in what `needs` is to `takes`.
                free = min(free, left * needs // takes)
                for resident, blocks in zip(residents, held, strict=True):
                    share = blocks * resident.num_private_blocks * needs // (resident.num_blocks * takes or 1)
                    resident.num_private_blocks = min(resident.num_blocks, share)
        return max(num_growing + free, num_growing if len(residents) == 1 else 0)

    def _needs(self, record: Request) -> int:
        """Return the free blocks that a waiting request takes in the account of the policy (`Blocks.needed`)."""
        size, cached = self._block_tokens, record.num_cached
        return -(-record.num_tokens // size) - (cached // size - record.num_cached_idle if cached else 0)

    def _takes(self, record: Request, cost: int, in_prefill: int) -> int:
        """Return the blocks of the pool that a waiting request takes.

        All prefill of a step shares the blocks that it takes for a time, so a newcomer may cost fewer.
        """
        num_left = record.num_tokens - record.num_cached
        wanted = in_prefill + sum([table.in_prefill(record.num_tokens, num_left) for table in self._tables])
        return cost - max(0, wanted - self._most_in_prefill)
