"""The settings of vLLM that Ballast refuses: untested features, and settings that contradict the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ballast_vllm.versions import UnsupportedVllm

Check = tuple[Callable[[Any], bool], str]

CHECKS: tuple[Check, ...] = (
    (
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "pipeline_parallel_size is above 1, which Ballast does not support yet: use tensor_parallel_size.",
    ),
    (
        lambda config: config.parallel_config.data_parallel_size > 1,
        "data_parallel_size is above 1, which Ballast does not support yet: run one server for each replica.",
    ),
    (
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
        "Context parallelism is on, which Ballast does not support yet: set its sizes to 1.",
    ),
    (
        lambda config: config.kv_transfer_config is not None,
        "A KV connector is configured, which Ballast does not support yet: remove --kv-transfer-config.",
    ),
    (
        lambda config: config.ec_transfer_config is not None,
        "An encoder cache connector is configured, which Ballast does not support yet: remove --ec-transfer-config.",
    ),
    (
        lambda config: config.model_config.is_diffusion,
        "The model is a diffusion model, which Ballast does not support.",
    ),
    (
        lambda config: config.scheduler_config.policy != "fcfs",
        "scheduling_policy is not fcfs: remove --scheduling-policy, because Ballast decides the order of requests.",
    ),
    (
        lambda config: config.scheduler_config.long_prefill_token_threshold > 0,
        "long_prefill_token_threshold is set: remove it, because Ballast decides the size of each chunk.",
    ),
    (
        lambda config: config.scheduler_config.prefill_schedule_interval > 1,
        "prefill_schedule_interval is above 1: remove it, because Ballast decides when a prompt is computed.",
    ),
    (
        lambda config: config.scheduler_config.watermark > 0,
        "watermark is set: remove it, because Ballast decides how many KV blocks stay free.",
    ),
    (
        lambda config: config.scheduler_config.max_num_active_seqs is not None,
        "max_num_active_seqs is set: remove it, and limit the batch with max_num_seqs.",
    ),
    (
        # With prefix caching, vLLM turns the mode `none` into `align`.
        lambda config: config.cache_config.mamba_cache_mode == "align",
        (
            "mamba_cache_mode is align, as always if Mamba layers have a prefix cache, which Ballast does not support "
            "yet: set engine.prefixCache to false, or --no-enable-prefix-caching."
        ),
    ),
)
"""Each check states when it refuses a `VllmConfig`, and the sentence for the user."""


def check_config(config: Any) -> None:
    """Raise `UnsupportedVllm` with the first reason to refuse a `VllmConfig`."""
    for is_refused, sentence in CHECKS:
        if is_refused(config):
            raise UnsupportedVllm(sentence)
