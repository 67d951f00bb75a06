from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_openai.body import ChatBody, CompletionBody, parse_body
from ballast_openai.errors import InvalidBody, Unsupported, describe
from ballast_openai.item_body import ITEM_URLS
from ballast_openai.refused import IN_VLLM, REFUSED_BY_URL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY_HI = [{"role": "user", "content": "hi"}]
BASES = {COMPLETIONS: {"model": "m", "prompt": "p"}, CHAT: {"model": "m", "messages": SAY_HI}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}


def completion(**given):
    return parse_body(COMPLETIONS, BASES[COMPLETIONS] | given)


def chat(**given):
    return parse_body(CHAT, BASES[CHAT] | given)


def test_a_completion_has_the_defaults_of_openai():
    body = completion()

    assert isinstance(body, CompletionBody)
    assert (body.num_output, body.temperature, body.top_p, body.stop, body.stream) == (16, 1.0, 1.0, (), False)


def test_a_chat_generates_up_to_the_context_unless_told():
    assert chat().num_output is None
    assert chat(max_tokens=3).num_output == 3
    assert chat(max_completion_tokens=4).num_output == 4
    assert chat(max_completion_tokens=4, max_tokens=4).num_output == 4


def test_a_chat_template_may_have_arguments():
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}


def test_prompts_are_text_or_token_ids():
    assert completion(prompt="x").prompt == "x"
    assert completion(prompt=[1, 2]).prompt == (1, 2)
    assert completion(prompt="").prompt == ""
    assert completion(prompt=["x"]).prompt == "x"
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


def test_a_text_in_one_part_is_the_text_and_several_parts_are_kept_for_the_template():
    several = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = chat(messages=[{"role": "system", "content": several[:1]}])
    two = chat(messages=[{"role": "system", "content": several}])

    assert isinstance(one, ChatBody)
    assert isinstance(two, ChatBody)
    assert one.messages[0].for_template()["content"] == "a"
    assert two.messages[0].for_template()["content"] == several
    assert (one.opening, two.opening) == ("system:a", "system:a\nb")


