"""The base of every model that a user writes: camelCase outside, nothing unknown, nothing mutable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

from ballast_api.rules import Later, Rule


class ApiModel(BaseModel):
    """Frozen, camelCase in YAML and JSON, numbers finite, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,  # JSON, in which settings travel on, knows neither
        use_attribute_docstrings=True,
    )

    later: ClassVar[Mapping[str, Later]] = {}
    """Fields that the design names and this version cannot serve, by Python name."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What must hold across fields."""

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
