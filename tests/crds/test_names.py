from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import MOST_NAME_CHARACTERS, label_value, pod_labels, selector


@given(st.text(max_size=300))
def test_any_text_becomes_a_label_value_that_kubernetes_takes(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", label_value(text))


def test_a_selector_is_part_of_what_pods_carry() -> None:
    assert selector("chat").items() <= pod_labels("chat", "org/model").items()


def test_the_longest_name_leaves_room_for_a_pods_hash() -> None:
    assert MOST_NAME_CHARACTERS + len("-5d4f8c7b9c") <= 63


def test_a_served_name_is_the_last_part_of_the_address_without_its_revision() -> None:
    def served(uri: str, **model: str) -> str:
        manifest = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"}}
        resource = InferenceDeployment.read(manifest | {"spec": {"model": {"uri": uri} | model}}, "here")
        return resource.spec.served_name

    assert served("hf://Qwen/Qwen3-8B@v2") == "Qwen3-8B"
    assert served("s3://bucket/models/llama/") == "llama"
    assert served("hf://a/b", servedName="mine") == "mine"
