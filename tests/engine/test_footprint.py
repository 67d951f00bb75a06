"""What a model's work costs a device, counted from its shape and measured against the machine."""

from __future__ import annotations

from typing import Any

import pytest
from engine_bench import make_bench

from ballast_engine.footprint import Footprint, PhaseWork
from ballast_engine.loader import load
from ballast_engine.peak import measure_footprint


@pytest.mark.parametrize("name", ["llama", "llama, tied embeddings, one key head"])
def test_a_token_costs_two_operations_for_each_weight_that_it_is_multiplied_with(checkpoints: Any, name: str) -> None:
    directory, reference = checkpoints(name)
    loaded = load(directory, dtype="float32", attention="sdpa", threads=1)
    found = measure_footprint(loaded)
    config = reference.config
    layers = sum(weight.numel() for weight in reference.model.layers.parameters()) + reference.model.norm.weight.numel()
    head = config.vocab_size * config.hidden_size

    assert found.token_flops == 2 * layers
    assert found.draw_flops == 2 * head
    assert found.weight_bytes == 4 * (layers + head)
    heads = config.num_attention_heads * config.hidden_size // config.num_attention_heads
    assert found.attended_flops == 2 * 2 * config.num_hidden_layers * heads
    kv = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert found.kv_bytes == 2 * 4 * config.num_hidden_layers * kv
    assert found.peak_flops > 1e7
    assert found.peak_bandwidth > 1e7


def test_work_is_priced_by_tokens_what_they_attend_to_and_what_is_read() -> None:
    footprint = Footprint(2.0, 3.0, 5.0, 7.0, 11.0, 1.0, 1.0)
    work = PhaseWork(passes=0.5, tokens=10, attended=100.0, context=40, draws=4)

    assert footprint.flops(work) == 2 * 10 + 3 * 100 + 5 * 4
    assert footprint.bytes(work) == 7 * 0.5 + 11 * (40 + 10)


def test_every_step_is_counted_by_phase() -> None:
    bench = make_bench(chunk_tokens=6, offline_share=0.0)
    bench.submit("a", [1] * 10, max_tokens=3, ignore_eos=True)
    bench.run()
    work = bench.engine.stats().work

    assert work["prefill"] == PhaseWork(passes=2, tokens=10, attended=55, context=6 + 10, draws=1)
    assert work["decode"] == PhaseWork(passes=2, tokens=2, attended=11 + 12, context=11 + 12, draws=2)


def test_a_mixed_step_reads_the_weights_once() -> None:
    bench = make_bench(chunk_tokens=12, offline_share=0.0)
    bench.submit("a", [1] * 4, max_tokens=2, ignore_eos=True)
    bench.step()
    bench.submit("b", [2] * 3, max_tokens=1)
    bench.step()
    work = bench.engine.stats().work

    assert bench.engine.last_step.kind == "mixed"
    assert (work["prefill"].passes, work["decode"].passes) == (1 + 3 / 4, 1 / 4)
    assert work["prefill"].draws == 2
