"""vLLM's scheduler without a model: each step returns made-up tokens, and each step is checked."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import EngineArgs, PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ballast_policy.request import WAITING
from ballast_vllm.internals import PlannedBatch
from ballast_vllm.scheduler import AsyncBallastScheduler, BallastScheduler, SyncBallastScheduler

BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


class SyncTimed(SyncBallastScheduler):
    """A scheduler whose clock moves with the tokens of each step, so that nothing depends on the machine."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.now += 1e-3 + 1e-5 * num_tokens if num_tokens else 0.0
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncTimed(SyncTimed, AsyncBallastScheduler):
    """The same with asynchronous scheduling."""

    is_async = True


class Deviations:
    """What a scheduler of Ballast lets vLLM do apart from the plan."""

    def __init__(self, scheduler: Any) -> None:
        self.num_inexact = 0
        """Steps that computed some tokens, but not exactly those of the grants. Drafts count."""
        self.num_short = 0
        """Grants of which vLLM carried out a part."""
        self.num_drafts = 0
        self.num_preempted = 0
        """Preemptions by vLLM itself."""
        self._scheduler, self._run_planned = scheduler, scheduler.run_planned
        scheduler.run_planned = self._watch

    def _watch(self, grants: Any, *args: Any) -> Any:
        running = list(self._scheduler.running)
        output = self._run_planned(grants, *args)
        scheduled = output.num_scheduled_tokens
        self.num_inexact += bool(scheduled) and scheduled != grants
        self.num_short += sum(tokens < grants[request_id] for request_id, tokens in scheduled.items())
        self.num_drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self.num_preempted += sum(request not in self._scheduler.running for request in running)
        return output


