from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig

MINIMAL = "model:\n  uri: /models/tiny\n"


def test_a_model_is_all_that_a_configuration_needs() -> None:
    config = WorkerConfig.parse(MINIMAL, "here")

    assert config.model.uri == "/models/tiny"
    assert config.queue_name == "local/ballast"
    assert config.offline.reserved_percent == 10


@given(
    slots=st.none() | st.integers(1, 4096),
    reserved=st.floats(0, 50),
    ttft=st.floats(1, 10_000),
    tenants=st.lists(st.from_regex(r"\A[a-z]{1,8}\Z"), unique=True, max_size=4),
)
def test_a_dumped_configuration_reads_back_equal(
    slots: int | None, reserved: float, ttft: float, tenants: list[str]
) -> None:
    config = WorkerConfig.model_validate(
        {
            "model": {"uri": "/models/tiny"},
            "slots": slots,
            "slo": {"ttftMilliseconds": ttft},
            "offline": {"reservedPercent": reserved, "tenants": [{"name": name} for name in tenants]},
        }
    )

    assert WorkerConfig.parse(config.dump(), "dump") == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "model: Field required", id="empty"),
        pytest.param("model: [", "while parsing", id="not YAML"),
        pytest.param("slots: 4", "model: Field required", id="no model"),
        pytest.param(MINIMAL + "slots: many", "slots: Input should be a valid integer", id="wrong type"),
        pytest.param(MINIMAL + "slots: true", "slots: expected a number, not true or false (found True)", id="yes"),
        pytest.param(MINIMAL + "slots: '4'", "slots: expected a number, not text. Remove the quotes", id="quoted"),
        pytest.param(MINIMAL + "engine: {prefixCache: 1}", "expected true or false, not a number", id="one for true"),
        pytest.param(MINIMAL + "engine: {prefixCache: 'on'}", "not text. Remove the quotes", id="quoted true"),
        pytest.param(MINIMAL + "slot: 4", "slot: Extra inputs are not permitted (found 4)", id="unknown field"),
        pytest.param(MINIMAL + "offline: {reservedPercent: 120}", "less than or equal to 100", id="over 100 %"),
        pytest.param(
            MINIMAL + "offline: {reservedPercent: 50, maxPercent: 20}",
            "offline.reservedPercent (50) is above offline.maxPercent (20). Lower",
            id="reservation above the maximum",
        ),
        pytest.param(
            MINIMAL + "offline: {tenants: [{name: a}, {name: a}]}", "contains a more than once", id="tenant twice"
        ),
        pytest.param(MINIMAL + "engine: {quantization: int8}", "need vLLM, and the native engine", id="int8"),
        pytest.param(MINIMAL + "engine: {kvDtype: int8}", "need vLLM, and the native engine", id="int8 KV"),
        pytest.param(MINIMAL + "engine: {speculative: {method: ngram}}", "engine.speculative and", id="speculation"),
        pytest.param(MINIMAL + "runtime: {tensorParallel: 2}", "(2) is above 1, and the native", id="several ranks"),
        pytest.param(MINIMAL + "  aliases: [a, a]", "model.aliases contains a more than once", id="alias twice"),
        pytest.param(
            MINIMAL + "  adapters: [{name: a, uri: file:///a}, {name: a, uri: file:///b}]",
            "model.adapters contains a more than once",
            id="adapter twice",
        ),
        pytest.param(
            MINIMAL + "  adapters: [{name: a, uri: file:///a, tenants: []}]",
            "tenants of an adapter is an empty list",
            id="adapter of no tenant",
        ),
        pytest.param(MINIMAL + "offline: {resultsDays: .inf}", "should be a finite number (found inf)", id="infinite"),
        pytest.param(MINIMAL + "runtime: {port: 99999}", "runtime.port", id="port"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        WorkerConfig.parse(text, "here.yaml")

    assert said in str(caught.value)
    assert "here.yaml" in str(caught.value)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        WorkerConfig.parse(MINIMAL + "slots: 0\nslo: {ttftMilliseconds: -1}", "here")

    assert len(caught.value.problems) == 2


def test_a_missing_file_is_an_invalid_configuration(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        WorkerConfig.load(tmp_path / "none.yaml")
