"""Every file is accepted, or refused with a message. No file causes a traceback."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from every_field import EVERYTHING, SPEC, put
from hypothesis import given, settings
from hypothesis import strategies as st
from resources import make_resource

from ballast_api.base import ApiModel
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.structural import leaves
from ballast_api.vllm_arguments import OWNED, without_effect

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def read(manifest: Any) -> None:
    try:
        InferenceDeployment.read(manifest, "here")
    except InvalidConfig as error:
        assert error.problems  # noqa: PT017 - both ends are right


@pytest.mark.parametrize("leaf", leaves(SPEC))
@settings(max_examples=settings().max_examples // 20)
@given(value=JSON)
def test_any_value_in_any_field_is_accepted_or_refused_with_a_message(leaf: str, value: Any) -> None:
    manifest = deepcopy(EVERYTHING)
    put(manifest["spec"], leaf, value)

    read(manifest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"metadata": None}, "metadata", id="no metadata"),
        pytest.param({"metadata": {}}, "metadata.name: Field required", id="no name"),
        pytest.param({"spec": None}, "spec", id="no spec"),
        pytest.param({"apiVersion": "ballast.dev/v2"}, "ballast.dev/v1alpha1", id="another version"),
        pytest.param({"kind": "Deployment"}, "InferenceDeployment", id="another kind"),
        pytest.param({"sepc": {}}, "sepc: Extra inputs are not permitted", id="a slip"),
    ],
)
def test_the_message_for_a_wrong_manifest_names_what_is_missing(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        InferenceDeployment.read(EVERYTHING | change, "here")

    assert said in str(caught.value)


STORED: dict[str, dict[str, Any]] = {
    "a GPU": {"template": {"resources": {"limits": {"nvidia.com/gpu": 4}}}},
    "a slice": {"template": {"resources": {"requests": {"nvidia.com/mig-1g.10gb": 1}}}},
    "the resource that is named": {
        "gpu": {"resourceName": "example.com/a"},
        "template": {"resources": {"limits": {"example.com/a": 1}}},
    },
    "a volume of Ballast": {"template": {"volumes": [{"name": "claim-12", "emptyDir": {}}]}},
    "the claim of the model": {"model": {"uri": "pvc://c/m"}},
    "the claim of an adapter": {"model": {"uri": "hf://a/b", "adapters": [{"name": "a", "uri": "pvc://c"}]}},
    "the claim of the draft model": {
        "engine": {"speculative": {"method": "draftModel", "draftUri": "pvc://c/d"}},
    },
    "the claim of the cache": {"model": {"uri": "hf://a/b", "cache": {"persistentVolumeClaim": {"claimName": "c"}}}},
    "an argument without an effect": {"engine": {"vllm": {"args": ["--hf_token"]}}},
}


@pytest.mark.parametrize("case", STORED)
def test_a_later_rule_refuses_a_new_resource_and_not_a_stored_one(case: str) -> None:
    claim = {"template": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}}
    spec = {"model": {"uri": "hf://a/b"}} | claim | STORED[case]

    with pytest.raises(InvalidConfig, match=r"spec[a-z.]*: (template\.(resources|volumes)|engine\.vllm\.args:) "):
        make_resource(**spec)
    assert make_resource(**spec, is_stored=True).spec.model.uri == spec["model"]["uri"]
    with pytest.raises(InvalidConfig, match="Extra inputs"):
        make_resource(**spec, replica=1, is_stored=True)


def test_arguments_without_an_effect_are_named_without_their_values() -> None:
    found = without_effect(["--seed", "1", "--hf_token=secret", "--revision", "x", "--hf_token=other"])

    assert found is not None
    assert found.startswith("engine.vllm.args has --hf_token, --revision: the section model decides revision, ")
    assert "secret" not in found


def test_a_stored_fault_stays_a_fault_until_a_field_changes_that_its_rule_reads() -> None:
    def models(base: type[ApiModel]) -> list[type[ApiModel]]:
        return [base, *(each for model in base.__subclasses__() for each in models(model))]

    later = {rule for model in models(ApiModel) for rule in model.rules if rule.stored}
    unread = {
        (path, rule.message)
        for rule in later
        for path in re.findall(r"\bself\.([A-Za-z.]+)", rule.cel)
        if not any(f"{field}.".startswith(f"{path}.") or path.startswith(f"{field}.") for field in rule.stored)
    }

    assert len(later) == 4
    assert unread == set()


@pytest.mark.parametrize(
    "template",
    [
        {"resources": {"limits": {"nvidia.com/gpumem": 3000, "rdma/hca": 1, "memory": "1Gi"}}},
        {"volumes": [{"name": "models-2", "persistentVolumeClaim": {"claimName": "other"}}]},
    ],
    ids=["resources beside a GPU", "another claim"],
)
def test_resources_and_claims_that_ballast_does_not_add_are_admitted(template: dict[str, Any]) -> None:
    read = make_resource(model={"uri": "pvc://models/m"}, template=template).spec.template

    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == template


@pytest.mark.parametrize("argument", ['--kv-transfer-config={\n"kv_role": "kv_both"}', "--headless\n"])
def test_an_argument_of_several_lines_is_refused_by_its_name(argument: str) -> None:
    with pytest.raises(InvalidConfig, match="Ballast does not support headless"):
        make_resource(engine={"vllm": {"args": [argument]}})


def test_each_argument_that_a_refusal_names_is_refused() -> None:
    listed = {
        group: re.search(r"(?:decides?|sets|support) ([^.:]+?)(?: itself)?\. Remove", group.sentence) for group in OWNED
    }
    named = {group: re.split(", | and ", found[1].replace("*", "x")) for group, found in listed.items() if found}

    assert len(named) == len(OWNED) - 1, "that of the parallelism lists no argument"
    assert [name for group, names in named.items() for name in names if not group.has_name(name)] == []
