from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane

from ballast_api import crd
from ballast_api.base import ApiModel
from ballast_api.conditions import ConditionType
from ballast_api.errors import NotStructural
from ballast_api.names import CRD_NAME
from ballast_api.structural import leaves, structural


def test_a_field_of_two_types_is_refused_when_the_schema_is_made() -> None:
    class Vague(ApiModel):
        either: int | str | bool

    with pytest.raises(NotStructural, match=r"Vague\.either may be one of 3 types"):
        structural(Vague)


def test_ready_has_a_printer_column_and_a_condition_of_that_type() -> None:
    paths = [path for _, _, path, _ in crd.COLUMNS]

    assert any(f'"{ConditionType.READY}"' in path for path in paths)


def test_a_column_and_the_scale_subresource_read_fields_that_exist() -> None:
    (version,) = crd.manifest()["spec"]["versions"]
    paths = [path for _, _, path, _ in crd.COLUMNS] + [*version["subresources"]["scale"].values()]
    own = {path.removeprefix(".") for path in paths if not path.startswith((".metadata", ".status.conditions"))}

    assert own - {*leaves(crd.schema())} == set()


def lists(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lists of objects of a schema."""
    for name, member in schema.get("properties", {}).items():
        if "properties" in member.get("items", {}):
            yield f"{path}{name}", member
        yield from lists(member, f"{path}{name}.")


def test_an_entry_with_a_name_is_once_in_its_list() -> None:
    """The API server refuses the second, which no rule of the model finds in every list."""
    named = {
        path: {"name", "secretName", "type"} & {*node["items"]["required"]}
        for path, node in lists(crd.schema())
        if "required" in node["items"]
    }
    keys = {path: {*node.get("x-kubernetes-list-map-keys", ())} for path, node in lists(crd.schema())}

    assert "spec.template.env" in named
    assert {path: keys[path] for path in named} == named


@pytest.mark.envtest
def test_the_api_server_accepts_the_generated_definition(plane: ControlPlane) -> None:
    conditions = plane.kubectl("get", "crd", CRD_NAME, "-o", "jsonpath={.status.conditions[*].type}").stdout

    assert "NonStructuralSchema" not in conditions
    assert "Established" in conditions
