"""Traces are read as they are, and refused with the line that is wrong."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from ballast_sim.errors import BadInput, BadTrace
from ballast_sim.replay.arrivals import bursts, generate
from ballast_sim.replay.traffic import Arrival, busiest, excerpt, read, read_lengths, repeated, tokens_per_second


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_azure_trace_is_read_from_its_first_request_on(write):
    path = write(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )

    first, second = read(path)

    assert (first.seconds, first.num_prompt, first.num_output) == (0.0, 374, 44)
    assert second.seconds == pytest.approx(4.314579)


def test_the_arena_trace_names_its_tenants(write):
    path = write("req_time_s,client,prompt_len,output_len\n0.0,alice,13,199\n0.2,bob,36,137\n")

    assert [arrival.tenant for arrival in read(path)] == ["alice", "bob"]


def test_a_table_of_lengths_is_an_offline_pool_and_no_trace(write):
    path = write("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n")

    assert [(a.num_prompt, a.num_output) for a in read_lengths(path)] == [(3772, 54)]
    with pytest.raises(BadTrace, match="missing: arrival_seconds or req_time_s"):
        read(path)


def test_a_mooncake_trace_has_times_in_milliseconds(write):
    path = write(
        '{"timestamp": 0, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 1500, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1]}\n',
        "trace.jsonl",
    )

    assert read(path) == [Arrival(0.0, 2000, 5), Arrival(1.5, 1600, 7)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "holds no request"),
        ("arrival_seconds,prompt_tokens,output_tokens\n", "holds no request"),
        ("when,prompt_tokens,output_tokens\n0,1,1\n", "found the columns when, prompt_tokens, output_tokens; missing:"),
        ("arrival_seconds,in,output_tokens\n0,1,1\n", "missing: prompt_tokens or context_tokens or ContextTokens"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1,1\n0.5,-3,1\n", "line 3: prompt_tokens is '-3'; expected"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1,0\n", "line 2: output_tokens is '0'; expected"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1.5,1\n", "line 2: prompt_tokens is '1.5'; expected"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1\n", "line 2: output_tokens is None; expected"),
        ("arrival_seconds,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: arrival_seconds is 'nan'; expected"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1e308,1,1\n", "line 2: arrival_seconds is '1e308'; expected"),
        (
            "timestamp,prompt_tokens,output_tokens\n5,1,1\n",
            "only a Mooncake trace, with input_length, has the column timestamp.",
        ),
        ("arrival_seconds,prompt_tokens,output_tokens\n5,1,1\n3,1,1\n", "line 3: the request arrives 2 s before"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
            "line 2: TIMESTAMP is 'yesterday'; expected a date",
        ),
        ('{"arrival_seconds": 0, "prompt_tokens": 1,\n', "line 1: is not JSON"),
        ("[" * 9_000 + "\n", "is a JSON array"),
        ('{"arrival_seconds": ' + "[" * 9_000 + "\n", "line 1: is not JSON (maximum recursion depth"),
        (
            '{"arrival_seconds": 0, "prompt_tokens": 1, "output_tokens": 1' + "0" * 400 + "}",
            "line 1: output_tokens is 1000",
        ),
        ('\n[{"arrival_seconds": 0, "prompt_tokens": 1, "output_tokens": 1}]', "is a JSON array; expected JSONL"),
        ('{"arrival_seconds": 0, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', "line 2: found list, expected"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(write, text, found):
    with pytest.raises(BadTrace) as error:
        read(write(text))

    assert found in str(error.value)


def test_a_file_that_is_no_utf_8_text_is_refused_with_advice(tmp_path):
    text = "arrival_seconds,prompt_tokens,output_tokens\n0,1,1\n"
    for content in (gzip.compress(text.encode()), text.encode("utf-16")):
        (tmp_path / "trace").write_bytes(content)

        with pytest.raises(BadTrace, match=r"is not UTF-8 text .* Unpack a compressed file, and save other text as"):
            read(tmp_path / "trace")


def test_a_line_without_a_tenant_has_the_default_tenant(write):
    lines = [
        '{"arrival_seconds": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": 0}',
        '{"arrival_seconds": 1, "prompt_tokens": 1, "output_tokens": 1}',
    ]

    assert [arrival.tenant for arrival in read(write("\n".join(lines)))] == ["0", "default"]


@pytest.mark.parametrize(
    "text",
    [
        f"arrival_seconds,prompt_tokens,output_tokens,tenant,text\n0,1,1,a\u2028b,{'x' * 200_000}\n1,1,1,a\u2028b,\n",
        '{"arrival_seconds": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "a\u2028b"}\n' * 2,
    ],
)
def test_a_column_may_have_a_long_text_and_separators_of_unicode(write, text):
    assert [arrival.tenant for arrival in read(write(text))] == ["a\u2028b"] * 2


def test_dates_before_1970_are_times_like_others(write):
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "1969-12-31 23:59:50,10,10", "1969-12-31 23:59:55,10,10")

    assert [arrival.seconds for arrival in read(write("\n".join(lines)))] == [0.0, 5.0]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadTrace, match="cannot be read"):
        read(tmp_path / "nothing.csv")


def test_a_trace_is_stretched_to_a_rate():
    trace = [Arrival(second, 90, 10) for second in (0.0, 1.0, 2.0)]

    slower = excerpt(trace, tokens_per_second(trace) / 4, seconds=12)

    assert [arrival.seconds for arrival in slower] == [0.0, 4.0, 8.0]
    with pytest.raises(BadInput, match="above 0"):
        excerpt(trace, 0, seconds=12)
    with pytest.raises(BadInput, match="two requests"):
        tokens_per_second(trace[:1])


def test_an_excerpt_has_the_wanted_rate_however_quiet_the_trace_begins():
    trace = [Arrival(10.0 * i, 90, 10) for i in range(10)] + [Arrival(100.0 + i, 90, 10) for i in range(1000)]

    part = excerpt(trace, wanted=50.0, seconds=40.0)

    assert len(part) == 20
    assert tokens_per_second(part) == pytest.approx(50.0)
    assert excerpt(trace[:5], wanted=50.0, seconds=1e6)[-1].seconds == pytest.approx(10.0)


def test_a_trace_that_is_too_short_comes_round_again_at_its_own_rate():
    trace = [Arrival(2.0 * i, 90, 10) for i in range(5)]

    longer = repeated(trace, tokens=1100)

    assert [arrival.seconds for arrival in longer] == [2.0 * i for i in range(15)]
    assert repeated(trace, tokens=500) == trace


POOL = [Arrival(0.0, 100, 10), Arrival(0.0, 200, 20)]


@pytest.mark.parametrize(
    ("share", "expected"), [(lambda _: 1.0, 5.0), (bursts(0.2, every=10.0, lasting=5.0), 3.0)], ids=["even", "bursts"]
)
def test_generated_arrivals_follow_their_rate_and_seed(share, expected):
    arrivals = generate(5.0, share=share, seconds=1000.0, lengths=POOL, seed=3)

    assert arrivals == generate(5.0, share=share, seconds=1000.0, lengths=POOL, seed=3)
    assert arrivals != generate(5.0, share=share, seconds=1000.0, lengths=POOL, seed=4)
    assert len(arrivals) / 1000 == pytest.approx(expected, rel=0.05)
    assert all(a.seconds <= b.seconds for a, b in pairwise(arrivals))


def test_bursts_arrive_in_bursts():
    share = bursts(0.05, every=10.0, lasting=2.0)

    arrivals = generate(20.0, share=share, seconds=500.0, lengths=POOL, seed=1)

    inside = sum(1 for arrival in arrivals if arrival.seconds % 10.0 < 2.0)
    assert inside / len(arrivals) == pytest.approx(40 / 48, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"rate": 0.0}, "must be above 0"),
        ({"share": lambda _: 0.0}, "no request arrives"),
    ],
)
def test_impossible_generators_are_refused(arguments, found):
    usual = {"rate": 5.0, "seconds": 10.0, "lengths": POOL, "seed": 0}

    with pytest.raises(BadInput, match=found):
        generate(**{**usual, **arguments})


def test_the_busiest_rows_are_never_none():
    trace = [Arrival(0.0, 5, 5), Arrival(2.5e11, 5, 5)]

    assert busiest(trace, 0.0) == range(2), "a rate of so few tokens that a float has none"
