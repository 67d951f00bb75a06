from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def test_nobody_joins_a_static_batch_before_its_last_request_has_ended(bench_of: Make, generation: Make) -> None:
    bench = bench_of(slots=2, options={"mode": "static"})
    for name, length in (("short", 2), ("long", 9), ("next", 3)):
        bench.engine.submit(generation(name, max_tokens=length, ignore_eos=True))
    while "next" not in bench.outputs:
        bench.step()
        ended = [name for name, outputs in bench.outputs.items() if outputs[-1].finish_reason]

    assert ended == ["short", "long"]
    bench.run()
    for name, length in (("short", 2), ("long", 9), ("next", 3)):
        expected = bench.executor.answer([1, 2, 3], generation("", max_tokens=length, ignore_eos=True).sampling, 64)
        assert bench.tokens(name) == expected.tokens


def test_a_static_batch_computes_its_prompts_in_one_piece(bench_of: Make, generation: Make) -> None:
    bench = bench_of(slots=3, chunk_tokens=8, options={"mode": "static"})
    for i in range(3):
        bench.engine.submit(generation(f"r{i}", [i + 1] * 10, max_tokens=3, ignore_eos=True))
    bench.run()

    assert [len(batch.token_ids) for batch in bench.executor.batches] == [30, 3, 3]


def test_a_static_batch_takes_what_fits_kv_at_its_longest(bench_of: Make, generation: Make) -> None:
    bench = bench_of(num_blocks=10, slots=4, options={"mode": "static"})
    for i in range(4):
        bench.engine.submit(generation(f"r{i}", [i + 1] * 4, max_tokens=12, ignore_eos=True))
    bench.step()

    assert bench.engine.stats().online.running == 2
    bench.run()
    assert bench.engine.stats().deferred_grants == 0
