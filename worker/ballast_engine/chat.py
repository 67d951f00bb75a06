"""A model's chat template, run in a sandbox: the template comes with the model, the messages from users."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ballast_engine.errors import InvalidChat, InvalidCheckpoint


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; rendering is safe from several threads."""

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        """Compile it.

        Raises:
            InvalidCheckpoint: it is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidCheckpoint(f"The chat template in {origin} cannot be compiled: {error}") from error

    def render(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, object]) -> str:
        """Write the conversation as the model was trained to read it, ready for the assistant's turn.

        Raises:
            InvalidChat: a message that is not text, or one that the template refuses.
        """
        conversation = [{**message, "content": _text(message.get("content"))} for message in messages]
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "messages": conversation,
                    "add_generation_prompt": True,
                    "tools": None,
                    "documents": None,
                    **options,
                }
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's author: whatever it raises is about the chat
            raise InvalidChat(f"The model's chat template does not take these messages: {error}") from error


def _text(content: object) -> object:
    """Join OpenAI's list of content parts; templates of text models want one string."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidChat(f"A message's content is {type(content).__name__}; wanted a string or a list of text parts.")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidChat(f"A message has a content part of type {kind!r}; this model takes text parts only.")
        texts.append(text)
    return "\n".join(texts)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 -- templates pass it by position
) -> str:
    """Jinja's own `tojson` escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 -- templates ask for the local date, as transformers gives
