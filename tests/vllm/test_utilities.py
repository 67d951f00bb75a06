"""The utility calls: figures of the engine, and a configuration that is in force at the next step."""

from __future__ import annotations

import time
from math import inf
from types import SimpleNamespace

import msgspec
import pytest
from bare_core import AsyncTimed, BareCore, SyncTimed
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import REFRESH
from ballast_policy.request import OFFLINE, ONLINE, Request
from ballast_vllm.settings import InvalidSettings
from ballast_vllm.snapshot_kv import EAGER, HINT_STEPS, SnapshotKv
from ballast_vllm.stats import engine_stats, steps


def test_the_figures_balance_with_what_was_computed(tiny_model):
    core = BareCore(tiny_model, policy={"offline_share": 0.25})
    for i in range(6):
        core.add("online" if i % 2 else "offline", prompt=40, output=10, tenant="ab"[i % 2])
    core.finish()

    found = msgspec.msgpack.decode(msgspec.msgpack.encode(EngineCore.ballast_stats(core)))

    stats = engine_stats(found)
    for request_class in (ONLINE, OFFLINE):
        of = stats.of(request_class)
        assert (of.running, of.parked, of.waiting) == (0, 0, 0)
        assert (of.prefill_tokens, of.decode_tokens, of.wasted_tokens) == (3 * 40, 3 * 10, 0)
    assert stats.service == {(ONLINE, "b"): 3 * (40 + 2 * 10), (OFFLINE, "a"): 3 * (40 + 2 * 10)}
    assert stats.kv_used + stats.kv_cached + stats.kv_free == 399
    assert stats.steps == len(found["recent"])
    assert core.deviations.num_inexact == 0
    assert (stats.reservation.slots, stats.reservation.is_met) == (2, True)


def test_blocks_that_are_used_again_are_not_cached_any_more(tiny_model):
    core = BareCore(tiny_model, blocks=40, scheduler=SyncTimed)
    core.add(prompt=500, output=1)
    core.finish()
    before = core.scheduler.ballast_stats()["stats"]
    last = core.add(prompt=500, output=9)
    while not core.answers.get(last):
        core.step()
    after = core.scheduler.ballast_stats()["stats"]

    assert (before.kv_used, before.kv_cached, before.kv_free) == (0, 31, 8)
    assert (after.kv_used, after.kv_cached, after.kv_free) == (32, 7, 0)
    assert (before.kv_waste_ratio, after.kv_waste_ratio) == (0, 12 / 512)


def test_the_shared_blocks_of_offline_requests_are_not_counted_at_each_call_of_the_figures(tiny_model, monkeypatch):
    core = BareCore(tiny_model, blocks=100, scheduler=SyncTimed)
    shared = list(range(16 * 10))
    for number in range(3):
        core.add("offline", prompt=shared + [number] * 20, output=400)
        core.step()
    stats = core.scheduler.ballast_stats
    plenty = stats()["stats"]
    monkeypatch.setattr(core.scheduler.kv_blocks, "tables", {})

    assert (plenty.kv_used, plenty.kv_offline) == (10 + 3 * 2, 3 * 2)
    assert stats()["stats"].kv_offline == plenty.kv_offline, "it read no table"
    monkeypatch.undo()
    while core.scheduler.kv_blocks.num_free >= 24:
        core.step()
    core.step()
    tight = stats()["stats"]
    assert tight.kv_offline == tight.kv_used - 10 > 60, "the step counted them"


def test_each_step_is_reported_once(tiny_model):
    core = BareCore(tiny_model)
    core.add(prompt=40, output=4)
    core.step()
    first = core.scheduler.ballast_stats()
    core.step()
    core.step()
    second = core.scheduler.ballast_stats(first["stats"].steps)

    assert [step.num_prefill for step in steps(first)] == [40]
    assert [(step.num_prefill, step.num_decode) for step in steps(second)] == [(0, 1), (0, 1)]
    (admission,) = steps(first)[0].admissions
    assert (admission.request_class, admission.num_tokens, admission.num_cached) == (ONLINE, 40, 0)


