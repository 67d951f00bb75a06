"""The cost model knows the experts of vLLM's model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from bare_core import BareCore

from ballast_policy.learning.cost import CostModel, Fit, StepWork
from ballast_vllm.scheduler import expert_share

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def has_experts(fit: Fit) -> bool:
    """Return whether a fit explains step times by the experts that the steps read, if that is their cause."""
    cost = CostModel(k0=4e-3, k5=20e-3, missed=1 - 4 / 64)
    for num_decode in range(1, 65):
        work = StepWork(num_decode=num_decode, decode_context=100 * num_decode)
        fit.add(work, cost.predict(work))
    return fit.refit().k5 > 0


@pytest.mark.parametrize(("per_token", "share"), [(4, 4 / 64), (64, 0.0)], ids=["some experts", "all experts"])
def test_a_mixture_of_experts_is_fitted_with_its_share_of_experts(tmp_path, per_token, share):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_experts": 64, "num_experts_per_tok": per_token}))
    scheduler = BareCore(tmp_path, skip_tokenizer_init=True).scheduler
    host = scheduler.driver.host

    assert host.config.expert_share == share
    assert has_experts(host.fit) is (share > 0)

    scheduler.ballast_configure({"slots": 3})

    assert (host.config.slots, host.config.expert_share) == (3, share)


def test_experts_in_a_section_of_their_own_are_found(tmp_path):
    sizes = {"d_model": 256, "n_heads": 8, "n_layers": 2, "max_seq_len": 2048, "vocab_size": 512}
    sections = {"attn_config": {"kv_n_heads": 4}, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}
    config = {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", **sizes, **sections}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert BareCore(tmp_path, skip_tokenizer_init=True).scheduler.driver.host.config.expert_share == 4 / 16


def test_a_mixture_without_a_number_of_experts_per_token_is_logged(caplog):
    model = SimpleNamespace(get_num_experts_per_tok=lambda: 0, get_num_experts=lambda: 64, hf_text_config=None)

    assert expert_share(model) == 0
    assert [record.fields for record in caplog.records] == [{"experts": 64}]


def test_a_dense_model_is_fitted_without_experts(tiny_model):
    host = BareCore(tiny_model).scheduler.driver.host

    assert host.config.expert_share == 0
    assert not has_experts(host.fit)
