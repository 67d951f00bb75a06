"""Bodies of items for an engine that checks them itself."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_openai.body import parse_body
from ballast_openai.errors import InvalidBody, Unsupported
from ballast_openai.item_body import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    ITEM_URLS,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
    parse_item,
)
from ballast_queue.batch_lines import read_line
from ballast_queue.settings import QueueSettings

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("url", "fields", "expected"),
    [
        (CHAT_URL, {"messages": [], "tools": TOOLS, "logprobs": True, "n": 3, "max_tokens": 5}, 15),
        (CHAT_URL, {"messages": [], "max_completion_tokens": 7, "max_tokens": 5}, 7),
        (CHAT_URL, {"messages": []}, None),
        (CHAT_URL, {"messages": [], "max_tokens": 2**31 - 1}, 2**31 - 1),
        (COMPLETIONS_URL, {"prompt": "a"}, 16),
        (COMPLETIONS_URL, {"prompt": ["a", "b"], "max_tokens": 4, "n": 2}, 16),
        (COMPLETIONS_URL, {"prompt": [1, 2, 3], "max_tokens": 4}, 4),
        (RESPONSES_URL, {"input": "a", "max_output_tokens": 9}, 9),
        (RESPONSES_URL, {"input": "a"}, None),
        (EMBEDDINGS_URL, {"input": ["a", "b"]}, 0),
        (SCORE_URL, {"text_1": "a", "text_2": "b"}, 0),
        (RERANK_URL, {"query": "a", "documents": ["b"]}, 0),
    ],
)
def test_an_item_may_use_any_field_and_its_tokens_are_counted(url, fields, expected):
    body = parse_item(url, {"model": "m", **fields}, ITEM_URLS)

    assert body.num_output == expected
    assert (body.model, body.stream, body.priority) == ("m", False, 0)


@pytest.mark.parametrize(
    ("url", "fields", "expected"),
    [
        (CHAT_URL, {"messages": [{}, {}, {}]}, 1),
        (CHAT_URL, {"messages": [{}, {}], "n": 3}, 3),
        (COMPLETIONS_URL, {"prompt": "abc"}, 1),
        (COMPLETIONS_URL, {"prompt": [1, 2, 3]}, 1),
        (COMPLETIONS_URL, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS_URL, {"prompt": []}, 1),
        (RESPONSES_URL, {"input": [{}, {}]}, 1),
        (COMPLETIONS_URL, {"prompt_embeds": ["a", "b"], "n": 1024}, 2048),
        (EMBEDDINGS_URL, {"input": [[1, 2], [3]]}, 2),
        (EMBEDDINGS_URL, {"input": [1] * 5000, "n": 5000}, 1),
        (EMBEDDINGS_URL, {"input": [{}, {}]}, 1),
        (EMBEDDINGS_URL, {"messages": [[{}], [{}]]}, 2),
        (SCORE_URL, {"text_1": "a", "text_2": ["b", "c", "d"]}, 3),
        (SCORE_URL, {"queries": ["a"], "documents": ["b", "c"]}, 2),
        (RERANK_URL, {"query": "a", "documents": ["b", {"content": []}]}, 2),
    ],
)
def test_the_requests_of_an_item_are_counted(url, fields, expected):
    assert parse_item(url, {"model": "m", **fields}, ITEM_URLS).num_requests == expected


@pytest.mark.parametrize(
    ("url", "fields", "number"),
    [
        (COMPLETIONS_URL, {"prompt": ["a"] * 1024, "n": 16384}, 2**24),
        (CHAT_URL, {"messages": [], "n": 2049}, 2049),
        (EMBEDDINGS_URL, {"input": ["a"] * 2049}, 2049),
        (SCORE_URL, {"data_1": "a", "data_2": ["a"] * 2049}, 2049),
    ],
)
def test_an_item_of_more_requests_than_the_limit_is_refused(url, fields, number):
    with pytest.raises(InvalidBody, match=rf"found {number} requests .*, expected at most 2048: divide it"):
        parse_item(url, {"model": "m", **fields}, ITEM_URLS)


def test_items_with_one_opening_have_one_prefix_key():
    system = {"role": "system", "content": "x" * 5000}
    first, second, other = (
        parse_item(CHAT_URL, {"model": model, "messages": [system, {"role": "user", "content": text}]}, ITEM_URLS)
        for model, text in (("m", "a"), ("m", "b"), ("n", "a"))
    )

    assert first.prefix_key == second.prefix_key != other.prefix_key


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (CHAT_URL, {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]}),
        (CHAT_URL, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}),
        (CHAT_URL, {"messages": [{"role": "assistant", "content": None}]}),
        (COMPLETIONS_URL, {"prompt": "hello" * 100}),
        (COMPLETIONS_URL, {"prompt": ["hello"]}),
        (COMPLETIONS_URL, {"prompt": [[1, 2, 3] * 50]}),
    ],
)
def test_an_item_for_any_engine_has_the_prefix_key_of_the_same_item_for_the_engine_of_ballast(url, fields):
    """A job may come before the first worker, whose engine is not known then."""
    body = {"model": "m", **fields}

    assert parse_item(url, body, ITEM_URLS).prefix_key == parse_body(url, body).prefix_key


def test_a_url_that_the_model_does_not_serve_is_refused_with_those_that_it_serves():
    with pytest.raises(Unsupported) as refused:
        parse_item(EMBEDDINGS_URL, {"model": "m", "input": "a"}, (CHAT_URL, COMPLETIONS_URL))

    assert refused.value.message == (
        "url: found /v1/embeddings (embeddings), expected /v1/chat/completions or /v1/completions, which this "
        "queue accepts"
    )
    with pytest.raises(InvalidBody, match="found '/v1/nothing', expected /v1/embeddings"):
        parse_item("/v1/nothing", {"model": "m"}, (EMBEDDINGS_URL,))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": 3}, "model: found the number 3"),
        ({"model": "m", "background": True}, "every item runs in the background"),
        ({"model": "m", "priority": "high"}, "priority: found the string 'high'"),
        ({"model": "m", "n": "16384"}, "n: found the string '16384', expected an integer"),
    ],
)
def test_fields_that_ballast_reads_are_checked(fields, sentence):
    with pytest.raises(InvalidBody, match=sentence):
        parse_item(CHAT_URL, fields, ITEM_URLS)


@pytest.mark.parametrize(
    ("url", "fields", "field", "found"),
    [
        (
            COMPLETIONS_URL,
            {"prompt": ["a", "b"], "max_tokens": 2_000_000_000, "n": 1000},
            "max_tokens",
            "2000000000 tokens for each of 2000 requests",
        ),
        (CHAT_URL, {"messages": [], "max_completion_tokens": 2**30, "n": 2}, "max_completion_tokens", "1073741824"),
    ],
)
def test_more_tokens_than_a_count_can_have_are_refused(url, fields, field, found):
    with pytest.raises(InvalidBody) as refused:
        parse_item(url, {"model": "m", **fields}, ITEM_URLS)

    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: found {found}")
    assert refused.value.message.endswith("expected less than 2147483648 in all")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(
    st.sampled_from(ITEM_URLS),
    st.dictionaries(
        st.sampled_from(
            ["messages", "prompt", "input", "n", "max_tokens", "max_output_tokens", "priority", "stream", "query"]
        ),
        JSON,
    ),
)
def test_any_body_is_read_or_refused(url, fields):
    with contextlib.suppress(InvalidBody):
        body = parse_item(url, {"model": "m", **fields}, ITEM_URLS)

        assert body.num_output is None or body.num_output >= 0
        assert body.num_requests >= 1


def test_a_queue_takes_the_urls_of_its_settings():
    line = json.dumps({"custom_id": "a", "url": EMBEDDINGS_URL, "body": {"model": "m", "input": "hi"}})
    chat = json.dumps({"custom_id": "a", "url": CHAT_URL, "body": {"model": "m", "messages": [], "stream": True}})

    taken, _ = read_line(line, QueueSettings(models=("m",), urls=(EMBEDDINGS_URL,)))
    native, _ = read_line(line, QueueSettings(models=("m",)))
    streamed, _ = read_line(chat, QueueSettings(models=("m",), urls=(CHAT_URL,)))
    options, _ = read_line(chat.replace("stream", "stream_options"), QueueSettings(models=("m",), urls=(CHAT_URL,)))

    assert (taken.kind, taken.asked_out) == ("a", 0)
    assert (native.kind, streamed.kind, options.kind) == ("r", "r", "r")
    assert b"not supported yet" in native.text
    assert b"a job stores complete results" in streamed.text