def test_a_chat_has_calls_of_tools_and_their_results():
    body = chat(
        messages=[
            *SAY_HI,
            {"role": "assistant", "content": None, "refusal": None, "reasoning_content": None, "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        ]
    )
    shown = [message.for_template() for message in body.messages]

    assert shown[1] == shown[2]
    assert shown[1]["content"] is None
    assert shown[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bonn"}}
    assert shown[3] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


@pytest.mark.parametrize("read", [chat, completion])
def test_fields_that_change_no_answer_are_accepted(read):
    notes = {"prompt_cache_key": "k", "safety_identifier": "s", "metadata": {"a": "b"}, "user": "u"}
    body = read(**notes, store=False, service_tier="flex")

    assert body.model_dump(include=set(notes)) == notes
    assert body.service_tier == "flex"
    with pytest.raises(Unsupported, match="store: found true; Ballast does not store answers"):
        read(store=True)


def test_the_speaker_of_a_message_has_a_name():
    assert chat(messages=[SAY_HI[0] | {"name": "bob"}]).messages[0].for_template()["name"] == "bob"


def test_stops_are_one_string_or_several():
    assert completion(stop="a").stop == ("a",)
    assert completion(stop=["a", "b"]).stop == ("a", "b")
    assert completion(stop=None).stop == ()


def test_a_lower_vllm_priority_is_a_higher_band():
    assert completion(priority=-5).band == 5
    assert completion(priority=5).band == -5


def test_a_stream_may_end_with_usage():
    assert completion(stream=True, stream_options={"include_usage": True}).includes_usage
    assert not completion(stream=True).includes_usage
    assert not completion(stream=True, stream_options={"include_obfuscation": False}).includes_usage
    assert not completion(stream=True, stream_options={"include_usage": None}).includes_usage


WRONG_COMPLETIONS = {
    "a number as text": ({"temperature": "hot"}, "temperature: found the string 'hot', expected a number"),
    "true as a number": ({"max_tokens": True}, "max_tokens: found true, expected an integer"),
    "a fraction as a count": ({"max_tokens": 1.5}, "max_tokens: expected an integer"),
    "too hot": ({"temperature": 3}, "temperature: found the number 3, expected 2.0 or less"),
    "top_p of zero": ({"top_p": 0}, "top_p: expected more than 0"),
    "a seed too large": ({"seed": 2**63}, "seed: expected less than"),
    "a top_k too large": ({"top_k": 2**63}, "top_k: expected less than 2147483648"),
    "no output": ({"max_tokens": 0}, "max_tokens: expected 1 or more"),
    "several prompts": ({"prompt": ["a", "b"]}, "prompt: found a list of prompts, expected one"),
    "a list in a list of prompts": ({"prompt": [["a"]]}, "prompt: found a list of prompts"),
    "padded chunks": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation: found true, expected False",
    ),
    "lists of tokens": ({"prompt": [[1], [2]]}, "prompt: found a list of prompts, expected one"),
    "no tokens": ({"prompt": []}, "prompt: found an empty list"),
    "a negative token": ({"prompt": [1, -1]}, "prompt: found the number -1 in the list"),
    "a token too large": ({"prompt": [2**31]}, "prompt: found the number 2147483648 in the list"),
    "true as a token": ({"prompt": [1, True]}, "prompt: found true in the list"),
    "a long model": ({"model": "m" * 513}, "model: expected 512 or fewer characters"),
    "too many stop tokens": ({"stop_token_ids": [1] * 65}, "stop_token_ids: expected 64 or fewer entries"),
    "a prompt of a number": ({"prompt": 3}, "prompt: found the number 3, expected a string or a list"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt: lone surrogate"),
    "an empty model": ({"model": ""}, "model: expected 1 or more characters"),
    "an empty stop": ({"stop": [""]}, "stop: found an empty stop string"),
    "a stop that is no Unicode": ({"stop": ["\ud800"]}, "stop[0]: lone surrogate"),
    "too many stops": ({"stop": ["x"] * 17}, "stop: found 17 stop strings, expected at most 16"),
    "a long stop": ({"stop": ["x", "x" * 1025]}, "stop: of 1025 characters, expected at most 1024"),
    "a stop of a number": ({"stop": [1]}, "stop: expected a string or a list of strings"),
    "usage without a stream": ({"stream_options": {}}, "stream_options: expected stream: true"),
    "other stream options": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: found an unknown field"),
    "an unknown field": ({"temprature": 1}, "temprature: found an unknown field"),
    "an unknown field that is no Unicode": ({"a\ud800": 1}, "a\\ud800: found an unknown field"),
    "an unknown field of an option that is no Unicode": (
        {"stream": True, "stream_options": {"\ud800": 1}},
        "stream_options.\\ud800: found an unknown field",
    ),
    "an unknown field of null": ({"temprature": None}, "temprature: found an unknown field"),
    "usage in each chunk": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats: found true, expected False",
    ),
    "another tier": ({"service_tier": "priority"}, "service_tier: expected 'auto', 'default' or 'flex'"),
}
WRONG_CHATS = {
    "an output too large": ({"max_tokens": 10**400}, "max_tokens: expected less than 2147483648"),
    "no messages": ({"messages": []}, "messages: expected 1 or more entries"),
    "messages as text": ({"messages": "hi"}, "messages: found the string 'hi', expected a list"),
    "a message as text": ({"messages": ["hi"]}, "messages[0]: expected an object"),
    "a template argument of the server": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs: found 'messages', expected arguments of the model's template",
    ),
    "a long token of the tokenizer": (
        {"chat_template_kwargs": {"eos_token": "x" * 65}},
        "chat_template_kwargs.eos_token: expected at most 64 characters",
    ),
    "too many messages": ({"messages": SAY_HI * 4097}, "messages: found 4097 messages, expected at most 4096"),
    "two lengths": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens: one of the two"),
}
WRONG_MESSAGES = {
    "an unknown role": ({"role": "judge", "content": "x"}, "role: 'tool'"),
    "a result without its call": (
        {"role": "tool", "content": "x"},
        "tool_call_id: found nothing, expected the id of the call",
    ),
    "the id of a call from a user": (SAY_HI[0] | {"tool_call_id": "c"}, "tool_call_id: expected role 'tool'"),
    "calls of a user": (SAY_HI[0] | {"tool_calls": [CALL]}, "tool_calls: expected role 'assistant'"),
    "arguments that are no object": (
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "3"}}]},
        "tool_calls[0].function.arguments: expected a JSON object as text",
    ),
    "no content and no call": ({"role": "assistant"}, "content: found nothing"),
    "a refusal that a message cannot have": (
        {"role": "assistant", "content": "x", "refusal": "no"},
        "refusal: unknown field",
    ),
}
WRONG_CONTENTS = {
    "a picture": (
        [{"type": "image_url", "image_url": {"url": "x"}}],
        "found a part of type 'image_url', expected text",
    ),
    "a content of a number": (3, "found the number 3, expected a string or a list of text parts"),
    "a text part with more": (
        [{"type": "text", "text": "x", "detail": "low"}],
        "found a text part with other fields, expected {'type': 'text', 'text': '...'}",
    ),
    "a part without a type": (["hi"], "found the string 'hi', expected parts like {'type': 'text', 'text': '...'}"),
    "no content": (None, "found null"),
}
WRONG = {
    **{name: (COMPLETIONS, *wrong) for name, wrong in WRONG_COMPLETIONS.items()},
    **{name: (CHAT, *wrong) for name, wrong in WRONG_CHATS.items()},
    **{
        name: (CHAT, {"messages": [message]}, f"messages[0].{said}") for name, (message, said) in WRONG_MESSAGES.items()
    },
    **{
        name: (CHAT, {"messages": [{"role": "user", "content": content}]}, f"messages[0].content: {said}")
        for name, (content, said) in WRONG_CONTENTS.items()
    },
}
"""Case -> URL, fields of the body, and the refused field with a part of the sentence after it."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x" * 1024] * 16),
        ("prompt", [0, 2**31 - 1]),
        ("stop_token_ids", [2**31 - 1] * 64),
        ("model", "m" * 512),
        ("user", "u" * 512),
        ("priority", -1000),
        ("seed", -(2**63)),
        ("top_k", -1),
    ],
)
def test_the_largest_and_the_smallest_value_are_taken(field, value):
    assert completion(**{field: value}).model_dump(mode="json")[field] == value


@pytest.mark.parametrize(
    ("name", "shown"),
    [("x" * 80, "x" * 80), ("x" * 81, "x" * 80), ("a.b", "a.b"), ("\ud800" * 81, "\\ud800" * 80)],
    ids=["at most", "too long", "with a dot", "no Unicode"],
)
def test_the_name_of_an_unknown_field_is_shown_short(name, shown):
    with pytest.raises(InvalidBody) as caught:
        completion(**{name: 1})

    assert caught.value.field == shown


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        pytest.param({"temperature": "hot"}, "invalid_type", id="a value of the wrong type"),
        pytest.param({"temperature": 3}, "invalid_value", id="a value out of range"),
        pytest.param({"prompt": []}, "invalid_value", id="what is refused in words of our own"),
        pytest.param({"temprature": 1}, "unknown_parameter", id="an unknown field"),
        pytest.param({"prompt": None}, "missing_required_parameter", id="a field without a value"),
    ],
)
def test_a_refusal_has_the_code_of_its_kind(fields, code):
    with pytest.raises(InvalidBody) as caught:
        completion(**fields)

    assert caught.value.code == code


@pytest.mark.parametrize(("url", "body", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_with_what_was_found_and_wanted(url, body, said):
    field, _, sentence = said.partition(": ")
    with pytest.raises(InvalidBody) as caught:
        parse_body(url, BASES[url] | body)

    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: found ")
    assert sentence in caught.value.message


@pytest.mark.parametrize(("url", "missing"), [(COMPLETIONS, "model"), (COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_a_required_field_is_missed_by_name(url, missing):
    body = BASES[url].copy()
    del body[missing]
    with pytest.raises(InvalidBody, match=f"{missing}: found nothing") as caught:
        parse_body(url, body)

    assert caught.value.field == missing


@pytest.mark.parametrize(("url", "field"), [(url, field) for url, fields in REFUSED_BY_URL.items() for field in fields])
def test_a_known_field_that_is_not_served_is_refused_by_name_unless_neutral(url, field):
    for neutral in (None, *REFUSED_BY_URL[url][field][0]):
        parse_body(url, BASES[url] | {field: neutral})
    with pytest.raises(Unsupported) as caught:
        parse_body(url, BASES[url] | {field: {"anything": "else"}})

    assert caught.value.field == field
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.message.endswith("use engine.backend: vllm") == (field in IN_VLLM)


def test_each_field_that_names_vllm_is_refused_without_it():
    assert {field for fields in REFUSED_BY_URL.values() for field in fields} > IN_VLLM


def test_what_belongs_to_chats_is_not_called_unknown_in_completions():
    with pytest.raises(Unsupported, match="and there too tool calls are not supported yet"):
        completion(tools=[{"type": "function"}])


@pytest.mark.parametrize("value", [True, 2, 0, 1.5, "1"])
def test_more_than_one_completion_is_refused(value):
    with pytest.raises(Unsupported, match=r"^n: found"):
        completion(n=value)


def test_other_urls_are_refused():
    for url in {*ITEM_URLS} - {COMPLETIONS, CHAT}:
        with pytest.raises(Unsupported, match=rf"{url} .* is not supported yet: .*, or use engine\.backend: vllm$"):
            parse_body(url, {})
    with pytest.raises(Unsupported, match=r"moderation.* is not supported yet: use .* or /v1/completions$"):
        parse_body("/v1/moderations", {})
    with pytest.raises(InvalidBody, match="url: found '/v2/x'"):
        parse_body("/v2/x", {})
    with pytest.raises(InvalidBody, match="body: found a list of 0, expected a JSON object"):
        parse_body(COMPLETIONS, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=4),
    max_leaves=8,
)
KNOWN = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED_BY_URL[COMPLETIONS], *REFUSED_BY_URL[CHAT]}
)


@given(
    url=st.sampled_from([COMPLETIONS, CHAT]), body=st.dictionaries(st.sampled_from(KNOWN) | st.text(), JSON, max_size=6)
)
def test_any_body_is_served_or_refused_with_a_sentence(url, body):
    try:
        parsed = parse_body(url, BASES[url] | body)
    except InvalidBody as error:
        shown = json.dumps([error.field, error.message, error.code], ensure_ascii=False)
    else:
        shown = parsed.model_dump_json()

    assert shown.encode().decode() == shown


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "null"),
        (True, "true"),
        (3, "the number 3"),
        (1.5, "the number 1.5"),
        (10**100, f"the number {10**100}"[:80]),
        ("hi", "the string 'hi'"),
        ("x" * 40, f"the string '{'x' * 40}'"),
        ("x" * 41, f"the string '{'x' * 40}...'"),
        ([1, 2], "a list of 2"),
        ((1,), "a list of 1"),
        ({}, "an object with no fields"),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "an object with 'a', 'b', 'c', 'd'"),
        ({"k" * 50: 1}, f"an object with '{'k' * 40}'"),
        pytest.param(object(), "object", id="an object"),
    ],
    ids=repr,
)
def test_a_value_is_described_in_few_words(value: object, said: str):
    assert describe(value) == said
