"""A setting or a version that Ballast does not support is refused with a sentence, before any request."""

from __future__ import annotations

import json

import pytest
from bare_core import BareCore
from vllm.config import ECTransferConfig, KVTransferConfig

from ballast_vllm.refusals import CHECKS, check_config
from ballast_vllm.serve import check, parsed
from ballast_vllm.versions import UnsupportedVllm, check_version

ARGUMENTS = {
    "scheduling_policy": ("priority", "scheduling_policy is not fcfs"),
    "long_prefill_token_threshold": (64, "long_prefill_token_threshold is set"),
    "watermark": (0.1, "watermark is set"),
    "prefill_schedule_interval": (4, "prefill_schedule_interval is above 1"),
    "max_num_active_seqs": (4, "max_num_active_seqs is set"),
}
"""Arguments of vLLM that contradict the policy."""
FIELDS = {
    "parallel_config.pipeline_parallel_size": (2, "pipeline_parallel_size is above 1"),
    "parallel_config.data_parallel_size": (2, "data_parallel_size is above 1"),
    "parallel_config.decode_context_parallel_size": (2, "Context parallelism is on"),
    "parallel_config.prefill_context_parallel_size": (2, "Context parallelism is on"),
    "kv_transfer_config": (KVTransferConfig(), "A KV connector is configured"),
    "ec_transfer_config": (ECTransferConfig(), "An encoder cache connector is configured"),
    "model_config.is_diffusion": (True, "The model is a diffusion model"),
    "cache_config.mamba_cache_mode": ("align", "mamba_cache_mode is align"),
}
"""Fields of vLLM's configuration for features that are not tested."""


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_setting_that_contradicts_the_policy_is_refused(tiny_model, argument):
    value, sentence = ARGUMENTS[argument]

    with pytest.raises(UnsupportedVllm, match=sentence):
        BareCore(tiny_model, **{argument: value})


@pytest.mark.parametrize("field", FIELDS)
def test_an_untested_feature_is_refused(tiny_model, field):
    value, sentence = FIELDS[field]
    config = BareCore(tiny_model).scheduler.vllm_config
    section, _, name = field.rpartition(".")
    owner = getattr(config, section) if section else config
    assert hasattr(owner, name), "vLLM has no such field, so a change of it would prove nothing"

    setattr(owner, name, value)

    with pytest.raises(UnsupportedVllm, match=sentence):
        check_config(config)


def test_each_refusal_has_a_case():
    tried = tuple(sentence for _, sentence in (*ARGUMENTS.values(), *FIELDS.values()))

    assert [sentence for _, sentence in CHECKS if not sentence.startswith(tried)] == []


MAMBA = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 512,
}
"""A model with Mamba layers and layers with attention."""


@pytest.mark.parametrize("argument", [None, "--mamba-cache-mode=none"])
def test_mamba_layers_with_prefix_caching_are_refused_before_loading(tmp_path, argument):
    (tmp_path / "config.json").write_text(json.dumps(MAMBA))
    arguments = ["--dtype=float32", "--skip-tokenizer-init", *filter(None, [argument])]

    with pytest.raises(UnsupportedVllm, match=r"set engine\.prefixCache to false"):
        check(parsed([str(tmp_path), *arguments], []))
    check(parsed([str(tmp_path), *arguments, "--no-enable-prefix-caching"], []))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.33.1+cpu", "1.0.0"])
def test_another_version_is_refused(version):
    with pytest.raises(UnsupportedVllm, match=rf"vLLM {version.replace('+', '.')} is installed"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1"])
def test_a_supported_version_is_accepted(version):
    check_version(version)
