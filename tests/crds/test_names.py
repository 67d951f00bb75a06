from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resources import make_resource

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import MOST_NAME_CHARACTERS, label_value, pod_labels, selector
from ballast_api.replicas import GpuRequest


@given(st.text(max_size=300))
def test_any_text_becomes_a_label_value_that_kubernetes_takes(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", label_value(text))


def test_a_selector_is_part_of_what_pods_carry() -> None:
    assert selector("chat").items() <= pod_labels("chat", "org/model").items()


def test_the_longest_name_leaves_room_for_a_pods_hash() -> None:
    assert MOST_NAME_CHARACTERS + len("-5d4f8c7b9c") <= 63


def test_a_served_name_is_the_last_part_of_the_address_without_its_revision() -> None:
    def served(uri: str, **model: str) -> str:
        return read({"uri": uri} | model).spec.served_name

    assert served("hf://Qwen/Qwen3-8B@v2") == served("hf://Qwen/Qwen3-8B@refs/pr/1/") == "Qwen3-8B"
    assert served("s3://bucket/models/llama/") == "llama"
    assert served("hf://a/b", servedName="mine") == "mine"
    assert served("hf://a/b", servedName="qwen2.5:7b") == served("pvc://models/qwen2.5:7b") == "qwen2.5:7b"


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "hf://a/b"},
        {"uri": "hf://a/b@v1/"},
        {"uri": "hf://a/b@feature/sql"},
        {"uri": "hf://a/b", "servedName": "org/b"},
        {"uri": "s3://bucket/a@v1//"},
        {"uri": "s3://bucket"},
        {"uri": "pvc://claim/x@y"},
        {"uri": "pvc://claim/x@y/z"},
        {"uri": "file:///models/llama"},
    ],
    ids=str,
)
def test_no_adapter_and_no_alias_has_the_name_that_is_served(model: dict[str, str]) -> None:
    def with_adapter(name: str, *aliases: str) -> InferenceDeployment:
        return read(model | {"adapters": [{"name": name, "uri": "hf://a/adapter"}], "aliases": aliases})

    served = read(model).spec.served_name

    assert with_adapter(f"{served}-sql").spec.served_name == served
    with pytest.raises(InvalidConfig, match="an adapter with the name of the model"):
        with_adapter(served)
    assert with_adapter("sql", f"{served}-old", "org/old").spec.served_name == served
    for alias in (served, "sql"):
        with pytest.raises(InvalidConfig, match="contains the name of the model or of an adapter"):
            with_adapter("sql", "org/old", alias)


def read(model: dict[str, Any]) -> InferenceDeployment:
    return make_resource(model=model)


def test_a_worker_has_longer_to_start_with_vllm_which_compiles_the_model() -> None:
    specs = [read({"uri": "hf://a/b"}).spec.model_copy(update={"gpu": GpuRequest(count=count)}) for count in (0, 1)]

    assert [spec.startup_seconds for spec in specs] == [600, 1800]
