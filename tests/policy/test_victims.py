from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.step.accounts import Blocks, StepTime, choose_victims, unrecoverable


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
    assert unrecoverable(make_resident(0, blocks=10, private=0), block_tokens=4) == 0


SMALL, MEDIUM, LARGE, MINOR = (
    make_resident(0, blocks=2),
    make_resident(1, blocks=5),
    make_resident(2, blocks=8),
    make_resident(3, blocks=9, priority=-1),
)
LATER = make_resident(4, blocks=2)


@pytest.mark.parametrize(
    ("candidates", "needed", "growing", "chosen"),
    [
        pytest.param([SMALL, MEDIUM], 8, [], None, id="none if all together do not suffice"),
        pytest.param([LARGE, SMALL, MEDIUM], 2, [], [SMALL], id="the one that loses least"),
        pytest.param([LARGE, SMALL], 8, [], [LARGE], id="no small one if a large one is needed anyway"),
        pytest.param([SMALL, MINOR], 1, [], [MINOR], id="a lower priority before a cheaper one"),
        pytest.param([SMALL, LATER], 2, [], [LATER], id="the later of equals"),
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


def make_newcomer(seq: int, **fields) -> Request:
    """Four blocks, two of them cached, one of these in use."""
    fields = {"num_tokens": 16, "num_cached": 8, "num_cached_idle": 1, **fields}
    return Request(seq, RequestClass.ONLINE, 0.0, 16, 10, **fields)


def test_the_blocks_of_a_request_are_those_that_it_does_not_hold_or_share():
    blocks, newcomer = Blocks(free=10, block_tokens=4), make_newcomer(0)
    begun = Request(
        1, RequestClass.ONLINE, 0.0, 28, 10, phase=Phase.RUNNING, num_tokens=28, num_computed=8, num_blocks=3
    )

    assert [blocks.needed(begun, tokens) for tokens in (4, 12, 13, 28)] == [0, 0, 1, 4]
    assert [blocks.more(begun, granted, 6) for granted in (0, 4, 6, 8)] == [1, 2, 1, 2]
    assert (blocks.whole(newcomer), blocks.more(newcomer, 0, 4)) == (3, 2)
    assert (blocks.missing(12), blocks.missing(12, newcomer)) == (2, 3), "a preemption may free the shared block"
    blocks.release(SMALL)
    assert (blocks.whole(newcomer), blocks.missing(12, newcomer)) == (4, 0)


def test_promises_are_kept_until_they_are_taken_or_the_request_is_gone():
    blocks, newcomers = Blocks(free=20, block_tokens=4), [make_newcomer(seq) for seq in range(2)]
    begun = make_newcomer(2, phase=Phase.RUNNING)
    for request in (*newcomers, begun):
        blocks.promise(request)
    assert (blocks.num_promised, blocks.promised[begun]) == (3 + 3 + 4, 4)

    blocks.take(newcomers[0], 0, 4)
    assert (blocks.free, blocks.num_promised, blocks.promised[newcomers[0]]) == (18, 8, 1)
    blocks.forget([newcomers[1]])
    assert blocks.num_promised == 5
    blocks.release(SMALL)
    assert blocks.free == 18 - 2 + 2, "the blocks that two newcomers share may be those of the victim"


def test_the_time_of_decodes_counts_the_experts_beside_prompts_and_without_them():
    cost = CostModel(k0=1.0, k1=0.01, k3=0.1, k4=0.001, k5=1.0, missed=0.9)
    time = StepTime(cost, 64, cost.k0, cost.k0)
    time.add_prefill(0, 8)
    time.add_decodes(3, 300)
    time.add_decodes(2, 100)

    assert time.seconds == pytest.approx(1 + 8 * 0.01 + 5 * 0.1 + 0.4 + cost.experts(13))
    assert time.fixed_seconds == pytest.approx(1 + 5 * 0.1 + 0.4 + cost.experts(5))
    assert (time.chunk, time.num_tokens, time.num_decodes) == (56, 13, 5)
