"""The base of every model that a user writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from ballast_api.kinds import mismatch
from ballast_api.rules import Later, Rule

VALIDATIONS = "x-kubernetes-validations"
LATER = "x-ballast-later"
"""Marks a field in the JSON schema that is always refused."""


def keyed_by(field: str) -> JsonDict:
    """Return the schema of a list of objects that the API server treats as a map: `field` is unique in it."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def _carry_rules(schema: dict[str, Any], model: type[ApiModel]) -> None:
    """Add the rules and the fields that are always refused to the JSON schema of a model."""
    rules: list[dict[str, str]] = []
    for name, later in model.later.items():
        field = to_camel(name)
        schema["properties"][field] = {"type": later.kind, "description": f"Refused: {later.sentence}.", LATER: True}
        rules.append({"rule": f"!has(self.{field})", "message": later.message(field)})
    for rule in model.rules:
        figures = {"messageExpression": rule.expression} if rule.expression else {}
        rules.append({"rule": rule.cel, "message": rule.plain, **figures})
    if rules:
        schema[VALIDATIONS] = rules


class ApiModel(BaseModel):
    """A frozen model with camelCase names in YAML and JSON. It refuses unknown fields and infinite numbers."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,  # JSON has neither infinity nor NaN
        use_attribute_docstrings=True,
        json_schema_extra=_carry_rules,
    )

    later: ClassVar[Mapping[str, Later]] = {}
    """Fields that this version refuses because it does not support them yet, by Python name."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions over several fields."""

    @field_validator("*", mode="before")
    @classmethod
    def _keep_kinds(cls, value: Any, info: ValidationInfo) -> Any:
        wrong = mismatch(cls.model_fields[info.field_name or ""].annotation, value)
        if wrong:
            raise ValueError(wrong)
        return value

    @model_validator(mode="before")
    @classmethod
    def _refuse_later(cls, data: Any) -> Any:
        if isinstance(data, dict):
            found = [name for name in cls.later if name in data or to_camel(name) in data]
            if found:
                raise ValueError("; ".join(cls.later[name].message(to_camel(name)) for name in found))
        return data

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [rule.sentence(self) for rule in self.rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self
