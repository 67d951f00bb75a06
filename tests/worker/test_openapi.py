"""The OpenAPI description is true: random requests from it, and around it, get answers that it describes."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_worker.app import create_app
from ballast_worker.openapi import document

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations()}
quick = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


def test_the_description_names_every_route(serving) -> None:
    app = create_app(serving.worker)
    with serving.client() as client:
        described = client.get("/openapi.json").json()

    assert set(described["paths"]) == {route.path.replace(":path", "") for route in app.routes}
    assert described == json.loads(json.dumps(document()))


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in sorted(OPERATIONS)),
        *((label, GenerationMode.NEGATIVE) for label in sorted(OPERATIONS) if label.startswith("POST")),
    ],
)
def test_random_requests_get_answers_that_the_description_names(serving, label, mode) -> None:
    operation = OPERATIONS[label]

    @quick
    @given(case=operation.as_strategy(mode), is_served=st.booleans())
    def ask(case, is_served) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body |= {"max_tokens": 1} | ({"model": "tiny"} if is_served else {})
            case.body.pop("max_completion_tokens", None)
        case.call_and_validate(base_url=serving.url, checks=CHECKS, timeout=60)

    ask()


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
def test_random_bytes_are_refused_as_described(serving, url) -> None:
    with serving.client() as client:

        @quick
        @given(body=st.binary(max_size=200))
        def ask(body) -> None:
            response = client.post(url, content=body)

            assert response.status_code == 400
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*WorkerConfig.model_json_schema(by_alias=True)["properties"], "uri", "port", "tenants", "name"]


@given(text=st.text(max_size=200) | st.dictionaries(st.sampled_from(FIELDS), VALUES).map(json.dumps))
def test_any_text_is_a_configuration_or_is_refused_with_sentences(text) -> None:
    try:
        config = WorkerConfig.parse(text, "a.yaml")
    except InvalidConfig as refused:
        sentences = str(refused)
    else:
        sentences = ""
        assert WorkerConfig.parse(config.dump(), "b.yaml") == config

    assert not sentences or sentences.startswith("a.yaml")
