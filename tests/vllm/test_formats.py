"""The libraries of structured output inside EngineCore."""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch
from bare_core import BareCore
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.generate.base.protocol import validate_structural_tag_payload
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from ballast_vllm.formats import MOST_TEXT
from ballast_vllm.internals import Formats, check_format, limit_formats, take_formats

LIMIT = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(1000)}}
"""A schema above a limit of llguidance: it has too many ways to go on."""


def made(model, **arguments) -> StructuredOutputManager:
    """Return the manager of an EngineCore behind a server of Ballast."""
    core = BareCore(model, **arguments)
    EngineCore.ballast_configure(core, {})
    return core.scheduler.structured_output_manager


@pytest.fixture(scope="module")
def manager(tiny_model):
    return made(tiny_model)


@pytest.fixture(scope="module", autouse=True)
def limited():
    """Check formats as the API server does."""
    limit_formats()


@pytest.fixture
def answer(manager):
    """`answer(kind, format, text)` returns how many characters of the text have the format, and whether it may end."""
    ids = manager.tokenizer.get_vocab()

    def accepted(kind: str, form: str, text: str) -> tuple[int, bool]:
        grammar = manager.backend.compile_grammar(StructuredOutputOptions[kind], form)
        masks = manager.backend.allocate_token_bitmask(2)

        def may_follow(token: str) -> bool:
            grammar.fill_bitmask(masks, 1)
            return bool(masks[1][ids[token] // 32] >> (ids[token] % 32) & 1)

        def is_accepted(token: str) -> bool:
            return may_follow(token) and grammar.accept_tokens("r", [ids[token]])

        num_accepted = len(list(takewhile(is_accepted, text)))
        return num_accepted, is_accepted("</s>")

    return accepted


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "end": ">", "content": None}}
TAG["format"]["content"] = {"type": "json_schema", "json_schema": OBJECT}


@pytest.mark.parametrize(
    ("kind", "form", "text", "expected"),
    [
        pytest.param("JSON", json.dumps(OBJECT), '{"a":7}', (7, True), id="a schema"),
        pytest.param("JSON", json.dumps(LIMIT), '{"k0":"x"}', (0, False), id="a schema above a limit"),
        pytest.param("CHOICE", '["yes","no"]', "no", (2, True), id="a choice"),
        pytest.param("REGEX", "[0-9]{2}", "12", (2, True), id="a regular expression"),
        pytest.param("GRAMMAR", 'root ::= "a" [0-9]+\n', "a12", (3, True), id="a grammar"),
        pytest.param("GRAMMAR", 'start: "a" /[0-9]+/\n', "a1b", (2, True), id="a grammar in the other syntax"),
        pytest.param("STRUCTURAL_TAG", json.dumps(TAG), '<{"a":7}>', (9, True), id="a structural tag"),
    ],
)
def test_each_kind_of_structured_output_allows_what_has_its_format(answer, kind, form, text, expected):
    assert answer(kind, form, text) == expected


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
TAGGED = [{**A, "properties": {"a": {"const": tag}}, "required": ["a"]} for tag in "xy"]
TEXT, TEXT_OF_B = '{"a":7,"b":8}', '{"b":8,"a":7}'