class BareCore:
    """A scheduler class of vLLM with a fake model runner."""

    def __init__(
        self,
        model: Path,
        *,
        slots: int = 8,
        blocks: int = 400,
        is_async: bool = False,
        has_v2_runner: bool = False,
        scheduler: type = BallastScheduler,
        policy: dict[str, Any] | None = None,
        seed: int = 1,
        step_tokens: int = 512,
        max_tokens: int = 2048,
        tables: Sequence[KVCacheSpec] = (FULL,),
        **arguments: Any,
    ) -> None:
        """`tables`: the block tables of the layers. vLLM on a CPU gives a model only one."""
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=max_tokens,
            max_num_seqs=slots,
            max_num_batched_tokens=step_tokens + slots,
            enforce_eager=True,
            additional_config={"ballast": policy or {}},
            **arguments,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, tables[0].block_size
        groups = [KVCacheGroupSpec([f"layer {i}"], table) for i, table in enumerate(tables)]
        kv_cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
        self.is_async = is_async
        # Not before the configuration, which refuses the V2 model runner without Triton.
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(has_v2_runner))):
            self.scheduler = scheduler(
                vllm_config=config,
                kv_cache_config=kv_cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=False,
            )
        assert self.scheduler.use_v2_model_runner is has_v2_runner
        if isinstance(self.scheduler, PlannedBatch):
            self.deviations = Deviations(self.scheduler)
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block_size, hash_function)
        self.rng = random.Random(seed)
        self.flights: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.num_steps = 0
        self.num_most_resident = 0
        self.num_parked = 0
        self.made: list[str] = []
        self.answers: dict[str, int] = {}
        self.ended: set[str] = set()

    def add(
        self,
        kind: str = "online",
        *,
        prompt: int | list[int] = 64,
        output: int = 32,
        request_id: str | None = None,
        pooling: bool = False,
        resumable: bool = False,
        cache_salt: str | None = None,
        adapter: int = 0,
        images: Sequence[range] = (),
        status: RequestStatus = RequestStatus.WAITING,
        arrival_time: float | None = None,
        **place: Any,
    ) -> str:
        """Add a request; `prompt` is its length or its tokens, and `images` are the places of images in it."""
        request_id = request_id or f"{kind}-{len(self.made)}"
        self.made.append(request_id)
        tokens = prompt if isinstance(prompt, list) else [self.rng.randrange(256) for _ in range(prompt)]
        stated = {"ballast": {"class": kind, **place}}
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0, extra_args=stated)
        features = [
            MultiModalFeatureSpec(None, "image", f"{request_id} {place}", PlaceholderRange(place.start, len(place)))
            for place in images
        ]
        request = Request(
            request_id=request_id,
            mm_features=features or None,
            prompt_token_ids=tokens,
            sampling_params=None if pooling else sampling,
            pooling_params=PoolingParams(task="embed", extra_kwargs=stated) if pooling else None,
            block_hasher=self._hasher,
            cache_salt=cache_salt,
            lora_request=LoRARequest(f"adapter-{adapter}", adapter, "/adapter") if adapter else None,
            resumable=resumable,
            arrival_time=arrival_time,
        )
        request.status = status
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.ended.add(request_id)

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.get_num_unfinished_requests() and not self.flights

    def step(self) -> Any:
        """Schedule a step, and process the output of the step that is due."""
        output = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.flights.append((output, self.run(output)))
            self.num_steps += 1
        is_due = len(self.flights) > self.is_async or output is None or not output.num_scheduled_tokens
        if self.flights and is_due:
            self.process()
        return output

    def finish(self) -> None:
        """Step until no request is left, and check each step."""
        while not self.is_idle:
            self.step()
            self.check()
        self.check_idle()

    def process(self) -> None:
        """Process the output of the oldest step."""
        scheduler = self.scheduler
        output, answer = self.flights.popleft()
        found = scheduler.update_from_output(output, answer)
        for outputs in found.values():
            for one in outputs.outputs:
                self.answers[one.request_id] = self.answers.get(one.request_id, 0) + len(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended.add(one.request_id)
        if scheduler.num_spec_tokens and not self.is_async:  # an asynchronous one schedules drafts before it knows them
            drafted = [request for request in scheduler.running if not request.is_prefill_chunk]
            drafts = [[9] * self.rng.randint(0, output.num_spec_tokens_to_schedule) for _ in drafted]
            scheduler.update_draft_token_ids(DraftTokenIds([request.request_id for request in drafted], drafts))

    def run(self, output: Any) -> ModelRunnerOutput:
        """Return made-up tokens for the batch of a step."""
        ids, tokens, pooled = list(output.num_scheduled_tokens), [], []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            is_last = not request.is_prefill_chunk
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            num_accepted = self.rng.randint(0, len(drafts)) if drafts else 0
            tokens.append([7] * (1 + num_accepted) if is_last and request.pooling_params is None else [])
            pooled.append(torch.zeros(4) if is_last and request.pooling_params is not None else None)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            pooler_output=pooled if any(p is not None for p in pooled) else None,
        )

    def check(self) -> None:
        """Compare the records of the policy with the requests of vLLM."""
        scheduler, driver = self.scheduler, self.scheduler.driver
        driver.leave(scheduler.finished_req_ids, 0.0)
        host = driver.host
        assert host.imbalance() == ""
        assert set(driver.records) == set(scheduler.requests), "a request is known to one side only"
        assert len(host.residents) == len(scheduler.running)
        if scheduler.lora_config:
            resident = {request.lora_request.lora_int_id for request in scheduler.running if request.lora_request}
            assert len(resident) <= scheduler.lora_config.max_loras
        self.num_most_resident = max(self.num_most_resident, len(scheduler.running))
        for request in scheduler.running:
            record = driver.records[request.request_id]
            assert record.phase is not WAITING, f"{record} holds KV"
            known = request.num_tokens + request.num_output_placeholders
            assert record.num_tokens == known or not record.remaining, f"{record}"
            assert record.num_computed == request.num_computed_tokens, f"{record}: {request.num_computed_tokens}"
            assert record.num_output == request.num_output_tokens
            held = driver.blocks.held(request.request_id)
            assert record.num_blocks == held or (driver.blocks.mixed and record.num_blocks > held)
        waiting = {r.seq for r in host.backlog} | driver.places.outside.keys()
        assert waiting == {driver.records[r.request_id].seq for r in scheduler.waiting}
        for record in host.backlog:
            assert record.num_computed == record.num_blocks == 0

    def check_idle(self) -> None:
        """Nothing is left over, and every block is free again."""
        scheduler, driver = self.scheduler, self.scheduler.driver
        self.check()
        pool = scheduler.kv_cache_manager.block_pool
        assert not scheduler.requests
        left = (
            driver.live,
            driver.records,
            driver.ids,
            driver.blocked,
            driver.places.outside,
            driver.slos,
            driver.kv.hinted,
            driver.flights,
        )
        assert not any(left)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        stats = scheduler.ballast_stats()["stats"]
        assert all(of.running == of.parked == of.waiting == 0 for of in (stats.online, stats.offline))
