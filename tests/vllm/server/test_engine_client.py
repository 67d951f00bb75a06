"""The members of vLLM's API server that Ballast uses are there, and mean what Ballast assumes."""

from __future__ import annotations

import inspect
import warnings

import pytest

from ballast_vllm.calls import _NEUTRAL, can_continue

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM use what others deprecated
    from vllm.config import ParallelConfig
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import PrefillStats


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


def test_all_requests_and_outputs_pass_the_two_methods_that_ballast_replaces():
    source = inspect.getsource(AsyncLLM)

    assert (
        source.count("engine_core.add_request_async(") == 3
    )  # one of them is for KV connectors, which Ballast refuses
    assert "output_processor.process_outputs(" in source
    assert list(inspect.signature(AsyncMPClient.add_request_async).parameters) == ["self", "request"]
    assert list(inspect.signature(OutputProcessor.process_outputs).parameters)[:2] == ["self", "engine_core_outputs"]
    assert list(inspect.signature(OutputProcessor.has_request).parameters) == ["self", "request_id"]
    assert list(inspect.signature(AsyncMPClient.call_utility_async).parameters) == ["self", "method", "args"]
    assert isinstance(inspect.getattr_static(AsyncLLM, "errored"), property)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (EngineCoreRequest, {"request_id", "prompt_token_ids", "sampling_params", "pooling_params", "priority",
                             "cache_salt", "lora_request", "prompt_embeds", "resumable"}),
        (EngineCoreOutput, {"request_id", "new_token_ids", "finish_reason", "prefill_stats"}),
        (SamplingParams, {"extra_args", "max_tokens", "temperature", *_NEUTRAL}),
        (PoolingParams, {"extra_kwargs"}),
        (PrefillStats, {"num_cached_tokens"}),
        (ParallelConfig, {"_api_process_count"}),
    ],
)  # fmt: skip
def test_the_fields_that_ballast_reads_and_writes_exist(kind, names):
    fields = getattr(kind, "__struct_fields__", None) or list(kind.__annotations__)

    assert names <= set(fields)


def test_reasons_and_models_have_the_names_that_ballast_compares():
    assert {str(FinishReason.LENGTH), str(FinishReason.ABORT)} == {"length", "abort"}
    assert {"base_model_paths", "lora_requests"} <= set(OpenAIServingModels.__init__.__code__.co_names)


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
