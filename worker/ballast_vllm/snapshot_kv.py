"""The KV that a plan in vLLM may use: vLLM's blocks, as the policy counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ballast_policy.request import ONLINE, Request

HINT_STEPS = 8
"""Steps for which a matched prefix stays valid. Bounds the cost of a long backlog."""
EAGER = 4
"""Offline requests whose prefix is looked up in each step with a free slot: few steps admit more of them."""


class VllmBlocks(Protocol):
    """vLLM's KV blocks, as the policy counts them."""

    num_shared_blocks: int
    num_lookahead_tokens: int
    block_tokens: int
    num_blocks: int

    @property
    def num_free(self) -> int: ...
    def held(self, request_id: str) -> int: ...
    def private(self, request_id: str) -> int: ...
    def match_prefix(self, request: Any, record: Request) -> None: ...


class SnapshotKv:
    """The KV of a snapshot (`ballast_policy.host.Kv`): vLLM itself admits, extends and releases."""

    def __init__(self, blocks: VllmBlocks, live: Mapping[int, Any]) -> None:
        self.num_eager = 0
        """Offline requests that this step looks up although the last answer is recent."""
        self.step = 0
        self.draft_blocks = 0
        """Blocks that the drafts of a step and a draft model may take."""
        self._blocks = blocks
        self._live = live
        self.hinted: dict[int, int] = {}
        """The step of the last look-up of each request's prefix, by `seq`."""

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, without those for drafts."""
        return max(0, self._blocks.num_free - self.draft_blocks)

    def hint(self, request: Request) -> None:
        """Look up the prefix of a waiting request, unless the last answer is recent."""
        is_online = request.request_class is ONLINE
        if is_online or self.num_eager > 0 or self.hinted.get(request.seq, -HINT_STEPS) + HINT_STEPS <= self.step:
            self.num_eager -= not is_online
            self.hinted[request.seq] = self.step
            self._blocks.match_prefix(self._live[request.seq], request)

    def forget(self, seq: int) -> None:
        """Forget the matched prefix of a request that left."""
        self.hinted.pop(seq, None)

    def admit(self, request: Request) -> None:
        raise NotImplementedError("vLLM allocates the blocks")

    def extend(self, request: Request, num_tokens: int) -> bool:
        raise NotImplementedError("vLLM allocates the blocks")

    def release(self, request: Request) -> None:
        raise NotImplementedError("vLLM frees the blocks")
