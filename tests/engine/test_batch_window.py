from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def test_an_idle_engine_begins_with_everybody_who_came_in_the_window(bench_of: Make, generation: Make) -> None:
    bench = bench_of(batch_window=0.5, chunk_tokens=64)
    bench.engine.submit(generation("a", [1] * 5))
    assert bench.engine.step() == []
    bench.clock.now += 0.3
    bench.engine.submit(generation("b", [2] * 7))
    assert bench.engine.step() == []
    bench.clock.now += 0.3
    started = {output.request_id for output in bench.engine.step()}

    assert started == {"a", "b"}
    assert bench.engine.last_step.num_prefill == 12


def test_a_busy_engine_takes_a_newcomer_into_the_next_step(bench_of: Make, generation: Make) -> None:
    bench = bench_of(batch_window=0.5)
    bench.engine.submit(generation("a", ignore_eos=True))
    bench.engine.step()
    bench.clock.now += 1.0
    bench.engine.step()
    bench.engine.submit(generation("b"))

    assert "b" in {output.request_id for output in bench.engine.step()}


def test_waiting_for_a_batch_ends_when_the_window_does(bench_of: Make, generation: Make) -> None:
    """The engine's thread sleeps no longer than the window is open: here it is over at once."""
    bench = bench_of(batch_window=0.004)
    bench.engine.submit(generation("a"))
    bench.engine.step()
    bench.engine.wait(timeout=3600.0)

    assert bench.engine.has_work
