"""The policy configuration of EngineCore: from three places at the start, and from messages later."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

import pytest

from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_policy.step.budget import ONLINE_CHUNKS
from ballast_vllm.settings import FIXED, InvalidSettings, StepLimits, changed, initial, message_of

LIMITS = StepLimits(max_num_seqs=64, max_step_tokens=2048)
CONFIG = PolicyConfig(slots=8, num_blocks=100, can_suspend=False)
FILE = """
model: {uri: /models/tiny}
slots: 12
slo: {ttftMilliseconds: 700}
offline: {reservedPercent: 30}
"""


def test_a_message_sets_every_field_that_does_not_follow_from_vllm():
    config = PolicyConfig(
        slots=8,
        num_blocks=100,
        can_suspend=False,
        chunk_tokens=64,
        offline_share=0.2,
        offline_max_share=0.9,
        ttft=1.0,
        tpot=0.1,
        tenants={"a": TenantShare(2.0, max_slots=3, reserved=0.5)},
        most_risk=0.3,
        tpot_share=0.5,
        batch_window=0.01,
        max_interference=0.2,
        objective=0.99,
        watermark=1.0,
        tail_tokens=32,
    )
    other = PolicyConfig(slots=1, num_blocks=100, can_suspend=False)

    assert {
        field.name for field in fields(config) if getattr(config, field.name) == getattr(other, field.name)
    } == FIXED
    assert changed(other, message_of(config)) == config


def test_null_means_no_limit():
    assert changed(replace(CONFIG, ttft=1.0), {"ttft": None}).ttft == inf
    assert changed(replace(CONFIG, max_interference=0.1), {"max_interference": None}).max_interference is None


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"num_blocks": 5}, "unknown field 'num_blocks'"),
        ({"chunk": 5}, "unknown field 'chunk'"),
        ({"slots": None}, "slots is None"),
        ({"tpot": "fast"}, "tpot is 'fast': expected a number"),
        ({"offline_share": -0.1}, "offline_share is -0.1"),
        ({"watermark": 2}, "watermark is 2: expected a fraction of at most 1"),
        ({"offline_share": 10}, "offline_share is 10: expected a fraction of at most 1"),
        ({"slots": 2.5}, "slots is 2.5: expected a whole number"),
        ({"ttft": float("nan")}, "ttft is nan"),
        ({"objective": True}, "objective is True"),
        ({"tenants": {"a": {"share": 1}}}, "tenants: .*share"),
        ({"tenants": ["a"]}, "tenants: "),
    ],
)
def test_a_wrong_message_is_refused_with_its_field(message, sentence):
    with pytest.raises(InvalidSettings, match=sentence):
        changed(CONFIG, message)


def test_only_its_slo_limits_a_step_of_an_encoder():
    limits = replace(LIMITS, is_encoder=True)
    config = limits.fit(replace(CONFIG, slots=500, chunk_tokens=512, ttft=0.03, tpot=0.1))

    assert config.is_encoder
    assert (config.slots, config.chunk_tokens, config.ttft, config.tpot) == (64, 2048, 0.03, inf)


def test_the_latency_slo_of_the_file_is_that_of_the_whole_request(tmp_path):
    file = tmp_path / "worker.yaml"
    file.write_text("model: {uri: /models/tiny}\nslo: {latencyMilliseconds: 30}\n")
    config = initial({"ballast": {"config": str(file)}}, LIMITS, num_blocks=100, block_tokens=16)

    assert (config.ttft, config.tpot) == (0.03, inf)


def test_slots_and_chunk_stay_within_a_step_of_vllm():
    config = LIMITS.fit(replace(CONFIG, slots=500, chunk_tokens=100_000))

    assert config.slots == 64
    assert config.slots + ONLINE_CHUNKS * config.chunk_tokens <= 2048


def test_drafts_take_their_part_of_a_step():
    config = replace(LIMITS, num_draft_tokens=7).fit(replace(CONFIG, slots=64, chunk_tokens=100_000))

    assert 64 * 8 + ONLINE_CHUNKS * config.chunk_tokens <= 2048


def test_without_a_configuration_vllm_decides_the_slots():
    config = initial({}, LIMITS, num_blocks=10, block_tokens=32)

    assert (config.slots, config.num_blocks, config.block_tokens, config.can_suspend) == (64, 10, 32, False)


def test_a_field_of_vllm_s_additional_config_comes_before_the_file(tmp_path):
    path = tmp_path / "worker.yaml"
    path.write_text(FILE)

    stated = {"config": str(path), "offline_share": 0.5}
    config = initial({"ballast": stated}, LIMITS, num_blocks=10, block_tokens=32)

    assert (config.slots, config.ttft, config.offline_share) == (12, 0.7, 0.5)
    assert stated == {"config": str(path), "offline_share": 0.5}, "vLLM hashes its configuration"


def test_the_share_of_experts_stays_through_a_hot_change():
    config = initial(None, LIMITS, num_blocks=10, block_tokens=32, expert_share=4 / 64)

    assert LIMITS.fit(changed(config, {"slots": 3})).expert_share == 4 / 64


def test_a_variable_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "worker.yaml"
    path.write_text(FILE)
    monkeypatch.setenv("BALLAST_CONFIG", str(path))

    assert initial(None, LIMITS, num_blocks=10, block_tokens=32).offline_share == 0.3
