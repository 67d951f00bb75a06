"""What Ballast requires of vLLM's private members.

The first part reads source: `VLLM_SOURCE=DIR` names the package of another version, which need not be installed. The
second part runs the installed version.
"""

from __future__ import annotations

import ast
from dataclasses import fields

import pytest
import source
from bare_core import BareCore
from vllm.config import ModelConfig
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from ballast_vllm.engine_client import DECIDING
from ballast_vllm.internals import PRIVATE, PlanQueue

CHUNKS = {"chunk_tokens": 32}
REACHED = {
    "KVCacheBlocks": ("blocks",),  # the hit of `get_computed_blocks`, in `KvBlocks.match_prefix`
    "KVCacheCoordinator": ("single_type_managers",),  # the block tables, in `KvBlocks`
    "PauseState": ("UNPAUSED", "PAUSED_ALL"),  # in `schedule` of `ballast_vllm.scheduler`
    "Scheduler": ("pause_state",),  # also there
}
"""Members that Ballast uses and `PRIVATE` does not name, by class."""


@pytest.mark.parametrize(
    ("name", "members"),
    [*PRIVATE.items(), *REACHED.items()],
    ids=[*PRIVATE, *(f"{name}, reached" for name in REACHED)],
)
def test_every_private_member_exists(name, members):
    assert set(members) - source.members(name) == set()


def test_schedule_asks_the_hook_for_running_and_for_waiting_requests():
    calls = [
        node
        for node in ast.walk(source.method("Scheduler", "schedule"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._reserve_prefill_lookahead"
    ]

    assert len(calls) == 2
    assert source.parameters("Scheduler", "_reserve_prefill_lookahead") == [
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ]


def test_a_running_request_without_tokens_is_left_out_and_keeps_its_place():
    running = source.text("Scheduler", "schedule").split("_reserve_prefill_lookahead")[1]

    assert "if num_new_tokens == 0:\n            req_index += 1\n            continue" in running.replace(
        "    " * 3, "    " * 3
    )


def test_admissions_come_from_the_waiting_queue_in_its_order():
    code = source.text("Scheduler", "schedule")

    assert "request_queue = self.waiting" in code
    assert "request = request_queue.peek_request()" in code
    assert "request = request_queue.pop_request()" in code


def test_the_methods_that_ballast_overrides_have_their_parameters():
    assert source.parameters("Scheduler", "schedule") == ["self", "throttle_prefills"]
    assert source.parameters("Scheduler", "update_from_output") == ["self", "scheduler_output", "model_runner_output"]
    assert source.parameters("Scheduler", "add_request") == ["self", "request"]
    assert source.parameters("Scheduler", "_preempt_request")[:3] == ["self", "request", "timestamp"]
    assert source.parameters("Scheduler", "_handle_blocked_waiting_request") == ["self", "request"]


def test_the_drafts_of_a_step_follow_a_lookup_by_batch_size():
    code, placeholders = source.text("Scheduler", "schedule"), source.text("AsyncScheduler", "_update_after_schedule")

    assert "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(num_scheduled_tokens)]" in code
    assert "self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None" in code  # else an admission has no drafts
    assert "[-1] * scheduler_output.num_spec_tokens_to_schedule" in placeholders


def test_a_request_that_failed_is_a_member_of_a_set():
    assert "self.encoder_cache_mismatch_reqs: set[str] = set()" in source.text("Scheduler", "__init__")


def test_a_utility_call_is_a_method_of_the_engine_core():
    code = (source.root() / source.FILES["EngineCore"]).read_text()

    assert "getattr(self, method_name)" in code


# The installed version


def test_a_plan_queue_is_a_whole_request_queue():
    assert not RequestQueue.__abstractmethods__ - set(vars(PlanQueue))


def test_a_grant_caps_a_chunk_and_no_grant_keeps_the_kv(tiny_model):
    core = BareCore(tiny_model, policy=CHUNKS)
    scheduler = core.scheduler
    first = core.add(prompt=100)
    core.step()
    request = scheduler.requests[first]
    held = len(scheduler.kv_blocks.tables[first])

    output = scheduler.run_planned({first: 7}, ())
    assert output.num_scheduled_tokens == {first: 7}
    output = scheduler.run_planned({}, ())
    assert output.num_scheduled_tokens == {}
    assert scheduler.running == [request]
    assert len(scheduler.kv_blocks.tables[first]) >= held > 0


def test_only_the_admissions_of_the_plan_get_a_slot_in_its_order(tiny_model):
    core = BareCore(tiny_model)
    scheduler = core.scheduler
    ids = [core.add(prompt=20) for _ in range(4)]
    chosen = [scheduler.requests[ids[3]], scheduler.requests[ids[1]]]

    output = scheduler.run_planned({ids[3]: 20, ids[1]: 5}, chosen)

    assert output.num_scheduled_tokens == {ids[3]: 20, ids[1]: 5}
    assert scheduler.running == chosen
    assert list(scheduler.waiting) == [scheduler.requests[ids[0]], scheduler.requests[ids[2]]]


def test_a_preempted_request_waits_without_kv(tiny_model):
    core = BareCore(tiny_model)
    scheduler = core.scheduler
    first = core.add(prompt=64)
    core.step()
    request = scheduler.requests[first]

    scheduler.preempt(request, 1.0)

    assert request.status == RequestStatus.PREEMPTED
    assert request.num_computed_tokens == 0
    assert scheduler.kv_blocks.held(first) == 0
    assert scheduler.running == []
    assert list(scheduler.waiting) == [request]
    core.check()


def test_finished_and_aborted_requests_are_named_until_the_next_step(tiny_model):
    core = BareCore(tiny_model)
    ended, aborted = core.add(output=1), core.add(output=50)
    core.step()

    core.abort(aborted)

    assert core.scheduler.finished_req_ids == {ended, aborted}
    core.step()
    assert core.scheduler.finished_req_ids == set()


def test_the_blocks_of_a_shared_prefix_count_their_users(tiny_model):
    core = BareCore(tiny_model, blocks=30)
    blocks = core.scheduler.kv_blocks
    prompt = list(range(100))
    first = core.add(prompt=prompt)
    core.step()
    waiting = core.add(prompt=prompt)
    record = core.scheduler.driver.records[waiting]

    blocks.match_prefix(core.scheduler.requests[waiting], record)

    assert (record.num_cached, record.num_cached_idle) == (96, 0)
    assert blocks.num_free == 29 - blocks.held(first)
    core.step()
    blocks.num_shared_blocks = 6
    assert (blocks.held(first), blocks.private(first)) == (7, 1)
    core.abort(first)
    core.abort(waiting)
    assert blocks.num_free == 29
    assert blocks.num_cached >= 6


def test_requests_with_different_salts_share_no_block(tiny_model):
    core = BareCore(tiny_model)
    prompt = list(range(100))
    core.add(prompt=prompt, cache_salt="a\n")
    core.step()

    for salt, num_cached in (("b\n", 0), (None, 0), ("a\n", 96)):
        waiting = core.add(prompt=prompt, cache_salt=salt)
        record = core.scheduler.driver.records[waiting]
        core.scheduler.kv_blocks.match_prefix(core.scheduler.requests[waiting], record)
        assert record.num_cached == num_cached, salt


def test_the_fields_that_decide_the_tokens_of_an_answer_exist():
    assert set(DECIDING) - {field.name for field in fields(ModelConfig)} == set()
