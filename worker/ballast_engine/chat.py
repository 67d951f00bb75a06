"""Render chats with a model's template, in a sandbox: the template comes with the model, the messages from users."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ballast_engine.errors import InvalidChat, InvalidCheckpoint

Join = Callable[[Iterable[str]], str]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. For serving, only its body matters."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_CALL, _RESULT, _CALL_ID = "ballast_probe_call", "ballast_probe_result", "ballast01"
"""Names for a test of a template. Some templates accept only ids of nine characters."""
_FIRST, _SECOND = "ballast_probe_first", "ballast_probe_second"


@dataclass(frozen=True, slots=True)
class _ToolSupport:
    has_calls: bool
    """The template renders `tool_calls`."""
    has_results: bool
    """The template renders messages of role `tool`."""
    no_content: str | None
    """The content that the template expects in a message with calls and without text."""


def _conversation_with_a_call(no_content: str | None) -> list[dict[str, Any]]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _CALL, "arguments": {"of": "probe"}}}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": no_content, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": _CALL_ID},
    ]


class ChatTemplate:
    """A compiled template. Several threads may render it."""

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str], join: Join = "".join) -> None:
        """Compile a template. `join` makes one text of the parts that it writes, and may raise an error for too many.

        Raises:
            InvalidCheckpoint: the source is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.concat = join  # type: ignore[method-assign]
        environment.globals.update(special_tokens, raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._has_developer = "'developer'" in source or '"developer"' in source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidCheckpoint(f"The chat template in {origin} cannot be compiled: {error}") from error

    def render(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, object]) -> str:
        """Return the conversation as the model was trained to read it, ready for the assistant's next message.

        Raises:
            InvalidChat: a message is not text, the template cannot render it, or the result is not Unicode.
        """
        conversation = [{**message, "content": _texts(message.get("content"))} for message in messages]
        if not self._has_developer and any(message["role"] == "developer" for message in conversation):
            conversation = _developer_as_system(conversation)
        has_calls = any(message.get("tool_calls") for message in conversation)
        conversation = [{**message, "content": self._content(message)} for message in conversation]
        text = self._render(conversation, options)
        _check_unicode(text)
        if has_calls and not self._tools.has_calls:
            raise InvalidChat("The model's chat template does not render tool_calls: leave these messages out.")
        if not self._tools.has_results and any(message["role"] == "tool" for message in conversation):
            raise InvalidChat("The model's chat template does not render the role 'tool': leave these messages out.")
        return text

    def _content(self, message: Mapping[str, Any]) -> object:
        """Return the content as the template reads it: a string, or a list of parts as from OpenAI's clients."""
        content: str | list[str] | None = message["content"]
        if content is None:
            return self._tools.no_content if message.get("tool_calls") else ""
        # As in vLLM, the result of a tool is a string for each template.
        are_parts = message["role"] != "tool" and self._reads_parts
        wants_list = are_parts and (isinstance(content, list) or not self._reads_strings)
        return _parts(content) if wants_list else _joined(content)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template renders the text of each part, and decides itself what is between them."""
        return self._reads(_parts([_FIRST, _SECOND]))

    @cached_property
    def _reads_strings(self) -> bool:
        return self._reads(f"{_FIRST} {_SECOND}")

    def _reads(self, content: object) -> bool:
        text = self._probe([{"role": role, "content": content} for role in ("user", "assistant", "user")])
        # In quotes: the template writes the list itself.
        is_quoted = f"'{_FIRST}" in text or f'"{_FIRST}' in text
        return text.count(_FIRST) == text.count(_SECOND) == 3 and not is_quoted

    @cached_property
    def _tools(self) -> _ToolSupport:
        """The parts of a tool call that the template renders."""
        for no_content in (None, ""):
            text = self._probe(_conversation_with_a_call(no_content))
            if _CALL in text and "None" not in text:
                return _ToolSupport(has_calls=True, has_results=_RESULT in text, no_content=no_content)
        text = self._probe(_conversation_with_a_call(None)[-1:])
        return _ToolSupport(has_calls=False, has_results=_RESULT in text, no_content=None)

    def _probe(self, conversation: list[dict[str, Any]]) -> str:
        """Return the text of a test; no text if the template refuses it."""
        try:
            return self._render(conversation, {})
        except InvalidChat:
            return ""

    def _render(self, conversation: list[dict[str, Any]], options: Mapping[str, object]) -> str:
        given = {**options, "messages": conversation, "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._template.render(given)
        except Exception as error:  # a template is a program of the model's author: any error of it is about the chat
            raise InvalidChat(f"The model's chat template cannot render these messages: {error}") from error


def _check_unicode(text: str) -> None:
    """Refuse a lone surrogate, which no tokenizer reads. It can come from a template argument, or from a tool call."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidChat(
            f"The rendered chat has the lone surrogate \\u{ord(text[error.start]):x}, expected text that can be "
            "written as UTF-8: remove it from chat_template_kwargs, and from the arguments of tool calls."
        ) from None


def _developer_as_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation for a template without the role `developer`, which may drop such messages.

    They become system messages. As in vLLM, several become one, and it is the first message: some templates render no
    other.
    """
    instructions = [message for message in conversation if message["role"] in {"system", "developer"}]
    others = [message for message in conversation if message["role"] not in {"system", "developer"}]
    if len(instructions) == 1 and conversation[0] is instructions[0]:
        return [{**instructions[0], "role": "system"}, *others]
    texts = [_joined(message["content"]) for message in instructions]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _joined(content: str | list[str] | None) -> str:
    return "\n".join(filter(None, content)) if isinstance(content, list) else content or ""


def _parts(content: str | list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in ([content] if isinstance(content, str) else content)]


def _texts(content: object) -> str | list[str] | None:
    """Return the text of a content, or the texts of its parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        raise InvalidChat("The content of a message is not text: use a string or a list of text parts.")
    return [part["text"] for part in content]


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 -- templates pass it by position
) -> str:
    """Return JSON without the HTML escapes of Jinja's own `tojson`, on which no model was trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 -- templates expect the local date, as in transformers
