"""What a share comes to, each formula once."""

from __future__ import annotations

from math import ceil, floor

_ROUNDING = 1e-9
"""`0.1 * 30` is 3.0000000000000004 in floating point, and its ceiling must be 3."""


def reserved_slots(share: float, slots: int, ceiling: int) -> int:
    """Give the slots a share reserves: `min(ceil(share * min(slots, ceiling)), slots - 1)`.

    One slot always stays for the other class; a share of 0 reserves nothing.
    """
    return max(0, min(_ceil(share * min(slots, ceiling)), slots - 1))


def reserved_blocks(share: float, num_blocks: int) -> int:
    """Give the KV blocks a share reserves: `min(ceil(share * num_blocks), num_blocks - 1)`."""
    return max(0, min(_ceil(share * num_blocks), num_blocks - 1))


def reserved_chunk(share: float, chunk_tokens: int) -> int:
    """Give the prefill tokens of a step that a share reserves: `ceil(share * chunk_tokens)`."""
    return _ceil(share * chunk_tokens)


def most_slots(max_share: float, slots: int) -> int:
    """Give the most slots a class may hold: `floor(max_share * slots)`, at least one unless the share is 0."""
    return max(1, floor(max_share * slots + _ROUNDING)) if max_share > 0 else 0


def _ceil(value: float) -> int:
    return ceil(value - _ROUNDING)
