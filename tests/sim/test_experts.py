"""A step of a mixture-of-experts model reads the experts that its tokens touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm_d.experts import GPT_OSS_120B, GPT_OSS_A100

from ballast_sim.errors import BadInput
from ballast_sim.replay.step_model import BatchWork

INDEPENDENT = replace(GPT_OSS_A100, diversity=1.0)
"""Every token chooses its experts by itself."""


def make_decodes(number: int, context: int = 1) -> BatchWork:
    return BatchWork(num_decode=number, decode_context=number * context)


def make_prefill(prompts: int, tokens: int) -> BatchWork:
    return BatchWork.of_prompts(prompts, tokens)


def test_sizes_are_those_of_the_model_card():
    shape = GPT_OSS_120B

    assert shape.expert_parameters == pytest.approx(114.71e9, rel=0.001)
    assert shape.shared_parameters == pytest.approx(0.96e9, rel=0.02)
    assert shape.active_parameters + shape.head_parameters == pytest.approx(5.13e9, rel=0.01)
    assert shape.weight_bytes == pytest.approx(60.8 * 2**30, rel=0.01)
    assert shape.kv_bytes_per_token == 36 * 2 * 8 * 64 * 2


def test_one_token_that_chooses_by_itself_touches_its_share_of_the_experts():
    assert INDEPENDENT.touched(1) == pytest.approx(4 / 128)
    assert INDEPENDENT.touched(2) == pytest.approx(1 - (124 / 128) ** 2)


def test_tokens_that_choose_alike_touch_as_many_experts_as_fewer_independent_ones():
    half = replace(GPT_OSS_A100, diversity=0.5)

    assert half.touched(100) == pytest.approx(INDEPENDENT.touched(50))


def test_the_first_decodes_cost_the_most_and_those_beyond_the_last_expert_little_more_than_their_attention():
    times = [INDEPENDENT.predict(make_decodes(number, 1000)) for number in (4, 8, 250, 254)]
    read = 4 * GPT_OSS_120B.layer_kv_bytes * (18 * 1000 + 18 * 128)
    attention = read / (GPT_OSS_A100.gpu.bandwidth * 0.9)

    steep, flat = times[1] - times[0], times[3] - times[2]

    assert steep > 20 * flat
    assert attention < flat < 1.2 * attention


def test_a_small_prefill_reads_weights_and_a_large_one_computes():
    small, large, larger = (GPT_OSS_A100.predict(make_prefill(prompts, 200)) for prompts in (1, 20, 40))
    computing = 2 * GPT_OSS_120B.active_parameters / (GPT_OSS_A100.gpu.flops * GPT_OSS_A100.efficiency.compute)

    assert small > 2 * 200 * computing
    assert larger - large == pytest.approx(4000 * computing, rel=0.1)


def test_windowed_layers_read_only_their_window():
    shape = GPT_OSS_120B
    near, far, farther = (GPT_OSS_A100.predict(make_decodes(1, context)) for context in (100, 1100, 2100))
    all_layers = 1000 * shape.kv_bytes_per_token / (GPT_OSS_A100.gpu.bandwidth * 0.9)

    assert farther - far == pytest.approx(all_layers / 2)
    assert far - near == pytest.approx(all_layers * (18 * 1000 + 18 * 28) / (36 * 1000))


@pytest.mark.parametrize(
    "broken",
    [
        {"diversity": 0.0},
        {"diversity": 1.5},
        {"efficiency": GPT_OSS_A100.efficiency.model_copy(update={"compute": 0.0})},
        {"overlap": 0.5},
    ],
)
def test_values_out_of_range_are_refused(broken):
    with pytest.raises(BadInput, match="diversity"):
        replace(GPT_OSS_A100, **broken)
