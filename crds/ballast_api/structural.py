"""The structural schema of a pydantic model, for a CustomResourceDefinition.

Kubernetes reads OpenAPI 3.0 without references. This module replaces references by their target, and removes `null`
options, because an absent field means null. It raises an error for every keyword that it does not know.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ballast_api.base import VALIDATIONS
from ballast_api.errors import NotStructural
from ballast_api.hot import HOT

Schema = dict[str, Any]

HOT_NOTE = " Running workers apply a change."
"""Added to the description of a hot field."""

PRESERVED = {"x-kubernetes-preserve-unknown-fields": True, "x-kubernetes-map-type": "atomic"}
"""Of an object that has other fields than those that the schema names.

It has one owner. If each of its fields had one, an apply to an object of thousands of levels, such as that of the
status, would take the API server half a minute.
"""

_KEPT = (
    "type", "format", "description", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "maxProperties", "required", VALIDATIONS, "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip
_DROPPED = {"title", "examples", "default", "additionalProperties", "properties", "items", HOT}
"""Keywords that the API server does not need, or that the functions below handle."""


def structural(model: type[BaseModel]) -> Schema:
    """Return the structural schema of `model`.

    Raises:
        NotStructural: Kubernetes cannot check a part of the model.
    """
    schema = model.model_json_schema(by_alias=True)
    return _node(schema, schema.get("$defs", {}), model.__name__)


def _node(schema: Schema, definitions: Schema, where: str) -> Schema:
    schema = _resolved({key: value for key, value in schema.items() if key != "$defs"}, definitions, where)
    if schema == _ANY_SCALAR:
        return {"x-kubernetes-int-or-string": True}
    node = {key: schema[key] for key in _KEPT if key in schema}
    for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if strict in schema:
            node[bound] = schema[strict]
            node[strict] = True
    unknown = set(schema) - set(_KEPT) - _DROPPED - {"exclusiveMinimum", "exclusiveMaximum"}
    if unknown or "type" not in schema:
        raise NotStructural(
            f"{where} has {', '.join(sorted(unknown)) or 'no type'}, which a structural schema cannot express"
        )
    if "description" in node:
        node["description"] = " ".join(node["description"].split()) + (HOT_NOTE if HOT in schema else "")
    if schema["type"] == "array":
        node["items"] = _node(schema["items"], definitions, f"{where}[]")
    if schema["type"] == "object":
        node |= _members(schema, definitions, where)
    default = _pruned(schema.get("default"))
    if default not in _NOTHING:
        node["default"] = default
    return node


_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Defaults that mean the same as an absent field."""


def _pruned(default: Any) -> Any:
    """Return a default without its empty members. It has all others, because the API server checks rules on it."""
    if not isinstance(default, dict):
        return default
    members = {name: _pruned(member) for name, member in default.items()}
    return {name: member for name, member in members.items() if member not in _NOTHING}


_ANY_SCALAR: Schema = {"anyOf": [{"type": "string"}, {"type": "integer"}]}


def _resolved(schema: Schema, definitions: Schema, where: str) -> Schema:
    """Return the schema without reference and without the `null` option."""
    if "anyOf" in schema and schema != _ANY_SCALAR:
        options = [option for option in schema["anyOf"] if option != {"type": "null"}]
        if len(options) != 1:
            raise NotStructural(f"{where} may be one of {len(options)} types, and Kubernetes can check only one")
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return _resolved(options[0] | rest, definitions, where)
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolved(definitions[schema["$ref"].rsplit("/", 1)[1]] | rest, definitions, where)
    if "const" in schema:
        return {key: value for key, value in schema.items() if key != "const"} | {"enum": [schema["const"]]}
    return schema


def _members(schema: Schema, definitions: Schema, where: str) -> Schema:
    values = schema.get("additionalProperties")
    if "properties" in schema:
        known = {name: _node(member, definitions, f"{where}.{name}") for name, member in schema["properties"].items()}
        return {"properties": known} | (PRESERVED if values is True else {})
    if isinstance(values, dict):
        return {"additionalProperties": _node(values, definitions, f"{where}.*")}
    return dict(PRESERVED)


def leaves(schema: Schema, prefix: str = "") -> list[str]:
    """Return the paths of all fields of a structural schema without fields of their own. `[]` means a list entry.

    An object of which the schema names only a part, such as a volume, is a leaf.
    """
    if is_closed(schema):
        return [
            leaf
            for name, member in schema["properties"].items()
            for leaf in leaves(member, f"{prefix}.{name}" if prefix else name)
        ]
    if is_closed(schema.get("items", {})):
        return leaves(schema["items"], f"{prefix}[]")
    return [prefix]


def is_closed(schema: Schema) -> bool:
    """Return whether a structural schema names all fields of an object."""
    return "properties" in schema and not PRESERVED.items() <= schema.items()
