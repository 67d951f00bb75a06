from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.step.accounts import choose_victims, unrecoverable


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


def test_nobody_is_chosen_where_all_together_do_not_suffice():
    assert choose_victims([make_resident(0, blocks=3), make_resident(1, blocks=4)], 8, block_tokens=4) is None


def test_the_one_that_loses_least_is_chosen():
    residents = [make_resident(0, blocks=8), make_resident(1, blocks=2), make_resident(2, blocks=5)]

    assert [residents[1]] == choose_victims(residents, 2, block_tokens=4)


def test_a_small_one_is_spared_where_the_large_one_is_needed_anyway():
    residents = [make_resident(0, blocks=8), make_resident(1, blocks=2)]

    assert [residents[0]] == choose_victims(residents, 8, block_tokens=4)


def test_a_lower_priority_goes_before_a_cheaper_one():
    residents = [make_resident(0, blocks=2), make_resident(1, blocks=9, priority=-1)]

    assert [residents[1]] == choose_victims(residents, 1, block_tokens=4)


def test_who_would_have_grown_frees_the_block_it_would_have_taken():
    residents = [make_resident(0, blocks=2), make_resident(1, blocks=2)]

    assert choose_victims(residents, 3, block_tokens=4, growing=residents[:1]) == residents[:1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8), st.integers(1, 30))
def test_what_is_chosen_suffices_and_nobody_in_it_could_be_spared(sizes: list[tuple[int, int]], needed: int):
    residents = [make_resident(seq, blocks=b, private=min(b, p)) for seq, (b, p) in enumerate(sizes)]

    chosen = choose_victims(residents, needed, block_tokens=4)

    if chosen is None:
        assert sum(request.num_private_blocks for request in residents) < needed
        return
    freed = sum(request.num_private_blocks for request in chosen)
    assert freed >= needed
    assert all(freed - request.num_private_blocks < needed for request in chosen)
