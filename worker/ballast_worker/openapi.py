"""The OpenAPI description of the HTTP API, from the models that read the request bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from ballast_openai.body import CHAT_URL, COMPLETIONS_URL, ChatBody, CompletionBody
from ballast_worker.http_exchange import compact
from ballast_worker.tenancy import CLASS_HEADER, PRIORITY_HEADER, TENANT_HEADERS, TPOT_HEADERS, TTFT_HEADERS
from ballast_worker.version import installed

_REFUSALS = {
    "400": "The request is wrong. The message names the field, and what was expected.",
    "401": "The worker requires an API key.",
    "403": "The tenant is not declared.",
    "404": "The worker serves another model.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "429": "A queue is full, or too many bodies are being received. The header `retry-after` has the seconds to wait.",
    "431": "The headers are too large.",
    "500": "The engine failed.",
    "503": "The worker shuts down, or has too many connections.",
}
_HEADERS = {
    TENANT_HEADERS[0]: "Tenant, unless an API key names it.",
    PRIORITY_HEADER: "Whole number; higher is more important.",
    CLASS_HEADER: "`online` or `offline`.",
    TTFT_HEADERS[0]: "Maximum milliseconds to the first token.",
    TPOT_HEADERS[0]: "Maximum milliseconds per token after the first.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def description() -> bytes:
    """Return the description as JSON."""
    return compact(document())


def document() -> dict[str, Any]:
    """Return the description: OpenAPI 3.1."""
    models = [(CompletionBody, "validation"), (ChatBody, "validation")]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ballast worker", "version": installed("ballast") or "unknown"},
        "paths": {
            COMPLETIONS_URL: {"post": _generate("CompletionBody", "text_completion")},
            CHAT_URL: {"post": _generate("ChatBody", "chat.completion")},
            "/v1/models": {"get": _read("The served model, once for each of its names.", "401")},
            "/v1/models/{name}": {"get": _read("The served model.", "401", "404") | {"parameters": [_NAME]}},
            "/health": {"get": _read("The worker works; 503 if only a restart helps.", "503")},
            "/ready": {"get": _read("The worker accepts requests; 503 while it does not.", "503")},
            "/metrics": {"get": _read("Metrics without tenants.", media="text/plain")},
            "/version": {"get": _read("The version of Ballast.")},
            "/ballast/status": {"get": _read("Slots, KV blocks, rates and SLOs of the worker.")},
            "/openapi.json": {"get": _read("This description.")},
        },
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _generate(body: str, kind: str) -> dict[str, Any]:
    whole = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {"object": {"const": kind}, "choices": {"type": "array", "minItems": 1, "maxItems": 1}},
    }
    content = {"application/json": {"schema": whole}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "parameters": [
            {"name": name.decode(), "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in _HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        },
        "responses": {
            "200": {"description": "The answer, as server-sent events if `stream` is true.", "content": content},
            **{status: _refusal(status) for status in _REFUSALS},
        },
    }


def _read(text: str, *refusals: str, media: str = "application/json") -> dict[str, Any]:
    schema = {"type": "object" if media == "application/json" else "string"}
    unhealthy = {"503": {"description": "Not now.", "content": {"application/json": {"schema": {"type": "object"}}}}}
    return {
        "responses": {
            "200": {"description": text, "content": {media: {"schema": schema}}},
            **{status: unhealthy[status] if status in unhealthy else _refusal(status) for status in refusals},
        }
    }


def _refusal(status: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": _REFUSALS[status], "content": {"application/json": {"schema": schema}}}