@pytest.mark.parametrize(
    ("schema", "text", "num_accepted"),
    [
        pytest.param(A, TEXT, 6, id="a property that the schema lacks"),
        pytest.param({**A, "additionalProperties": True}, TEXT, 13, id="other properties that the schema allows"),
        pytest.param({"items": A}, f"[{TEXT}]", 7, id="an object inside"),
        pytest.param({**A, "required": ["a", "b"]}, TEXT, 13, id="a required name without a property"),
        pytest.param({"allOf": [A, B]}, TEXT, 13, id="parts of one object"),
        pytest.param(
            {"$defs": {"B": B}, "allOf": [{"$ref": "#/$defs/B"}], **A}, TEXT_OF_B, 13, id="a base and properties"
        ),
        pytest.param({"$defs": {"B": B}, "$ref": "#/$defs/B", **A}, TEXT_OF_B, 13, id="a reference and properties"),
        pytest.param({**A, "anyOf": [B, {"required": ["a"]}]}, TEXT, 13, id="alternatives and properties"),
        pytest.param({**A, "enum": [{"a": 7, "b": 8}]}, TEXT, 13, id="objects and properties"),
        pytest.param({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, TEXT, 6, id="only a base"),
        pytest.param({"anyOf": [A, {"type": "null"}]}, TEXT, 6, id="an optional object"),
        pytest.param({"oneOf": TAGGED}, '{"a":"y","b":1}', 8, id="alternatives with a tag"),
        pytest.param({"oneOf": [B, {**A, "required": ["a"]}]}, '{"b":1,"a":2}', 6, id="alternatives without a tag"),
        pytest.param({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, "2", None, id="alternatives that overlap"),
        pytest.param({"not": {"type": "string"}}, "2", None, id="a negation"),
        pytest.param({"if": A, "then": B}, "2", None, id="a condition"),
        pytest.param({**A, "dependentRequired": {"a": ["b"]}}, "2", None, id="a dependency"),
        pytest.param({"type": "object", "propertyNames": {"maxLength": 1}}, "2", None, id="names of properties"),
        pytest.param({"type": "string", "pattern": "^(?=a)"}, "2", None, id="look-around"),
        pytest.param({"type": "integer", "minimum": 2, "maximum": 1}, "2", None, id="a schema without a value"),
        pytest.param({"properties": 7, "required": 7, "allOf": 7}, "2", None, id="a schema with wrong types"),
        pytest.param(True, "2", None, id="no object"),
        pytest.param([], "2", None, id="no schema"),
    ],
)
def test_a_schema_that_passes_the_check_compiles(manager, answer, schema, text, num_accepted):
    config = manager.vllm_config
    for form in (schema, json.dumps(schema)):
        if not isinstance(form, dict | str):
            continue  # vLLM takes only objects and texts
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=form))
        passes = compiles = True
        try:
            check_format(params, config.model_config, config.structured_outputs_config, manager.tokenizer)
        except VLLMValidationError:
            passes = False
        kind, compiled = get_structured_output_key(params.structured_outputs)
        try:
            compiles = not manager.backend.compile_grammar(kind, compiled).ll_matcher.is_error()
        except ValueError:
            compiles = False

        assert passes == compiles == (num_accepted is not None)
        assert not passes or answer(kind.name, compiled, text)[0] == num_accepted


def chain(length: int, link) -> dict:
    """Return a schema with names that lead to each other. `link` makes a definition of the reference in it."""
    names = {f"a{number}": link({"$ref": f"#/$defs/a{number + 1}"}) for number in range(length)}
    return {"$defs": {**names, f"a{length}": {"type": "array"}}, "$ref": "#/$defs/a0"}


def rules(length: int, name: str, line: str) -> str:
    """Return a grammar with rules that lead to each other."""
    lines = "".join(line.format(name, number, number + 1) for number in range(length))
    return f'start: {name}0\n{lines}{name}{length}: "a"\n'


def tag(content: dict) -> str:
    return json.dumps({"type": "structural_tag", "format": content})


def twice(reference: dict) -> dict:
    return {"prefixItems": [{"allOf": [reference, {"type": "array"}]}] * 2}


def properties_in_a_tag(length: int) -> str:
    schema = chain(length, lambda reference: {"properties": {"x": reference}})
    return tag({"type": "json_schema", "json_schema": schema})


HOSTILE = {
    "references": {"json": chain(30_000, lambda reference: reference)},
    "references in items": {"json": chain(8_000, lambda reference: {"items": reference})},
    "references that double": {"json": chain(26, twice)},
    "deep values": {"json": {"enum": [json.loads("[" * 50 + "]" * 50)] * 1_000}},
    "deep values in a text": {"json": json.dumps({"enum": [json.loads("[" * 50 + "]" * 50)] * 1_000})},
    "a repeated group": {"regex": "(a|b)" * 300_000},
    "groups in a tag": {"structural_tag": tag({"type": "regex", "pattern": "(" * 200_000 + "a" + ")" * 200_000})},
    "references in a tag": {"structural_tag": properties_in_a_tag(60_000)},
    "groups at a name that is there twice": {
        "structural_tag": tag({"type": "regex", "pattern": "(" * 300_000})[:-2] + ', "pattern": "a"}}'
    },
}


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=HOSTILE)
def test_a_format_whose_check_would_end_the_process_is_refused(manager, asked):
    config = manager.vllm_config
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))

    with pytest.raises(
        VLLMValidationError, match=r"check of the format needs more|expected at most \d+. Send|levels of JSON"
    ):
        check_format(params, config.model_config, config.structured_outputs_config, manager.tokenizer)


def nested_groups() -> str:
    number = (MOST_TEXT - 1) // 2
    pattern = "(" * number + "a" + ")" * number
    return tag({"type": "json_schema", "json_schema": {"type": "string", "pattern": pattern}})


