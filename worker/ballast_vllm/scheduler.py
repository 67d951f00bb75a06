"""The scheduler class for `vllm serve --scheduler-cls ballast_vllm.scheduler.BallastScheduler`.

`BallastScheduler` is synchronous or asynchronous, as vLLM's configuration states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from typing import Any

import ballast_vllm.version_gate  # noqa: F401 - before vLLM, whose modules move between versions

# isort: split
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from ballast_log import Log
from ballast_policy.host import Planner
from ballast_policy.step.planner import plan
from ballast_vllm import stats
from ballast_vllm.driver import Driver
from ballast_vllm.internals import (
    KvBlocks,
    PlannedBatch,
    add_utility,
    image_places,
    take_formats,
)
from ballast_vllm.plan_limits import CPU_MULTIPLE, PlanLimits
from ballast_vllm.refusals import check_config
from ballast_vllm.settings import StepLimits, changed, initial

log = Log(__name__)

IDLE_SECONDS = 0.001
"""Time that EngineCore sleeps after a step without a batch. vLLM would plan again at once."""
COUNTED_SECONDS = 5.0
"""Age of the counts of blocks, cached ones and offline ones. Bounds the cost: a count reads every block."""


class SyncBallastScheduler(PlannedBatch):
    """Ballast's policy with synchronous scheduling: the methods of a vLLM scheduler in which Ballast takes part."""

    planner: Planner = staticmethod(plan)
    is_async = False
    multiple = CPU_MULTIPLE if current_platform.is_cpu() else 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        check_config(config)
        self.kv_blocks = KvBlocks(self)
        self.limits = StepLimits(
            self.scheduler_config.max_num_seqs,
            self.max_num_scheduled_tokens,
            num_draft_tokens=self.num_spec_tokens,
            most_residents=self.most_residents,
            is_encoder=config.model_config.runner_type == "pooling",
        )
        self.driver = self.new_driver()
        self._counted = (-inf, 0, 0)

    def clock(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def new_driver(self) -> Driver:
        """Return a driver that has learned nothing."""
        policy = initial(
            self.vllm_config.additional_config,
            self.limits,
            num_blocks=self.kv_blocks.num_blocks,
            block_tokens=self.kv_blocks.block_tokens,
            expert_share=expert_share(self.vllm_config.model_config),
        )
        scheduler = self.scheduler_config
        return Driver(
            policy,
            self,
            self.kv_blocks,
            limits=PlanLimits(
                self.max_num_scheduled_tokens,
                multiple=self.multiple,
                has_whole_prompts=not scheduler.enable_chunked_prefill,
                find_images=image_places if scheduler.disable_chunked_mm_input else None,
                num_ahead=self.num_prefill_lookahead,
                num_drafts=self.num_spec_tokens,
            ),
            is_async=self.is_async,
            max_tokens=self.max_model_len,
            num_adapters=self.lora_config.max_loras if self.lora_config else 0,
            planner=self.planner,
            clock=self.clock,
        )

    def add_request(self, request: Any) -> None:
        now = self.clock()
        self.driver.leave(self.finished_req_ids, now)  # its id may be in use again
        is_known = request.request_id in self.requests
        super().add_request(request)
        if is_known:
            return
        if request.resumable:
            self.fail(request)  # streamed input: not supported
        else:
            self.driver.enter(request, now, time.time())

    def schedule(self, *args: Any) -> Any:
        now = self.clock()
        driver = self.driver
        driver.leave(self.finished_req_ids, now)
        if self.pause_state == PauseState.PAUSED_ALL or not driver.live:
            driver.grants = {}
            return self.run_planned({}, (), *args)
        self.uses_drafts = driver.draft_gain.is_on
        driver.begin(now, admits=self.pause_state == PauseState.UNPAUSED)
        output = self.run_planned(driver.grants, driver.admissions, *args)
        driver.dispatched(output.num_scheduled_tokens, now)
        if not output.num_scheduled_tokens and not driver.is_busy:
            time.sleep(IDLE_SECONDS)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        is_step = bool(scheduler_output.num_scheduled_tokens)
        driver = self.driver
        now = self.clock()
        driver.leave(self.finished_req_ids, now)  # aborted during the step
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if is_step:
            driver.computed(now)
        driver.leave(self.finished_req_ids, now)
        return outputs

    def set_pause_state(self, pause_state: Any) -> None:
        self.driver.host.ended(self.clock())  # no pause counts as the time of a step
        super().set_pause_state(pause_state)

    def on_preempted(self, request: Any) -> None:
        self.driver.preempted(request)

    def ballast_configure(self, message: Mapping[str, Any]) -> None:
        """Change the policy configuration from the next step on.

        Raises:
            InvalidSettings: the message names an unknown field or has a wrong value. The configuration is unchanged.
        """
        driver = self.driver
        driver.configure(self.limits.fit(changed(driver.host.config, message)))

    def ballast_stats(self, since: int = 0) -> stats.Message:
        """Return all figures, and the steps after the step with the number `since`."""
        now = self.clock()
        self.driver.leave(self.finished_req_ids, now)
        if now - self._counted[0] > COUNTED_SECONDS:
            self._counted = now, self.kv_blocks.num_cached, self.driver.private_blocks.count_offline()
        _, num_cached, num_counted = self._counted
        kv_free, kv_offline = self.kv_blocks.num_free, self.driver.private_blocks.num_offline
        return stats.message(
            self.driver.counters,
            self.driver.host,
            kv_free=kv_free,
            kv_cached=min(kv_free, num_cached),
            kv_offline=num_counted if kv_offline is None else kv_offline,
            num_blocked=self.driver.num_blocked,
            held_up=self.driver.held_up(now),
            since=since,
        )


class AsyncBallastScheduler(SyncBallastScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling: vLLM plans a step while the step before it runs."""

    is_async = True


class BallastScheduler(AsyncBallastScheduler):
    """Ballast's policy with the scheduling that vLLM's configuration states."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        chosen = AsyncBallastScheduler if config.scheduler_config.async_scheduling else SyncBallastScheduler
        return chosen(*args, **kwargs)


def expert_share(model: Any) -> float:
    """Return the share of the experts of a layer that one token passes; 0 for a dense model."""
    num_passed, num_experts = model.get_num_experts_per_tok(), model.get_num_experts()
    layers = getattr(model.hf_text_config, "ffn_config", None)
    if not num_experts and layers is not None:  # DBRX, which vLLM does not look into
        num_passed, num_experts = getattr(layers, "moe_top_k", 0), getattr(layers, "moe_num_experts", 0)
    if num_experts > 1 and not num_passed:
        log.warning("experts per token not found, steps are predicted as those of a dense model", experts=num_experts)
    return num_passed / num_experts if 0 < num_passed < num_experts else 0.0


def _configure(core: Any, message: Mapping[str, Any]) -> None:
    # Only an API server of Ballast checks formats for this choice. It sends its configuration before its first request.
    take_formats(core.scheduler.structured_output_manager)
    core.scheduler.ballast_configure(message)


def _stats(core: Any, since: int = 0) -> stats.Message:
    found: stats.Message = core.scheduler.ballast_stats(since)
    return found


add_utility("ballast_configure", _configure)
add_utility("ballast_stats", _stats)
