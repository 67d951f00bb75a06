"""The KV blocks that one request holds alone, so that its preemption frees them. vLLM shares blocks of equal prefixes.

A count reads each block of a request, so a step counts only while KV is tight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ballast_policy.request import OFFLINE, Request

if TYPE_CHECKING:
    from ballast_vllm.internals import KvBlocks

TIGHT = 4
"""Private blocks are counted when less than this part of the KV is free: only then a plan preempts for KV."""


class PrivateBlocks:
    """Sets `num_private_blocks` of the residents of a host."""

    def __init__(self, blocks: KvBlocks, residents: Mapping[int, Request], ids: Mapping[int, str]) -> None:
        """`ids`: vLLM's ids of the requests, by `seq`."""
        self._blocks, self._residents, self._ids = blocks, residents, ids
        self._is_counting = False
        self._num_offline: int | None = None
        """The blocks that offline requests held alone when the last step began; None: they were not counted."""

    def count(self) -> None:
        """Count the blocks that a preemption would free. While KV is plenty, all blocks of a request count."""
        blocks = self._blocks
        is_tight = bool(blocks.num_shared_blocks) and blocks.num_free * TIGHT < blocks.num_blocks
        if is_tight or self._is_counting:
            ids = self._ids
            for seq, record in self._residents.items():
                record.num_private_blocks = record.num_blocks - (blocks.shared(ids[seq]) if is_tight else 0)
        self._num_offline = sum([r.num_private_blocks for r in self._offline()]) if is_tight else None
        self._is_counting = is_tight or blocks.mixed is not None  # a plan may have counted fewer

    @property
    def num_offline(self) -> int | None:
        """Return the blocks that an offline request holds alone.

        While requests share blocks and KV is plenty, no step counts them, and the result is None.
        """
        if self._blocks.num_shared_blocks:
            return self._num_offline
        return sum([record.num_blocks for record in self._offline()])

    def count_offline(self) -> int:
        """Count the same. Read each shared block of each offline request, which takes as long as a step."""
        blocks, ids = self._blocks, self._ids
        return sum([record.num_blocks - blocks.shared(ids[record.seq]) for record in self._offline()])

    def _offline(self) -> list[Request]:
        return [record for record in self._residents.values() if record.request_class is OFFLINE]