def test_a_configuration_is_in_force_at_the_next_step(tiny_model):
    core = BareCore(tiny_model)
    for _ in range(8):
        core.add("offline", prompt=16, output=30)
    core.step()
    assert len(core.step().num_scheduled_tokens) == 8

    EngineCore.ballast_configure(core, {"slots": 3})
    after = core.step()

    assert len(after.num_scheduled_tokens) == 3
    stats = core.scheduler.ballast_stats()["stats"]
    assert stats.offline.parked == 5
    assert stats.kv_offline == stats.kv_used > 0, "parked requests keep their blocks"
    EngineCore.ballast_configure(core, {"slots": 100})
    assert len(core.step().num_scheduled_tokens) == 8, "vLLM's max_num_seqs stays the limit"


def test_an_slo_changes_for_requests_that_run_unless_they_have_their_own(tiny_model):
    core = BareCore(tiny_model, policy={"ttft": 1.0, "tpot": 0.1})
    usual, own = core.add(), core.add(tpot=0.5)
    batch = core.add("offline")

    core.scheduler.ballast_configure({"tpot": 0.2, "ttft": None})

    records = core.scheduler.driver.records
    assert [(records[r].ttft, records[r].tpot) for r in (usual, own, batch)] == [(inf, 0.2), (inf, 0.5), (inf, inf)]
    core.finish()


def test_a_request_counts_as_waiting_since_it_reached_the_api_server(tiny_model):
    core = BareCore(tiny_model)
    request_id = core.add(arrival_time=time.time() - 2)

    assert core.scheduler.driver.records[request_id].arrival <= core.scheduler.clock() - 2


def test_no_answer_is_expected_to_exceed_the_context(tiny_model):
    core = BareCore(tiny_model, max_tokens=64)

    assert core.scheduler.driver.records[core.add(prompt=60, output=100)].max_output == 4


def test_a_prefix_that_a_request_just_computed_is_known_when_its_slot_is_free(tiny_model):
    core = BareCore(tiny_model, slots=1)
    for _ in range(2):
        core.add("offline", prompt=list(range(100)), output=4)
    core.finish()

    assert core.scheduler.ballast_stats()["stats"].prefix_hit_tokens == 96
    assert core.deviations.num_inexact == 0


def test_an_item_has_the_slack_and_the_prefix_of_its_job(tiny_model):
    core = BareCore(tiny_model)
    record = core.scheduler.driver.records[core.add("offline", slack=60.0, prefix_key=7)]

    assert (record.slack, record.prefix_key) == (60.0, 7)


def test_the_highest_priority_of_a_tenant_bounds_that_of_its_requests(tiny_model):
    core = BareCore(tiny_model, policy={"tenants": {"a": {"max_priority": 1}}})
    requests = [core.add(tenant=tenant, priority=priority) for tenant, priority in [("a", 5), ("a", -5), ("b", 5)]]

    assert [core.scheduler.driver.records[request].priority for request in requests] == [1, -5, 5]


def test_a_wrong_configuration_changes_nothing(tiny_model):
    core = BareCore(tiny_model)
    before = core.scheduler.driver.host.config

    with pytest.raises(InvalidSettings, match="unknown field 'num_blocks'"):
        core.scheduler.ballast_configure({"slots": 2, "num_blocks": 3})

    assert core.scheduler.driver.host.config is before


def test_a_request_with_streamed_input_fails_alone(tiny_model):
    core = BareCore(tiny_model)
    other = core.add(output=3)
    refused = core.add(output=3, resumable=True)
    core.add(request_id=refused)  # the end of its input

    core.finish()

    assert core.ended == {other, refused}
    assert core.answers == {other: 3, refused: 0}


