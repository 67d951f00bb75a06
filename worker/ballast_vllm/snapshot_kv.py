"""The KV that a plan in vLLM may use: vLLM's blocks, as the policy counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ballast_policy.request import OFFLINE, ONLINE, Request, RequestClass
from ballast_vllm.block_tables import KvTables

if TYPE_CHECKING:
    from ballast_vllm.internals import KvBlocks

HINT_STEPS = 8
"""Steps for which a matched prefix stays valid. Bounds the cost of a long backlog."""
EAGER = 4
"""Offline requests whose prefix is looked up in each step with a free slot: few steps admit more of them."""


class SnapshotKv:
    """The KV of a snapshot (`ballast_policy.host.Kv`): vLLM itself admits, extends and releases."""

    def __init__(self, blocks: KvBlocks, live: Mapping[int, Any], residents: Mapping[int, Request]) -> None:
        self.num_eager = 0
        """Offline requests that this step looks up although the last answer is recent."""
        self.step = 0
        self.draft_blocks = 0
        """Blocks that the drafts of a step and a draft model may take."""
        self._blocks = blocks
        self._live = live
        self.hinted: dict[int, int] = {}
        """The step of the last look-up of each request's prefix, by `seq`."""
        self._residents = residents
        self._costs: dict[int, int] = {}
        self._first: dict[RequestClass, Request] = {}
        """The first waiting request of each class in this step, if block tables are mixed."""

    def begin(self) -> None:
        """Begin a step."""
        self.step += 1
        self._first.clear()

    @property
    def num_free(self) -> int:
        """Free blocks, without those for drafts. `allot_mixed` replaces them if block tables are mixed."""
        return max(0, self._blocks.num_free - self.draft_blocks)

    def allot_mixed(self, tables: KvTables) -> int:
        """Change the blocks of residents as `KvTables.allot` does, and return the blocks that a plan may give out."""
        first = [self._first[c] for c in (OFFLINE, ONLINE) if c in self._first]
        newcomers = [(request, self._costs[request.seq]) for request in first]
        num_free = self._blocks.num_free_in_pool
        return tables.allot(num_free, self._residents.values(), newcomers, self.draft_blocks)

    def hint(self, request: Request) -> None:
        """Look up the prefix of a waiting request, unless the last answer is recent."""
        is_online = request.request_class is ONLINE
        if is_online or self.num_eager > 0 or self.hinted.get(request.seq, -HINT_STEPS) + HINT_STEPS <= self.step:
            self.num_eager -= not is_online
            self.hinted[request.seq] = self.step
            cost = self._blocks.match_prefix(self._live[request.seq], request)
            if self._blocks.mixed is not None:
                self._costs[request.seq] = cost
        if self._blocks.mixed is not None:
            self._first.setdefault(request.request_class, request)

    def forget(self, seq: int) -> None:
        """Forget the matched prefix of a request that left or was preempted."""
        self.hinted.pop(seq, None)
        self._costs.pop(seq, None)

    def admit(self, request: Request) -> None:
        raise NotImplementedError("vLLM allocates the blocks")

    def extend(self, request: Request, num_tokens: int) -> bool:
        raise NotImplementedError("vLLM allocates the blocks")

    def release(self, request: Request) -> None:
        raise NotImplementedError("vLLM frees the blocks")