DEEP = {
    "references": {"json": chain(1_000, lambda reference: {"items": reference})},
    "rules": {"grammar": rules(5_000, "a", "{0}{1}: {0}{2}\n")},
    "terminals": {"grammar": rules(5_000, "A", "{0}{1}: {0}{2}\n")},
    "groups in a tag": {"structural_tag": nested_groups()},
    "references in a tag": {"structural_tag": properties_in_a_tag(17_000)},
}


@pytest.mark.parametrize("asked", DEEP.values(), ids=DEEP)
def test_the_threads_that_compile_have_the_stack_for_each_format_that_passes_the_check(manager, asked):
    config = manager.vllm_config
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
    check_format(params, config.model_config, config.structured_outputs_config, manager.tokenizer)

    compiled = manager.executor.submit(
        manager.backend.compile_grammar, *get_structured_output_key(params.structured_outputs)
    )

    assert not compiled.result().is_terminated()


@pytest.mark.parametrize("described", ["d" * 180, "\u5929" * 60], ids=["long", "escaped"])
def test_a_tag_of_many_tools_passes_the_check(manager, described):
    """vLLM makes it, with the descriptions and in ASCII, though only a text in it could overflow the stack."""
    parameter = {"type": "string", "description": described}
    schema = {"type": "object", "properties": {f"p{number}": parameter for number in range(10)}}
    called = [
        {"type": "tag", "begin": f"<{number}>", "content": {"type": "json_schema", "json_schema": schema}, "end": ""}
        for number in range(128)
    ]
    form = tag({"type": "triggered_tags", "triggers": ["<"], "tags": called})
    assert len(form) > MOST_TEXT
    config = manager.vllm_config
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=form))

    check_format(params, config.model_config, config.structured_outputs_config, manager.tokenizer)


OLD = {"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}
WITHOUT_FORM = {"structures": 5}, {**OLD, "triggers": 5}, {**OLD, "structures": [{"begin": "<"}]}, {"format": 5}, [], 5


def test_the_event_loop_checks_only_the_length_and_the_form_of_a_structural_tag():
    """Ballast checks the tag on a thread before EngineCore gets the request."""

    async def check(tag: str) -> None:
        validate_structural_tag_payload(tag, parameter="response_format")

    unknown = tag({"type": "unknown"})
    for right in (unknown, json.dumps(OLD)):
        asyncio.run(check(right))
    for wrong in ("no JSON", tag({"type": "x" * (MOST_TEXT + 1)}), *map(json.dumps, WITHOUT_FORM)):
        with pytest.raises(VLLMValidationError, match="Invalid response_format"):
            asyncio.run(check(wrong))
    with pytest.raises(VLLMValidationError, match="Invalid response_format"):
        validate_structural_tag_payload(unknown, parameter="response_format")


def test_threads_that_compile_grammars_at_once_share_no_text(manager):
    """The library of vLLM keeps the text in a field for a moment."""
    manager.backend.compile_grammar(StructuredOutputOptions.CHOICE, '["yes","no"]')

    assert not hasattr(vars(manager.backend)["_guidance"], "serialized_grammar")


@pytest.mark.parametrize(("model", "can_guide"), [(models.BPE, True), (models.WordPiece, False)])
def test_a_tokenizer_that_llguidance_cannot_read_keeps_the_choice_of_vllm(model, can_guide):
    inner = Tokenizer(model(vocab={"a": 0, "</s>": 1}, **({"merges": []} if can_guide else {"unk_token": "a"})))
    inner.decoder = decoders.ByteLevel() if can_guide else decoders.WordPiece()
    config = SimpleNamespace(
        structured_outputs_config=StructuredOutputsConfig(), model_config=SimpleNamespace(get_vocab_size=lambda: 2)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    manager = SimpleNamespace(backend=None, vllm_config=config, tokenizer=tokenizer)
    take_formats(manager)

    assert isinstance(manager.backend, Formats) == can_guide


def test_only_the_open_choice_of_vllm_is_replaced(tiny_model, manager):
    chosen = made(tiny_model, structured_outputs_config={"backend": "xgrammar"})

    assert isinstance(manager.backend, Formats)
    assert chosen.backend is None, "vLLM makes it at the first request"
    assert torch.equal(manager.backend.allocate_token_bitmask(1)[0][:8], torch.full((8,), -1, dtype=torch.int32))
