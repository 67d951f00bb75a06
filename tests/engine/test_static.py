from __future__ import annotations

from typing import Any

import pytest
from engine_bench import Bench, make_bench


def static(**policy: Any) -> Bench:
    return make_bench(is_static=True, **policy)


def test_nobody_joins_a_static_batch_before_its_last_request_has_ended() -> None:
    bench = static(slots=2)
    for name, length in (("short", 2), ("long", 9), ("next", 3)):
        bench.submit(name, max_tokens=length, ignore_eos=True)
    while "next" not in bench.outputs:
        bench.step()
        ended = [name for name, outputs in bench.outputs.items() if outputs[-1].finish_reason]

    assert ended == ["short", "long"]
    bench.run()
    for name, length in (("short", 2), ("long", 9), ("next", 3)):
        expected = bench.alone([1, 2, 3], max_tokens=length, ignore_eos=True)
        assert bench.tokens(name) == expected.tokens


def test_a_static_batch_computes_its_prompts_in_one_piece() -> None:
    bench = static(slots=3, chunk_tokens=8)
    for i in range(3):
        bench.submit(f"r{i}", [i + 1] * 10, max_tokens=3, ignore_eos=True)
    bench.run()

    assert [len(batch.token_ids) for batch in bench.executor.batches] == [30, 3, 3]


def test_rows_that_have_ended_are_computed_as_padding() -> None:
    bench = static(slots=3)
    for name, length in (("a", 1), ("b", 3), ("c", 6)):
        bench.submit(name, max_tokens=length, ignore_eos=True)
    bench.run()
    stats = bench.engine.stats()

    assert [batch.num_decodes for batch in bench.executor.batches] == [0, 3, 3, 3, 3, 3]
    assert (stats.online.decode_tokens, stats.kv_used) == (10, 0)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_padding_goes_with_the_last_request_of_its_batch(end: str) -> None:
    bench = static(slots=2)
    bench.submit("short", max_tokens=1, ignore_eos=True)
    bench.submit("long", max_tokens=30, ignore_eos=True)
    bench.step(4)
    if end == "abort":
        bench.engine.abort("long")
    else:
        bench.executor.fails = 1
    bench.step()

    assert bench.engine.stats().kv_used == 0
    assert not bench.engine.has_work


def test_a_static_batch_takes_what_fits_kv_at_its_longest() -> None:
    bench = static(num_blocks=10, slots=4)
    for i in range(4):
        bench.submit(f"r{i}", [i + 1] * 4, max_tokens=12, ignore_eos=True)
    bench.step()

    assert bench.engine.stats().online.running == 2
    bench.run()
    assert bench.engine.stats().deferred_grants == 0
