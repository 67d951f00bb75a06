"""Replay a trace on vLLM with Ballast's scheduler, in one thread without HTTP, to validate the simulator."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import ballast_vllm.version_gate  # noqa: F401 - before vLLM, whose modules move between versions

# isort: split
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from ballast_policy.learning.cost import attended
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_policy.step.budget import ONLINE_CHUNKS
from ballast_sim.replay.step_model import BatchWork
from ballast_sim.replay.traffic import Arrival
from ballast_sim.validation.engine_replay import EngineReplay, ReplayClock, Session
from ballast_vllm.scheduler import SyncBallastScheduler

BLOCK_TOKENS = 32
WARM_UPS = ((1, 1), (16, 8), (1, 64), (4, 64))
"""Numbers of requests and of prompt tokens of the warm-up, after which the policy trusts its step times."""
WARM_UP_ROUNDS = 9


class _RecordingScheduler(SyncBallastScheduler):
    """A scheduler that records the work of each step, on the clock of a replay."""

    ticks = ReplayClock("wall")
    work = BatchWork()
    multiple = 1  # the simulator plans steps of any size

    def clock(self) -> float:
        return self.ticks.now()

    def schedule(self, *args: Any) -> Any:
        output = super().schedule(*args)
        self.work = self._work(output.num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.ticks.computed(self.work)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _work(self, scheduled: Mapping[str, int]) -> BatchWork:
        before, new, contexts = [], [], []
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]  # it counts the tokens of this step as computed
            if tokens == 1 and request.num_output_tokens:
                contexts.append(request.num_computed_tokens)
            else:
                before.append(request.num_computed_tokens - tokens)
                new.append(tokens)
        return BatchWork(
            num_prefill=sum(new),
            prefill_context=sum(attended(start, tokens) for start, tokens in zip(before, new, strict=True)),
            prefill_before=sum(before),
            num_decode=len(contexts),
            decode_context=sum(contexts),
            num_chunks=len(new),
        )


class VllmUnderTest:
    """vLLM in this process. Each replay starts with a policy that has learned only from the same warm-up."""

    def __init__(self, directory: Path, config: PolicyConfig, *, longest: int) -> None:
        """Load the model.

        Args:
            directory: The checkpoint.
            config: The policy; `config` of the object has its sizes as vLLM has them.
            longest: Most tokens of a request.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.slots, self.work = config.slots, BatchWork()
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(directory),
                dtype="float32",
                max_model_len=longest,
                max_num_seqs=config.slots,
                max_num_batched_tokens=ONLINE_CHUNKS * config.chunk_tokens + config.slots,
                block_size=BLOCK_TOKENS,
                num_gpu_blocks_override=config.slots * -(-longest // BLOCK_TOKENS) + 1,
                enable_prefix_caching=False,
                enforce_eager=True,
                async_scheduling=False,
                disable_log_stats=True,
                scheduler_cls=_RecordingScheduler,
                additional_config={
                    "ballast": {"ttft": config.ttft, "tpot": config.tpot, "chunk_tokens": config.chunk_tokens}
                },
            )
        )
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self._scheduler: _RecordingScheduler = self._engine.engine_core.engine_core.scheduler

    @property
    def config(self) -> PolicyConfig:
        """The configuration of the policy."""
        return self._scheduler.driver.host.config

    def replay(self, online: Sequence[Arrival], offline: Sequence[Arrival], ticks: ReplayClock) -> EngineReplay:
        """See `Replays`."""
        self._scheduler.ticks = ticks
        self._scheduler.driver = self._scheduler.new_driver()
        self._warm_up()
        found = Session(self, ticks, online, offline, Random(0)).run()
        self._engine.abort_request(list(self._scheduler.requests))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return found

    def _warm_up(self) -> None:
        for turn in range(WARM_UP_ROUNDS):
            for batch, (number, prompt) in enumerate(WARM_UPS):
                for i in range(min(number, self.slots)):
                    name = f"warm-{turn}-{batch}-{i}"
                    self.submit(name, tuple(range(8, 8 + prompt)), 6, RequestClass.OFFLINE, None)
                while self._engine.has_unfinished_requests():
                    self._engine.step()

    def submit(
        self, name: str, prompt: tuple[int, ...], num_output: int, request_class: RequestClass, arrival: float | None
    ) -> None:
        """Add a request."""
        late = 0.0 if arrival is None else max(0.0, self._scheduler.clock() - arrival)
        sampling = SamplingParams(
            max_tokens=num_output,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"ballast": {"class": request_class.value}},
        )
        prompt_of = {"prompt_token_ids": list(prompt)}
        self._engine.add_request(name, prompt_of, sampling, arrival_time=time.time() - late)

    def step(self) -> list[tuple[str, bool]]:
        """Compute a step."""
        self._scheduler.work = BatchWork()
        outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
        self.work = self._scheduler.work
        return [(output.request_id, output.finished) for output in outputs if output.outputs[0].token_ids]
