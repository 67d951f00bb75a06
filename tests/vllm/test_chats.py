"""The native engine renders a chat to the text that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

from ballast_engine.chat import ChatTemplate
from ballast_openai.body import CHAT_URL, ChatBody, parse_body
from ballast_vllm.internals import limit_templates

PARTS = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
TEMPLATES = {
    "each role by its name": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    # As in Qwen2 and Qwen3: a system message is rendered, and a role that the template does not know is not.
    "known roles": "{% for m in messages if m.role in ['system', 'user', 'assistant', 'tool'] %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}",
    "system first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "developers": "{% for m in messages %}<{% if m.role == 'developer' %}dev{% else %}{{ m.role }}{% endif %}>"
    "{{ m.content }}{% endfor %}",
    "only strings": "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}{% endfor %}",
    "strings and parts": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    + PARTS.replace("[", "").replace("]", "")
    + "{% endif %}{% endfor %}",
    "only parts": "{% for m in messages %}<{{ m.role }}>" + PARTS + "{% endfor %}",
}


def says(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": texts[0] if len(texts) == 1 else parts}


CHATS = {
    "an instruction": [says("developer", "Be brief."), says("user", "Hi")],
    "an instruction in parts": [says("developer", "Be", "brief."), says("user", "Hi")],
    "several instructions": [
        says("system", "You are a clerk."),
        says("user", "Hi"),
        says("assistant", "Hello"),
        says("developer", "Be", "brief."),
        says("system", ""),
        says("user", "Bye"),
    ],
    "parts": [says("system", "a", "b"), says("user", "c", "d"), says("assistant", "e"), says("user")],
    "empty parts": [says("system", "", "a"), says("user", "b", "", "c"), says("assistant", "d"), says("user", "", "")],
    "an answer without text": [says("user", "Hi"), {"role": "assistant", "content": None}, says("user", "Bye")],
}


@pytest.fixture(scope="module")
def rendered_by_vllm(tiny_model: Path) -> Callable[[str, list[dict[str, Any]]], str]:
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), ModelConfig(model=str(tiny_model))

    def render(template: str, messages: list[dict[str, Any]]) -> str:
        form = resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=config)
        conversation, _, _ = parse_chat_messages(deepcopy(messages), config, form)
        return safe_apply_chat_template(
            config, tokenizer, conversation, chat_template=template, tokenize=False, add_generation_prompt=True
        )

    return render


def test_a_template_of_vllm_writes_no_more_than_a_limit(
    rendered_by_vllm: Callable[[str, list[dict[str, Any]]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds for a template that was compiled before, and stops it before it has read all messages."""
    template = "{% for m in messages %}{{ m.content }}{{ m.role }};{% if m.content == 'bad' %}{{ 1 // 0 }}{% endif %}"
    chat = [says("user", "a" * 1000)] * 200
    whole = rendered_by_vllm(template + "{% endfor %}", chat)
    monkeypatch.setattr(ImmutableSandboxedEnvironment, "concat", ImmutableSandboxedEnvironment.concat)
    limit_templates(len(whole))

    assert rendered_by_vllm(template + "{% endfor %}", chat) == whole
    with pytest.raises(VLLMValidationError, match=f"more than {len(whole)} characters"):
        rendered_by_vllm(template + "{% endfor %}", [*chat, says("user", "b"), says("user", "bad")])


PAIRS = [(chat, template) for chat in CHATS for template in TEMPLATES]
# vLLM makes a string of several instructions also for this template, which reads it as a list of characters.
PAIRS.remove(("several instructions", "only parts"))


@pytest.mark.parametrize(("chat", "template"), PAIRS)
def test_a_chat_is_rendered_as_by_vllm(
    chat: str, template: str, rendered_by_vllm: Callable[[str, list[dict[str, Any]]], str]
) -> None:
    body = parse_body(CHAT_URL, {"model": "m", "messages": CHATS[chat]})
    assert isinstance(body, ChatBody)
    ours = ChatTemplate(TEMPLATES[template], "the test", {})

    assert ours.render([message.for_template() for message in body.messages], {}) == rendered_by_vllm(
        TEMPLATES[template], CHATS[chat]
    )
