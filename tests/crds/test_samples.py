"""The samples of the documentation are accepted, or refused with the words of their first line, everywhere."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane
from every_field import SPEC, filled
from jsonschema import Draft4Validator

import ballast_api
from ballast_api import crd
from ballast_api.base import VALIDATIONS
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import API_VERSION, KIND
from ballast_api.structural import is_closed, leaves

SAMPLES = Path(ballast_api.__file__).parents[2] / "docs" / "samples"
GOOD = sorted(SAMPLES.glob("*.yaml"))
BAD = sorted((SAMPLES / "invalid").glob("*.yaml"))


def objects(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == KIND]


def expected(path: Path) -> dict[str, str]:
    """Return the messages for a bad sample: `error` of the model, and `server` if the API server has its own."""
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    said = dict(line.split(": ", 1) for line in lines)
    return {"server": said["error"]} | said


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema that refuses unknown fields, as the API server does for kubectl."""
    schema = deepcopy(schema)
    for member in [*schema.get("properties", {}).items()]:
        schema["properties"][member[0]] = closed(member[1])
    if is_closed(schema):
        schema["additionalProperties"] = False
    if "items" in schema:
        schema["items"] = closed(schema["items"])
    return schema


def schema_of_specs() -> Draft4Validator:
    return Draft4Validator(closed(crd.schema()["properties"]["spec"]))


def rules(schema: dict[str, Any]) -> list[str]:
    """Return the messages of all rules in the schema."""
    own = [rule["message"] for rule in schema.get(VALIDATIONS, ())]
    inside = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    return own + [message for member in inside for message in rules(member)]


def without_figures(text: str) -> str:
    return re.sub(r" \([^ )]+\)", "", text)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_sample_is_accepted(path: Path) -> None:
    for manifest in objects(path):
        read = InferenceDeployment.read(manifest, path.name)
        problems = [error.message for error in schema_of_specs().iter_errors(manifest["spec"])]

        assert read.metadata.name == manifest["metadata"]["name"]
        assert problems == []


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_sample_is_refused_with_the_words_of_its_first_line(path: Path) -> None:
    (manifest,) = objects(path)

    with pytest.raises(InvalidConfig) as caught:
        InferenceDeployment.read(manifest, path.name)

    assert expected(path)["error"] in str(caught.value)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_types_and_bounds_refuse_what_no_rule_refuses(path: Path) -> None:
    (manifest,) = objects(path)
    words = without_figures(expected(path)["server"])
    is_ruled = words in rules(crd.schema()) or words == "Duplicate value"  # the key of a list, which JSON Schema lacks

    assert is_ruled == schema_of_specs().is_valid(manifest["spec"])


def test_every_rule_has_a_bad_sample() -> None:
    shown = {without_figures(expected(path)["error"]) for path in BAD}

    assert set(rules(crd.schema())) - shown == set()


def test_a_variable_that_the_documentation_names_for_the_template_is_admitted() -> None:
    root = SAMPLES.parents[1]
    paths = [*(root / "docs").rglob("*.md"), *(root / "worker").rglob("*.py")]
    text = " ".join(" ".join(path.read_text().split()) for path in paths)
    names = set(re.findall(r"([A-Z][A-Z0-9_]+)(?:=\w+)?`? in `?template\.env", text))
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}}
    env = [{"name": name, "value": "5"} for name in sorted(names)]

    InferenceDeployment.read(manifest | {"spec": {"model": {"uri": "hf://a/b"}, "template": {"env": env}}}, "here")
    assert {"BALLAST_KEEP_FREE_PERCENT", "VLLM_USE_V2_MODEL_RUNNER"} <= names


def test_the_samples_of_every_field_have_every_field() -> None:
    (manifest,), (vllm,), (ray,) = (objects(SAMPLES / f"{name}.yaml") for name in ("everything", "vllm", "ray"))
    given, by_vllm, by_ray = (dict(filled(sample["spec"], SPEC)) for sample in (manifest, vllm, ray))
    given_by_vllm = {leaf for leaf in by_vllm if needs_vllm(leaf)}
    given_by_ray = {leaf for leaf in by_ray if leaf.startswith("runtime.ray.")}
    exclusive = {
        "engine.attention",  # with the native engine only, as the next one
        "engine.blockTokens",
        "gpu.resourceClaimTemplate",  # beside gpu.resourceName
        "model.cache.persistentVolumeClaim.claimName",  # beside model.cachePath, as the next two
        "model.cache.volumeClaimTemplate",
        "model.sizeLimitGibibytes",
        "queueAccess.submitters[].secretName",  # beside redis, as the next one
        "queueAccess.submitters[].tenant",
        "slo.latencyMilliseconds",  # beside slo.ttftMilliseconds
    }

    assert set(leaves(SPEC)) - exclusive == set(given) | given_by_vllm | given_by_ray


def needs_vllm(path: str) -> bool:
    """Return whether a leaf belongs to vLLM alone."""
    return path.startswith(("model.adapters[]", "engine.vllm.", "engine.speculative.")) or path in {
        "engine.quantization",
        "engine.kvDtype",
    }


@pytest.mark.envtest
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_the_api_server_accepts_a_sample(plane: ControlPlane, namespace: str, path: Path) -> None:
    done = plane.kubectl("apply", "-n", namespace, "-f", str(path), check=False)

    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.envtest
@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_the_api_server_refuses_a_bad_sample_with_the_same_words(
    plane: ControlPlane, namespace: str, path: Path
) -> None:
    done = plane.kubectl("apply", "-n", namespace, "-f", str(path), check=False)

    assert done.returncode == 1
    assert expected(path)["server"] in done.stderr
