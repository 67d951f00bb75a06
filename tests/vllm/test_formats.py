"""The libraries of structured output inside EngineCore."""

from __future__ import annotations

import json
from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch
from bare_core import BareCore
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from ballast_vllm.internals import Formats, take_formats

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
        pytest.param("JSON", json.dumps(OBJECT), '{"a":7,"b":8}', (6, False), id="a property that the schema lacks"),
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
