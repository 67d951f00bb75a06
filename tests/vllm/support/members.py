"""Every member of vLLM that Ballast uses and vLLM does not document, by module of `ballast_vllm` and class of vLLM.

Four lists are not here, because `test_contract.py` reads them from Ballast's source: what it imports from vLLM, the
names in the state of the app, the states of a request, and the fields that `refusals` checks.
"""

from __future__ import annotations

from ballast_vllm.calls import NEUTRAL
from ballast_vllm.engine_client import DECIDING
from ballast_vllm.served_app import RENDERING

USED: dict[str, dict[str, str]] = {
    "internals": {
        "EngineCore": "scheduler",
        "GuidanceBackend": (
            "_build_ll_tokenizer allocate_token_bitmask compile_grammar disable_additional_properties "
            "is_tokenizer_supported"
        ),
        "GuidanceGrammar": "accept_tokens ll_matcher ll_tokenizer vocab_size",
        "SamplingParams": "_validate_structured_outputs structured_outputs",
        "StructuredOutputManager": "backend tokenizer vllm_config",
        "StructuredOutputsConfig": "backend",
        "StructuredOutputsParams": "structural_tag",
        "XgrammarBackend": "compile_grammar",
        "MsgpackEncoder": "encode",
        "MediaConnector": "allowed_local_media_path allowed_media_domains load_from_url load_from_url_async",
        "ImageMediaIO": "load_bytes",
        "VideoMediaIO": "image_io video_loader",
        "VideoLoader": "read_frames",
        "RequestQueue": (
            "add_request pop_request peek_request prepend_request prepend_requests remove_request remove_requests"
        ),
        "Scheduler": (
            "_reserve_prefill_lookahead _try_schedule_encoder_inputs _preempt_request "
            "_handle_blocked_waiting_request waiting running requests finished_req_ids encoder_cache_manager "
            "encoder_cache_mismatch_reqs kv_cache_manager max_num_running_reqs max_num_active_reqs "
            "max_num_scheduled_tokens max_model_len num_prefill_lookahead num_spec_tokens num_lookahead_tokens "
            "dynamic_sd_lookup use_v2_model_runner lora_config is_encoder_decoder vllm_config"
        ),
        "Request": (
            "status is_finished num_tokens num_output_tokens num_output_placeholders num_computed_tokens "
            "num_prompt_tokens max_tokens arrival_time resumable pooling_params sampling_params lora_request "
            "has_encoder_inputs get_num_encoder_embeds mm_features"
        ),
        "LoRAConfig": "max_loras",
        "LoRARequest": "lora_int_id",
        "EncoderCacheManager": "free request_cached_ids",
        "KVCacheManager": "block_pool coordinator empty_kv_cache_blocks enable_caching get_computed_blocks",
        "BlockPool": "num_gpu_blocks blocks get_num_free_blocks",
        "KVCacheBlock": "ref_cnt block_hash",
        "SingleTypeKVCacheManager": "req_to_blocks block_size get_num_skipped_tokens kv_cache_spec",
        "KVCacheBlocks": "blocks",
        "KVCacheCoordinator": "get_num_blocks_to_allocate single_type_managers",
        "SlidingWindowSpec": "sliding_window extra_retained_tokens",
        "ChunkedLocalAttentionSpec": "attention_chunk_size",
        "SchedulerConfig": "max_num_batched_tokens max_num_seqs",
        "VllmConfig": "max_in_flight_tokens scheduler_config",
    },
    "scheduler": {
        "AsyncScheduler": "",
        "ModelConfig": "runner_type get_num_experts get_num_experts_per_tok hf_text_config",
        "PauseState": "UNPAUSED PAUSED_ALL",
        "Scheduler": (
            "add_request schedule set_pause_state update_from_output pause_state scheduler_config "
            "structured_output_manager vllm_config"
        ),
        "SchedulerConfig": "async_scheduling enable_chunked_prefill",
        "SchedulerOutput": "num_scheduled_tokens",
        "VllmConfig": "additional_config model_config scheduler_config",
    },
    "driver": {
        "Request": (
            "request_id arrival_time is_finished max_tokens num_computed_tokens num_output_tokens num_prompt_tokens "
            "num_tokens pooling_params sampling_params"
        ),
    },
    "charges": {"Request": "num_computed_tokens num_output_placeholders num_output_tokens num_tokens"},
    "requests": {"PoolingParams": "extra_kwargs", "SamplingParams": "extra_args"},
    "calls": {
        "EngineCoreRequest": "lora_request prompt_embeds prompt_token_ids resumable sampling_params",
        "SamplingParams": f"temperature {' '.join(NEUTRAL)}",
    },
    "costs": {
        "RepetitionDetectionParams": "max_pattern_size min_count min_pattern_size",
        "SamplingParams": (
            "all_stop_token_ids allowed_token_ids bad_words bad_words_token_ids logit_bias max_tokens n num_logprobs "
            "output_kind prompt_logprobs repetition_detection stop_token_ids structured_outputs"
        ),
        "StructuredOutputsParams": "choice grammar",
    },
    "engine_client": {
        "AsyncLLM": (
            "abort add_request check_admission engine_core errored input_processor model_config output_processor "
            "renderer vllm_config"
        ),
        "AsyncMPClient": "add_request_async call_utility_async",
        "BeamSearchOnlineMixin": "beam_search",
        "BeamSearchParams": "beam_width max_tokens",
        "BaseRenderer": "_executor _mm_executor _process_mm_uuids render_messages render_messages_async",
        "ChatParams": "chat_template_kwargs",
        "CacheConfig": "cache_dtype",
        "DeviceConfig": "device_type",
        "EngineCoreOutput": "finish_reason new_token_ids prefill_stats request_id",
        "EngineCoreRequest": "cache_salt pooling_params priority request_id",
        "InputProcessor": "structured_outputs_config",
        "ModelConfig": f"get_vocab_size max_model_len runner_type {' '.join(DECIDING)}",
        "OutputProcessor": "has_request process_outputs",
        "ParallelConfig": "_api_process_count",
        "PoolingParams": "extra_kwargs",
        "PrefillStats": "num_cached_tokens",
        "SamplingParams": "extra_args max_tokens n prompt_logprobs structured_outputs",
        "ServingGenerativeScoring": "_build_prompts",
        "VllmConfig": "cache_config device_config lora_config parallel_config use_v2_model_runner",
    },
    "server": {
        "BaseFrontendArgs": f"chat_template lora_modules {' '.join(RENDERING)}",
        "BaseModelPath": "name",
        "CacheConfig": "block_size",
        "EngineArgs": "model",
        "FrontendArgs": "api_key host port ssl_keyfile",
        "LoRAConfig": "max_loras",
        "OpenAIServingModels": "base_model_paths lora_requests",
        "ParallelConfig": "world_size",
        "VllmConfig": "additional_config cache_config lora_config parallel_config",
    },
    "middleware": {"EngineArgs": "logging_config", "LoggingConfig": "formatter"},
    "serve": {
        "AsyncEngineArgs": "",
        "BaseFrontendArgs": "lora_modules",
        "EngineArgs": ("create_engine_config enable_lora from_cli_args load_format max_loras max_num_batched_tokens"),
        "ModelConfig": "runner_type",
        "SchedulerConfig": "max_num_batched_tokens max_num_seqs",
        "ServeSubcommand": "cmd",
        "UsageContext": "OPENAI_API_SERVER",
        "VllmConfig": "model_config num_speculative_tokens scheduler_config",
    },
    "hosted": {"AsyncLLM": "get_supported_tasks model_config"},
    "engine_replay": {
        "InprocClient": "engine_core",
        "LLMEngine": "engine_core model_config",
        "ModelConfig": "get_vocab_size",
    },
}