def test_a_request_whose_grammar_is_not_compiled_takes_no_slot(tiny_model):
    core = BareCore(tiny_model, slots=1)
    first = core.add(output=2)
    request = core.scheduler.requests[first]
    core.abort(first)
    blocked = core.add(output=2, status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    other = core.add("offline", output=2)

    output = core.step()

    assert set(output.num_scheduled_tokens) == {other}
    assert core.scheduler.ballast_stats()["stats"].online.waiting == 1
    core.scheduler.requests[blocked].status = request.status.WAITING  # the grammar is compiled
    core.finish()
    assert core.answers[blocked] == 2


def test_a_paused_engine_admits_nothing_and_finishes_what_runs(tiny_model):
    core = BareCore(tiny_model, slots=2)
    running = [core.add("offline", output=6) for _ in range(2)]
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    waiting = core.add("online", output=2)
    for _ in range(8):
        core.step()

    assert core.ended == set(running)
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.finish()
    assert core.answers[waiting] == 2


def test_a_pause_is_no_delay_by_offline_work(tiny_model):
    core = BareCore(tiny_model, slots=2)
    host = core.scheduler.driver.host
    host.fit, host.cost = None, CostModel(k0=0.001, k3=0.001, is_trusted=True)
    core.add("offline", output=20)
    gone = core.add("offline", output=20)
    core.step()
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.add("online", output=1)
    core.abort(gone)
    assert core.step().num_scheduled_tokens == {}
    time.sleep(0.3)
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.finish()

    [(_, ttft)] = host.interference.ttft
    assert 0.3 <= ttft.alone <= ttft.measured
    assert core.scheduler.driver.counters.tokens.deferred_grants == 0


@pytest.mark.parametrize("scheduler", [SyncTimed, AsyncTimed], ids=["sync", "async"])
def test_the_time_of_steps_that_overlap_counts_once_and_for_those_that_compute_then(tiny_model, scheduler):
    core = BareCore(tiny_model, scheduler=scheduler, is_async=scheduler.is_async)
    host = core.scheduler.driver.host
    host.fit, host.cost = None, CostModel(k0=0.001, k1=1e-5, k3=1e-5, is_trusted=True)
    core.add(prompt=1, output=40)
    for step in range(60):
        if step == 3:
            core.add("offline", prompt=300, output=20)
        core.step()

    records = core.scheduler.driver.counters.records
    [(_, tpot)] = host.interference.tpot
    assert core.is_idle
    assert sum(record.seconds for record in records) == pytest.approx(core.scheduler.now)
    assert tpot.alone < tpot.measured


def test_a_preemption_counts_only_the_blocks_that_no_other_request_uses(tiny_model):
    core = BareCore(tiny_model, blocks=10)
    for _ in range(2):
        core.add("offline", prompt=list(range(100)), output=8)
        core.step()
    core.step()

    records = core.scheduler.driver.records.values()
    assert [(record.num_blocks, record.num_private_blocks) for record in records] == [(7, 1)] * 2


def test_the_length_of_an_answer_is_learned_only_if_the_answer_is_whole(tiny_model):
    core = BareCore(tiny_model)
    for _ in range(REFRESH):
        core.add("offline", prompt=5, output=3)
        aborted = core.add("offline", prompt=5, output=50)
        core.step()
        core.abort(aborted)
    core.finish()

    assert core.scheduler.driver.host.expectations.expectation.outputs == {OFFLINE: (3,) * REFRESH}


def test_the_prefixes_of_a_long_backlog_are_looked_up_in_turns():
    looked_up = []
    blocks = SimpleNamespace(mixed=None, match_prefix=lambda _, request: looked_up.append(request.seq))
    kv = SnapshotKv(blocks, dict.fromkeys(range(10)), {})
    waiting = [Request(seq, OFFLINE, 0.0, num_prompt=8, max_output=1) for seq in range(10)]
    for _ in range(2 * HINT_STEPS):
        kv.step += 1
        kv.num_eager = EAGER
        for request in waiting:
            kv.hint(request)

    assert [looked_up.count(seq) for seq in range(10)] == [2 * HINT_STEPS] * EAGER + [2] * (10 - EAGER)


def test_a_reset_of_the_prefix_cache_preempts_what_runs(tiny_model):
    core = BareCore(tiny_model)
    for _ in range(4):
        core.add(output=8)
    core.step()
    core.step()

    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)

    assert len(core.scheduler.driver.host.backlog) == 4
    assert not core.scheduler.driver.kv.hinted
    core.check()
    core.finish()
    assert set(core.answers.values()) == {8}


def test_an_id_may_be_used_again_after_an_abort(tiny_model):
    core = BareCore(tiny_model)
    core.add(request_id="same", output=50)
    core.step()
    core.abort("same")
    core.add(request_id="same", output=2)
    core.finish()

    assert core.answers["same"] == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("num_computed", "prefill", "decode"), [(40, 24, 4), (66, 0, 1)])
def test_work_of_an_earlier_attempt_counts_as_wasted(tiny_model, num_computed, prefill, decode, is_async):
    core = BareCore(tiny_model, is_async=is_async)
    core.add("offline", prompt=64, output=4, num_computed=num_computed)
    core.finish()

    stats = engine_stats(core.scheduler.ballast_stats())
    found = stats.offline
    assert (found.prefill_tokens, found.decode_tokens, found.wasted_tokens) == (prefill, decode, num_computed)
    assert stats.service == {(OFFLINE, "default"): prefill + 2 * decode}
