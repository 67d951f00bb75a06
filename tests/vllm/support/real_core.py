"""A whole engine of vLLM in this process, with a model on the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest
from bare_core import Deviations
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core import EngineCore

SCHEDULER = "ballast_vllm.scheduler.BallastScheduler"


class RealCore:
    """An engine that a test steps."""

    def __init__(
        self,
        model: Path,
        *,
        policy: dict[str, Any] | None = None,
        slots: int = 8,
        is_async: bool = False,
        scheduler: str | type = SCHEDULER,
        **arguments: Any,
    ) -> None:
        """Without a `policy`, vLLM schedules by itself."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if policy is not None:
            arguments |= {"scheduler_cls": scheduler, "additional_config": {"ballast": policy}}
        usual: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 384,
            "max_num_seqs": slots,
            "max_num_batched_tokens": 384 + slots,
            "block_size": 32,
            "enforce_eager": True,
            "disable_log_stats": True,
            "seed": 0,
            "async_scheduling": is_async,
        }
        with pytest.MonkeyPatch.context() as patch:
            if is_async:
                allow_async(patch)
            self.engine = LLMEngine.from_engine_args(EngineArgs(model=str(model), **usual | arguments))
        self.core: EngineCore = self.engine.engine_core.engine_core
        assert (self.core.batch_queue is not None) is is_async
        if policy is not None:
            self.deviations = Deviations(self.core.scheduler)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.num_steps = 0

    def add(self, request_id: str, prompt: list[int], output: int, *, kind: str = "online", **place: Any) -> None:
        sampling = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            extra_args={"ballast": {"class": kind, **place}},
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> None:
        self.num_steps += 1
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.reasons[output.request_id] = output.outputs[0].finish_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()
        del self.engine, self.core
        gc.collect()


def allow_async(patch: pytest.MonkeyPatch) -> None:
    """Allow asynchronous scheduling on a CPU: vLLM switches it off there in each check of a configuration."""
    check = CpuPlatform.check_and_update_config

    def check_all_else(cls: type[CpuPlatform], config: VllmConfig) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_all_else))


def prompt_of(seed: object, *, shortest: int = 8, longest: int = 200) -> list[int]:
    """Return a prompt that depends only on the seed."""
    rng = Random(f"{seed}")
    return [rng.randrange(256) for _ in range(rng.randint(shortest, longest))]


def run_mixed(
    core: RealCore,
    *,
    number: int = 24,
    output: tuple[int, int] = (8, 50),
    after_step: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Run online and offline requests that arrive over time; return their answers. Arrivals depend on steps."""
    rng, left = Random(5), []
    for i in range(number):
        kind = "online" if i % 3 == 0 else "offline"
        left.append((kind, f"{kind}-{i}", prompt_of(i), rng.randint(*output)))
    for kind, request_id, prompt, length in [x for x in left if x[0] == "offline"]:
        core.add(request_id, prompt, length, kind=kind)
    online = [x for x in left if x[0] == "online"]
    while online or core.engine.has_unfinished_requests():
        if online and (core.num_steps % 7 == 3 or not core.engine.has_unfinished_requests()):
            kind, request_id, prompt, length = online.pop()
            core.add(request_id, prompt, length, kind=kind)
        core.step()
        after_step()
        assert core.num_steps < 20_000
    return core.tokens
