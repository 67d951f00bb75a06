from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE, Words, completion, cut, scale
from ballast_sim.replay.traffic import Arrival, read, read_lengths


def test_the_shipped_online_trace_is_half_an_hour_of_real_traffic():
    trace = read(ONLINE_TRACE)

    assert len(trace) > 10_000
    assert 1790 < trace[-1].seconds < 1800
    assert all(a.seconds <= b.seconds for a, b in pairwise(trace))


@pytest.mark.parametrize("path", [ONLINE_TRACE, OFFLINE_TRACE])
def test_every_request_of_both_traces_fits_the_small_model_at_a_sixteenth(path):
    assert max(arrival.num_tokens for arrival in scale(read_lengths(path), length=1 / 16)) <= 2048


def test_scaling_rounds_up_and_keeps_a_token():
    assert scale([Arrival(10, 1, 17)], length=1 / 16, speed=4) == [Arrival(2.5, 1, 2)]


def test_slices_follow_each_other_without_a_gap_and_count_from_the_start_of_the_first():
    trace = [Arrival(t, 1, 1) for t in (0.0, 1.0, 5.0, 6.0, 9.0, 20.0)]

    assert [a.seconds for a in cut(trace, [(0.5, 1.5), (5, 4), (9, 1)])] == [0.5, 1.5, 2.5, 5.5]


def test_a_slice_beyond_the_trace_is_refused():
    with pytest.raises(ValueError, match="the trace has 9 s"):
        cut([Arrival(9.0, 1, 1)], [(5, 5)])


def test_prompts_have_exactly_the_tokens_asked_for(model_dir: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    words, random = Words.of_tokenizer(model_dir / "tokenizer.json"), Random(0)

    for tokens in (1, 7, 160, 900):
        assert len(tokenizer.encode(words.prompt(tokens, random), add_special_tokens=False).ids) == tokens


def test_no_two_prompts_share_a_kv_block(model_dir: Path):
    words, random = Words.of_tokenizer(model_dir / "tokenizer.json"), Random(0)
    openings = {tuple(words.prompt(20, random).split()[:16]) for _ in range(5000)}

    assert len(openings) == 5000


def test_a_tokenizer_without_words_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')

    with pytest.raises(ValueError, match="expected at least 100"):
        Words.of_tokenizer(tmp_path / "tokenizer.json")


def test_the_body_asks_for_exactly_the_output_length_of_the_trace(model_dir: Path):
    words = Words.of_tokenizer(model_dir / "tokenizer.json")
    body = completion(Arrival(0, 5, 9), words, Random(0), model="m", stream=True)

    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (9, True, True)
