"""Which requests Ballast continues, and the names of vLLM that it compares. `test_contract.py` has the members."""

from __future__ import annotations

import warnings

import pytest

from ballast_vllm.calls import can_continue

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM use what others deprecated
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest, FinishReason


def make_request(**params) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(**({"temperature": 0.0} | params)),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_reasons_have_the_names_that_ballast_compares():
    assert {str(FinishReason.LENGTH), str(FinishReason.ABORT)} == {"length", "abort"}


def test_a_plain_greedy_request_can_be_continued():
    assert can_continue(make_request(stop=["z"], max_tokens=9, logit_bias={3: 1.0}, ignore_eos=True))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3, "max_tokens": 9},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"bad_words": ["a"]},
        {"n": 2, "temperature": 0.5},
    ],
)
def test_a_request_whose_sampling_depends_on_its_answer_is_not_continued(params):
    assert not can_continue(make_request(**params))
