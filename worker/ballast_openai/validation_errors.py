"""Errors of pydantic as sentences."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from ballast_openai.errors import InvalidBody, describe

_WANTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "{max_length} or fewer characters",
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} or fewer entries",
    "literal_error": "{expected}",
}
"""The type of pydantic's error -> the wanted value."""


def _path(location: tuple[int | str, ...]) -> str | None:
    text = ""
    for part in location:
        # The client chooses a field's name, which may be long, or contain lone surrogates.
        text += f"[{part}]" if isinstance(part, int) else f".{part[:80].encode(errors='backslashreplace').decode()}"
    return text.removeprefix(".") or None


def translate(error: ErrorDetails) -> InvalidBody:
    """Return an error of pydantic as one sentence. The kind `ballast` is for errors of the models' own checks."""
    kind = error["type"]
    # pydantic refuses the name of an unknown field with a lone surrogate as text, and reports the name as the input.
    field = _path((*error["loc"], error["input"]) if kind == "string_unicode" else error["loc"])
    match kind:
        case "ballast":
            context = error.get("ctx", {})
            field = ".".join(filter(None, (field, context.get("field"))))
            return InvalidBody(field, f"{field}: {context['text']}")
        case "missing":
            text = f"{field}: found nothing, expected a value: the field is required"
            return InvalidBody(field, text, "missing_required_parameter")
        case "extra_forbidden" | "string_unicode":
            text = f"{field}: found an unknown field, expected only known fields: remove it or check its name"
            return InvalidBody(field, text, "unknown_parameter")
    if kind in {"too_short", "too_long"} and isinstance(error["input"], str):
        kind = f"string_{kind}"
    template = _WANTED.get(kind)
    wanted = template.format(**error.get("ctx", {})) if template else error["msg"]
    code = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    return InvalidBody(field, f"{field}: found {describe(error['input'])}, expected {wanted}", code)
