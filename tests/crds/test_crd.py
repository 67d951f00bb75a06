from __future__ import annotations

import pytest
from control_plane import ControlPlane

from ballast_api import crd
from ballast_api.base import ApiModel
from ballast_api.conditions import ConditionType
from ballast_api.errors import NotStructural
from ballast_api.names import CRD_NAME
from ballast_api.structural import structural


def test_a_field_of_two_types_is_refused_when_the_schema_is_made() -> None:
    class Vague(ApiModel):
        either: int | str | bool

    with pytest.raises(NotStructural, match=r"Vague\.either may be one of 3 types"):
        structural(Vague)


def test_ready_has_a_printer_column_and_a_condition_of_that_type() -> None:
    paths = [path for _, _, path, _ in crd.COLUMNS]

    assert any(f'"{ConditionType.READY}"' in path for path in paths)


@pytest.mark.envtest
def test_the_api_server_accepts_the_generated_definition(plane: ControlPlane) -> None:
    conditions = plane.kubectl("get", "crd", CRD_NAME, "-o", "jsonpath={.status.conditions[*].type}").stdout

    assert "NonStructuralSchema" not in conditions
    assert "Established" in conditions
