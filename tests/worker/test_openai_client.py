"""The official client against a real worker with the real small model."""

from __future__ import annotations

import openai
import pytest

from ballast_worker.errors import Refused

PROMPT = "The method returns a list of"
CHAT = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture
def client(serving):
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_served_model_is_listed_and_found(client) -> None:
    [model] = client.models.list().data

    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "ballast")
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("is_asked", [False, True], ids=["its card", "an answer of it"])
def test_another_model_is_a_404_that_names_the_one_served(client, is_asked) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt=PROMPT) if is_asked else client.models.retrieve("gpt-4")

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'gpt-4' does not exist. This worker serves 'tiny'" in caught.value.message


def test_a_completion_has_text_reason_and_usage(client) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)

    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_streamed_completion_says_the_same_as_a_whole_one(client) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)

    chunks = list(client.completions.create(**options, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert len(chunks) > 3, "the text must come in pieces"


def test_a_chat_answers_as_the_assistant(client) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, temperature=0)

    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].message.refusal is None


def test_a_streamed_chat_opens_with_the_role_and_closes_with_usage(client) -> None:
    options = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)

    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_repeated_prompt_says_how_much_of_it_was_cached(client) -> None:
    prompt = "A rather long prompt that fills several blocks of the cache. " * 6
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)

    second = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert second.choices[0].text == first.choices[0].text


def test_equal_seeds_give_equal_samples_and_others_do_not(client) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=1.5, seed=seed)
        return answer.choices[0].text

    texts = [sample(seed) for seed in (1, 1, 2, 3, -4)]

    assert texts[0] == texts[1]
    assert len(set(texts)) > 2


def test_a_stop_string_ends_the_answer_and_is_left_out(client) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:3]

    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop])

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(stop)]


def test_a_prompt_of_token_ids_is_taken_as_it_is(client, serving) -> None:
    ids = serving.worker.served.tokenizer.encode(PROMPT)
    text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)

    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0)

    assert answer.choices[0].text == text.choices[0].text


@pytest.mark.parametrize(("options", "field"), [({"n": 2}, "n"), ({"extra_body": {"guided_json": {}}}, "guided_json")])
def test_what_is_not_there_yet_or_wrong_is_a_400_that_names_the_field(client, options, field) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, **options)

    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("url", "fields", "said"),
    [
        ("/completions", {"prompt": "word " * 3000}, "30"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]}, "30"),
        ("/completions", {"prompt": PROMPT, "max_tokens": 4000}, "max_tokens is 4000"),
    ],
    ids=["prompt", "chat", "output"],
)
def test_more_than_the_context_is_a_400_with_the_numbers(client, url, fields, said) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(url, body={"model": "tiny"} | fields, cast_to=object)

    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("tier", "header", "expected"),
    [("flex", "", "offline"), ("auto", "", "online"), ("flex", "online", "online"), ("default", "offline", "offline")],
)
def test_the_flex_tier_is_the_offline_class_unless_the_header_differs(
    client, serving, eventually, *, tier, header, expected
) -> None:
    before = dict(serving.worker.recorder.outcomes)
    headers = {"x-ballast-class": header} if header else {}
    client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, service_tier=tier, extra_headers=headers)
    client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=2, extra_body={"service_tier": tier}, extra_headers=headers
    )
    after = serving.worker.recorder.outcomes

    # The worker counts a request after it has sent the answer.
    eventually(lambda: sum(after.values()) == sum(before.values()) + 2, "both requests are counted")
    assert {c.value: after[c, o] - before[c, o] for c, o in after if after[c, o] != before[c, o]} == {expected: 2}


def test_an_answer_can_be_sent_back_as_part_of_the_chat(client) -> None:
    first = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8).choices[0].message

    answer = client.chat.completions.create(model="tiny", messages=[*CHAT, first, *CHAT], max_tokens=8)

    assert answer.choices[0].message.role == "assistant"


CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
TOOLS = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call00001"},
]


def test_a_template_that_cannot_render_tools_is_a_400_with_a_sentence(client) -> None:
    with pytest.raises(openai.BadRequestError, match="the roles are system, user and assistant, not tool") as caught:
        client.chat.completions.create(model="tiny", messages=[TOOLS[0], TOOLS[2]])

    assert caught.value.param == "messages"


def test_calls_of_tools_and_template_arguments_reach_the_template(tool_model, serve, make_config) -> None:
    config = make_config(model={"uri": str(tool_model)})
    with serve(config) as serving, openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:
        options = {"model": "tiny", "messages": TOOLS, "max_tokens": 1}
        plain = client.chat.completions.create(**options)
        loud = client.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"loud": True}})
        encode = serving.worker.served.tokenizer.encode
        rendered = 'user:How is the weather?|assistant:weather{"city": "Bonn"}|tool:sunny|'

    assert plain.usage.prompt_tokens == len(encode(rendered))
    assert loud.usage.prompt_tokens == len(encode(rendered + "LOUD"))


def test_arguments_of_a_tool_call_that_cannot_be_read_are_a_400_with_a_sentence(tool_model, serve, make_config) -> None:
    config = make_config(model={"uri": str(tool_model)})
    with serve(config) as serving, openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:

        def ask(arguments: str) -> None:
            call = CALL | {"function": {"name": "weather", "arguments": arguments}}
            messages = [TOOLS[0], TOOLS[1] | {"tool_calls": [call]}, TOOLS[2]]
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)

        with pytest.raises(openai.BadRequestError, match="lone surrogate"):
            ask(r'{"city": "\ud800"}')
        served = serving.worker.served
        arguments = '{"a": ' * 700 + "1" + "}" * 700
        call = CALL | {"function": {"name": "weather", "arguments": arguments}}
        body = served.read("/v1/chat/completions", {"model": "tiny", "messages": [TOOLS[1] | {"tool_calls": [call]}]})

        def read_below(levels: int) -> None:
            if levels:
                read_below(levels - 1)
            else:
                served.tokens(body)

        with pytest.raises(Refused, match=r"nested too deeply|maximum context length") as caught:
            read_below(400)

    assert caught.value.status == 400


@pytest.fixture(scope="session")
def tool_model(model_dir, tmp_path_factory):
    """The small model with a chat template that renders tools."""
    directory = tmp_path_factory.mktemp("tools")
    for path in model_dir.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}|"
        "{% endfor %}{% if loud %}LOUD{% endif %}"
    )
    return directory


def test_many_clients_at_once_get_what_they_would_get_alone(client, serving) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(index: int) -> str:
        answer = client.completions.create(model="tiny", prompt=f"{PROMPT} {index}", max_tokens=12, temperature=0)
        return answer.choices[0].text

    alone = [ask(index) for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))

    assert together == alone
