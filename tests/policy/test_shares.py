from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.reservation import most_slots, reserved_blocks, reserved_chunk, reserved_slots


@pytest.mark.parametrize(
    ("share", "slots", "ceiling", "expected"),
    [
        pytest.param(0.1, 16, 16, 2, id="a fraction of a slot is a slot"),
        pytest.param(0.1, 30, 30, 3, id="a product that floats just above a whole number is that number"),
        pytest.param(0.0, 16, 16, 0, id="no share reserves nothing"),
        pytest.param(1.0, 16, 16, 15, id="one slot stays for online"),
        pytest.param(0.1, 256, 64, 7, id="the share is of what the SLO allows"),
        pytest.param(0.5, 1, 1, 0, id="a single slot cannot be shared"),
        pytest.param(0.01, 2, 2, 1, id="the smallest share is one slot"),
    ],
)
def test_reserved_slots(share: float, slots: int, ceiling: int, expected: int):
    assert expected == reserved_slots(share, slots, ceiling)


@pytest.mark.parametrize(
    ("share", "num_blocks", "expected"),
    [(0.1, 1000, 100), (0.1, 1001, 101), (0.0, 1000, 0), (1.0, 1000, 999), (0.5, 1, 0)],
)
def test_reserved_blocks(share: float, num_blocks: int, expected: int):
    assert expected == reserved_blocks(share, num_blocks)


@pytest.mark.parametrize(("share", "chunk", "expected"), [(0.1, 512, 52), (0.0, 512, 0), (1.0, 512, 512), (0.1, 1, 1)])
def test_reserved_chunk(share: float, chunk: int, expected: int):
    assert expected == reserved_chunk(share, chunk)


@pytest.mark.parametrize(("share", "slots", "expected"), [(1.0, 16, 16), (0.5, 5, 2), (0.1, 4, 1), (0.0, 16, 0)])
def test_most_slots(share: float, slots: int, expected: int):
    assert expected == most_slots(share, slots)


@given(st.floats(0, 1), st.integers(1, 300), st.integers(1, 300))
def test_online_always_keeps_a_slot(share: float, slots: int, ceiling: int):
    assert 0 <= reserved_slots(share, slots, ceiling) < slots
    assert reserved_slots(share, slots, ceiling) <= reserved_slots(share, slots, slots)
