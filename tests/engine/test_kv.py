from __future__ import annotations

import numpy as np
import pytest
from engine_integrity import IntegrityError, check_pool
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast_engine.kv import BlockPool, chain_digest, root_digest

BLOCK = 4


def digests(tokens: list[int], salt: str = "") -> list[bytes]:
    chain = [root_digest(salt)]
    for start in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
        chain.append(chain_digest(chain[-1], np.array(tokens[start : start + BLOCK])))
    return chain[1:]


def hold(pool: BlockPool, holder: int, tokens: list[int], salt: str = "") -> list[int]:
    """Take blocks for `tokens` as the engine does: match, share, allocate, and register what is full."""
    names = digests(tokens, salt)
    blocks = pool.match(names)
    pool.share(holder, blocks)
    blocks += pool.allocate(holder, -(-len(tokens) // BLOCK) - len(blocks))
    for block, name in zip(blocks, names, strict=False):
        pool.register(block, name)
    return blocks


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(8, BLOCK)
    blocks = hold(pool, 1, list(range(10)))
    pool.release(1, blocks)

    assert pool.match(digests(list(range(12)))) == blocks[:2]
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 2, 8)


def test_prefixes_under_different_salts_never_meet() -> None:
    pool = BlockPool(8, BLOCK)
    hold(pool, 1, list(range(8)), salt="a")

    assert pool.match(digests(list(range(8)), salt="b")) == []


def test_free_blocks_are_given_away_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(4, BLOCK)
    pool.release(1, hold(pool, 1, list(range(12))))

    pool.allocate(2, 2)

    assert len(pool.match(digests(list(range(12))))) == 2


def test_the_longest_unused_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK)
    first, second = list(range(8)), list(range(100, 108))
    for tokens in (first, second, first):
        pool.release(1, hold(pool, 1, tokens))

    pool.allocate(2, 2)

    assert len(pool.match(digests(first))) == 2
    assert pool.match(digests(second)) == []


def test_without_a_prefix_cache_nothing_is_ever_found() -> None:
    pool = BlockPool(8, BLOCK, has_prefix_cache=False)
    pool.release(1, hold(pool, 1, list(range(8))))

    assert pool.match(digests(list(range(8)))) == []
    assert pool.num_cached == 0


def test_forgetting_makes_cached_blocks_free() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(1, hold(pool, 1, list(range(8))))
    pool.forget()

    assert (pool.num_cached, pool.num_available) == (0, 8)
    check_pool(pool, {})


def test_a_block_that_its_holder_forgot_is_reported() -> None:
    pool = BlockPool(4, BLOCK)
    pool.allocate(7, 1)

    with pytest.raises(IntegrityError, match="block 0 counts 1 holders, but \\[\\] hold it"):
        check_pool(pool, {})


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=2, max_size=2))
def test_equal_digests_mean_equal_prefixes(pair: list[list[int]]) -> None:
    left, right = pair
    for i, (a, b) in enumerate(zip(digests(left), digests(right), strict=False), start=1):
        assert (a == b) == (left[: i * BLOCK] == right[: i * BLOCK])


class Pool(RuleBasedStateMachine):
    """Holders come, grow and go; what is found must be what was written there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, BLOCK)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.next = 1

    def write(self, holder: int) -> None:
        tokens, blocks = self.tokens[holder], self.tables[holder]
        for i, block in enumerate(blocks):
            self.content[block] = tuple(tokens[: (i + 1) * BLOCK])
        for block, name in zip(blocks, digests(tokens), strict=False):
            self.pool.register(block, name)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def enter(self, tokens: list[int]) -> None:
        found = self.pool.match(digests(tokens))
        for i, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: (i + 1) * BLOCK])
        need = -(-len(tokens) // BLOCK) - len(found)
        if need + self.pool.num_idle(found) > self.pool.num_available:
            return
        holder, self.next = self.next, self.next + 1
        self.pool.share(holder, found)
        self.tables[holder] = found + self.pool.allocate(holder, need)
        self.tokens[holder] = tokens
        self.write(holder)

    @precondition(lambda self: self.tables and self.pool.num_available)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.tables)))
        self.tokens[holder].append(token)
        if len(self.tokens[holder]) > len(self.tables[holder]) * BLOCK:
            self.tables[holder] += self.pool.allocate(holder, 1)
        self.write(holder)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(holder, self.tables.pop(holder))

    @invariant()
    def balances(self) -> None:
        check_pool(self.pool, self.tables)


test_the_pool_balances_whoever_comes_and_goes = Pool.TestCase
