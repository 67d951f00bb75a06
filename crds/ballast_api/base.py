"""The base of every model that a user writes."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from ballast_api.kinds import mismatch
from ballast_api.rules import Rule

VALIDATIONS = "x-kubernetes-validations"
STORED = "stored"
"""In the context of a validation: the API server has admitted the resource, maybe by the rules of an older version."""


def keyed_by(field: str) -> JsonDict:
    """Return the schema of a list of objects that the API server treats as a map: `field` is unique in it."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def _carry_rules(schema: dict[str, Any], model: type[ApiModel]) -> None:
    """Add the rules to the JSON schema of a model."""
    rules: list[dict[str, Any]] = []
    for rule in model.rules:
        figures = {"messageExpression": rule.expression} if rule.expression else {}
        rules.append({**rule.admission, "message": rule.plain, **figures})
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

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions over several fields."""

    @field_validator("*", mode="before")
    @classmethod
    def _keep_kinds(cls, value: Any, info: ValidationInfo) -> Any:
        wrong = mismatch(cls.model_fields[info.field_name or ""].annotation, value)
        if wrong:
            raise ValueError(wrong)
        return value

    @model_validator(mode="after")
    def _keep_rules(self, info: ValidationInfo) -> Self:
        is_stored = info.context is not None and info.context.get(STORED, False)
        rules = (rule for rule in self.rules if not (is_stored and rule.stored))
        broken = [rule.sentence(self) for rule in rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self
