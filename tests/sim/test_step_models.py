"""Step models agree where they should, and say what a step may never do."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_d.experts import GPT_OSS_A100

from ballast_sim.errors import BadInput
from ballast_sim.replay.feasibility import within_context
from ballast_sim.replay.hardware import GPUS, gpu
from ballast_sim.replay.model_shape import SHAPES, Quantization, from_config, shape
from ballast_sim.replay.step_model import (
    REFIT_A100,
    BatchWork,
    Efficiency,
    Roofline,
    profile,
    sample_steps,
)
from ballast_sim.replay.traffic import Arrival


def mean_error(model, reference, steps):
    return sum(abs(model.predict(work) / reference.predict(work) - 1) for work in steps) / len(steps)


def test_the_roofline_of_an_a100_is_within_five_percent_of_the_published_refit():
    roofline = Roofline(SHAPES["llama-3-8b"], GPUS["a100"])

    assert mean_error(roofline, REFIT_A100, sample_steps(Random(7), 2000)) < 0.05


works = st.builds(
    BatchWork,
    num_prefill=st.integers(0, 4096),
    prefill_context=st.integers(0, 10_000_000),
    prefill_before=st.integers(0, 16_000),
    num_decode=st.integers(0, 1024),
    decode_context=st.integers(0, 1_000_000),
    num_chunks=st.integers(0, 8),
)
rooflines = [Roofline(SHAPES["qwen2.5-7b"], chip) for chip in GPUS.values()]
models = st.sampled_from([REFIT_A100, *rooflines, GPT_OSS_A100, replace(GPT_OSS_A100, diversity=1.0)])


@given(models, works, st.sampled_from([field.name for field in fields(BatchWork)]))
def test_doing_more_never_takes_less_time(model, work, field):
    more = replace(work, **{field: getattr(work, field) * 2 + 1})

    assert model.predict(more) >= model.predict(work)


@pytest.mark.parametrize("chip", GPUS)
def test_a_profile_of_a_roofline_predicts_it(chip):
    roofline = Roofline(SHAPES["llama-3-8b"], GPUS[chip])

    assert mean_error(profile(roofline), roofline, sample_steps(Random(9), 500)) < 0.05


@pytest.mark.parametrize(
    ("quantization", "share"), [(Quantization.FP8, 0.5), (Quantization.INT8, 0.5), (Quantization.INT4, 0.28)]
)
def test_quantized_weights_are_read_in_their_share_of_the_time(quantization, share):
    bare = Efficiency(step_milliseconds=0, sequence_microseconds=0)
    usual = Roofline(SHAPES["llama-2-7b"], GPUS["h100"], efficiency=bare)

    one = BatchWork(num_decode=1, decode_context=1)
    quantized = replace(usual, quantization=quantization).predict(one)

    assert quantized / usual.predict(one) == pytest.approx(share, abs=0.03)


def test_parameters_and_kv_bytes_follow_from_the_shape():
    assert SHAPES["llama-3-8b"].parameters == pytest.approx(8.03e9, rel=0.001)
    assert SHAPES["llama-3-70b"].parameters == pytest.approx(70.55e9, rel=0.001)
    assert SHAPES["bge-base"].parameters == pytest.approx(109e6, rel=0.01)
    assert SHAPES["bge-base"].kv_bytes_per_token == 0


def test_the_model_that_ships_is_read_from_its_own_configuration(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    tiny = shape(str(tmp_path))

    assert tiny.head_dim == 16
    assert tiny.parameters == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64_000


MIXTRAL = SHAPES["mixtral-8x7b"]


def test_a_mixture_of_experts_is_read_from_its_configuration():
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip

    assert from_config(config, "mixtral-8x7b") == MIXTRAL
    assert MIXTRAL.parameters == pytest.approx(46.7e9, rel=0.001)
    assert MIXTRAL.active_parameters + 2 * MIXTRAL.head_parameters == pytest.approx(12.9e9, rel=0.01)
    assert SHAPES["qwen3-30b-a3b"].parameters == pytest.approx(30.5e9, rel=0.01)


def test_a_step_of_a_mixture_reads_the_experts_that_its_tokens_touch():
    model = Roofline(MIXTRAL, GPUS["h200"])
    steps = [BatchWork(num_decode=number, decode_context=100 * number) for number in (1, 4, 64)]
    seconds = [model.predict(work) for work in steps]
    cost = profile(model)

    assert seconds[1] > 2 * seconds[0]
    assert cost.missed == pytest.approx(1 - 2 / 8)
    for work, expected in zip(steps, seconds, strict=True):
        assert cost.predict(work) == pytest.approx(expected, rel=0.05)


QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "moe_intermediate_size": 768, "vocab_size": 151936, "max_position_embeddings": 40960,
    "num_experts_per_tok": 8,
}  # fmt: skip
PHI_4 = {
    "model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "vocab_size": 100352,
    "num_key_value_heads": 10, "intermediate_size": 17920, "tie_word_embeddings": False,
}  # fmt: skip


def test_either_name_of_the_number_of_experts_is_read():
    """transformers 5 saves `num_local_experts` for both kinds of mixtures."""
    for key in ("num_experts", "num_local_experts"):
        assert from_config({**QWEN3_MOE, key: 128}, "qwen3-30b-a3b") == SHAPES["qwen3-30b-a3b"]
    with pytest.raises(BadInput, match="num_local_experts or num_experts is None; expected a whole number"):
        from_config(QWEN3_MOE, "m")


def test_phi_has_the_layout_of_llama():
    assert from_config(PHI_4, "phi-4").parameters == pytest.approx(14.66e9, rel=0.001)


def grouped(bits, kind, inputs=None):
    return {"group": {"weights": {"num_bits": bits, "type": kind}, "input_activations": inputs}}


EIGHT = {"num_bits": 8}
STATED = {
    "nothing": ({}, Quantization.NONE),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, Quantization.INT4),
    "gptq of 4 bits": ({"quant_method": "gptq", "bits": 4}, Quantization.INT4),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, Quantization.INT8),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "quant_method 'gptq'"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization.FP8),
    "modelopt of 8 bits": ({"quant_method": "modelopt", "quant_algo": "FP8"}, Quantization.FP8),
    "modelopt of 4 bits": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
    "W8A8 of floats": ({"config_groups": grouped(8, "float", EIGHT)}, Quantization.FP8),
    "W8A16 of floats": ({"config_groups": grouped(8, "float")}, Quantization.INT8),
    "W8A8": ({"config_groups": grouped(8, "int", EIGHT)}, Quantization.INT8),
    "W4A16": ({"quant_method": "compressed-tensors", "config_groups": grouped(4, "int")}, Quantization.INT4),
    "NVFP4": ({"quant_method": "compressed-tensors", "config_groups": grouped(4, "float", EIGHT)},
              "quant_method 'compressed-tensors'"),
    "layers that differ": ({"config_groups": grouped(4, "int") | {"other": grouped(8, "int")["group"]}},
                           "quant_method None"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    "no object": (["fp8"], "['fp8']"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_the_quantization_of_a_checkpoint_is_read_from_its_configuration(name):
    stated, expected = STATED[name]
    for key in ("quantization_config", "compression_config"):
        found = from_config({**PHI_4, key: stated}, "m")

        assert found.quantization == expected
        assert found.weights(Quantization.INT8) is Quantization.INT8
        if expected in set(Quantization):
            assert found.weights() is expected
        else:
            with pytest.raises(BadInput, match=r"no figures for .* Set `quantization` \(--quantization\) to none, fp8"):
                found.weights()


def test_the_quantization_that_modelopt_wrote_beside_the_configuration_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PHI_4))
    for algorithm, expected in (("FP8", Quantization.FP8), ("NVFP4", "quant_method 'NVFP4'")):
        stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))

        assert shape(str(tmp_path)).quantization == expected


def test_a_token_of_an_encoder_attends_to_all_others():
    encoder, decoder = SHAPES["bge-large"], replace(SHAPES["bge-large"], is_bert=False)
    work = BatchWork.of_prompts(2, 512)
    pairs = {
        shape.is_bert: Roofline(shape, GPUS["a100"]).operations(work) - 2 * shape.layer_parameters * 2 * 512
        for shape in (encoder, decoder)
    }
    bare = Efficiency(compute=1, bandwidth=1, kv_bandwidth=1, step_milliseconds=0, sequence_microseconds=0)
    seconds = Roofline(encoder, GPUS["a100"], efficiency=bare).predict(work)

    assert pairs == {True: 4 * 24 * 1024 * 2 * 512**2, False: 4 * 24 * 1024 * 512 * 513}
    assert seconds == pytest.approx(
        (2 * encoder.layer_parameters * 1024 + pairs[True]) / 312e12 + 2 * encoder.layer_parameters / 2.039e12
    )


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda: gpu("b9000"), "unknown GPU 'b9000'; known are a100, h100, h200, l4"),
        (lambda: shape("gpt-9"), "unknown model 'gpt-9'; known are llama-3-8b"),
        (lambda: from_config({"model_type": "mamba"}, "m"), "model_type is 'mamba'"),
        (lambda: from_config({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "m"), "layers have no experts"),
        (lambda: from_config({"model_type": "llama"}, "m"), "num_attention_heads is None; expected"),
        (
            lambda: from_config({**QWEN3_MOE, "num_experts": 4}, "m"),
            "num_experts_per_tok is 8, more than its 4 experts",
        ),
        (lambda: from_config({**PHI_4, "layer_types": ["linear_attention"]}, "m"), "layer_types has layers other than"),
    ],
)
def test_unknown_names_and_sizes_are_refused(ask, found):
    with pytest.raises(BadInput) as error:
        ask()

    assert found in str(error.value)


MISTRAL = PHI_4 | {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (MISTRAL, "4,096 tokens, its sliding window"),
        (MISTRAL | {"sliding_window": None}, "32,768 tokens"),
        (MISTRAL | {"sliding_window": 262144}, "32,768 tokens"),
        (MISTRAL | {"model_type": "phi3", "sliding_window": 2047}, "2,047 tokens, its sliding window"),
        (MISTRAL | {"model_type": "qwen2", "use_sliding_window": False}, "32,768 tokens"),
        (MISTRAL | {"model_type": "qwen2", "use_sliding_window": True}, "4,096 tokens, its sliding window"),
        (MISTRAL | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 40}, "32,768 tokens"),
        (MISTRAL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None}, "32,768 tokens"),
        (MISTRAL | {"layer_types": ["sliding_attention"] * 40, "sliding_window": None}, "32,768 tokens"),
        (MISTRAL | {"model_type": "qwen3", "layer_types": ["full_attention"] * 40}, "32,768 tokens"),
        (
            MISTRAL | {"model_type": "llama", "layer_types": ["sliding_attention"] * 40},
            "4,096 tokens, its sliding window",
        ),
    ],
)
def test_requests_are_planned_up_to_the_sliding_window(config, longest):
    found = from_config(config, "m")
    tokens = found.max_context

    assert found.longest == longest
    found.check("chat", tokens - 9, 9)
    with pytest.raises(BadInput, match=f"m takes at most {longest}"):
        found.check("chat", tokens - 8, 9)
    with pytest.raises(BadInput, match=f"than m takes, {longest}"):
        within_context(found, [Arrival(0.0, tokens - 8, 9)])
