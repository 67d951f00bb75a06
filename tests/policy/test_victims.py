from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.step.accounts import Blocks, choose_victims, unrecoverable


def make_resident(seq: int, *, blocks: int, private: int | None = None, priority: int = 0) -> Request:
    return Request(
        seq,
        RequestClass.OFFLINE,
        0.0,
        blocks * 4,
        10,
        priority=priority,
        phase=Phase.RUNNING,
        num_tokens=blocks * 4 + 1,
        num_computed=blocks * 4,
        num_blocks=blocks,
        num_private_blocks=blocks if private is None else private,
    )


def test_a_shared_prefix_is_not_lost():
    assert unrecoverable(make_resident(0, blocks=10, private=3), block_tokens=4) == 12


SMALL, MEDIUM, LARGE, MINOR = (
    make_resident(0, blocks=2),
    make_resident(1, blocks=5),
    make_resident(2, blocks=8),
    make_resident(3, blocks=9, priority=-1),
)


@pytest.mark.parametrize(
    ("candidates", "needed", "growing", "chosen"),
    [
        pytest.param([SMALL, MEDIUM], 8, [], None, id="none if all together do not suffice"),
        pytest.param([LARGE, SMALL, MEDIUM], 2, [], [SMALL], id="the one that loses least"),
        pytest.param([LARGE, SMALL], 8, [], [LARGE], id="no small one if a large one is needed anyway"),
        pytest.param([SMALL, MINOR], 1, [], [MINOR], id="a lower priority before a cheaper one"),
        pytest.param([SMALL, LARGE], 3, [SMALL], [SMALL], id="the block by which it would have grown counts"),
    ],
)
def test_the_cheapest_victims_are_chosen(candidates, needed, growing, chosen):
    assert choose_victims(candidates, needed, block_tokens=4, growing=growing) == chosen


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8), st.integers(1, 30))
def test_the_victims_suffice_and_none_could_be_spared(sizes: list[tuple[int, int]], needed: int):
    residents = [make_resident(seq, blocks=b, private=min(b, p)) for seq, (b, p) in enumerate(sizes)]

    chosen = choose_victims(residents, needed, block_tokens=4)

    if chosen is None:
        assert sum(request.num_private_blocks for request in residents) < needed
        return
    freed = sum(request.num_private_blocks for request in chosen)
    assert freed >= needed
    assert all(freed - request.num_private_blocks < needed for request in chosen)


def test_a_request_fills_the_block_that_it_began_in_this_step_and_the_free_blocks():
    request = Request(0, RequestClass.OFFLINE, 0.0, 40, 10, num_tokens=40)

    assert Blocks(free=1, block_tokens=4).capacity(request, granted=5) == 3 + 4


def test_after_a_preemption_only_blocks_that_are_not_free_are_missing():
    blocks = Blocks(free=1, block_tokens=4)
    blocks.release(MEDIUM)

    assert blocks.missing(8) == 8 - 1 - 5
