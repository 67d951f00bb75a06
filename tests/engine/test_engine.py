from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from engine_bench import make_bench, make_generation
from engine_integrity import IntegrityError, check_integrity

from ballast_engine.counters import MOST_PAYERS, EngineCounters
from ballast_engine.errors import InvalidRequest
from ballast_engine.request import FinishReason
from ballast_engine.stats import StepKind
from ballast_log.log import KeyValueFormatter
from ballast_policy.host import MOST_KEPT
from ballast_policy.plan import StepPlan
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import TenantShare

LONG = list(range(1, 21))
OFFLINE = RequestClass.OFFLINE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": [1] * 64}, "64 tokens, but this model serves 64 .* shorten the prompt to 63"),
        ({"prompt": [1, 25]}, "Token id 25 is outside this model's vocabulary of 25"),
        ({"prompt": [-1]}, "Token id -1 is outside"),
        ({"generated": (3, 99)}, "Token id 99 is outside"),
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; expected above 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**63}, "top_k is 9223372036854775808; expected"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"stop": ("",)}, "stop is .* at least one character"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(changes: dict[str, Any], sentence: str) -> None:
    bench = make_bench()
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        bench.submit("a", **changes)

    assert str(refused.value).endswith(".")
    assert not bench.engine.has_work
    bench.submit("a")


def test_an_id_in_use_is_refused_and_free_again_after_the_last_output() -> None:
    bench = make_bench()
    bench.submit("a", LONG)
    with pytest.raises(InvalidRequest, match="in use"):
        bench.submit("a")
    bench.run()
    first = bench.outputs.pop("a")
    bench.submit("a", LONG)
    bench.run()

    assert [output.token_ids for output in first] == [output.token_ids for output in bench.outputs["a"]]


def test_a_stream_has_an_output_for_each_token_and_another_request_its_text_at_the_end() -> None:
    bench = make_bench()
    bench.submit("streamed", LONG, ignore_eos=True)
    bench.submit("whole", LONG, ignore_eos=True, stream=False)
    bench.run()
    streamed = bench.outputs["streamed"]
    first, last = bench.outputs["whole"]
    expected = bench.alone(LONG, ignore_eos=True)

    assert [output.token_ids for output in streamed] == [[token] for token in expected.tokens]
    assert [output.num_output for output in streamed] == list(range(1, 9))
    assert {output.num_prompt for output in streamed} == {len(LONG)}
    assert (first.num_output, first.text) == (1, "")
    assert (last.num_output, last.text, bench.tokens("whole")) == (8, expected.text, expected.tokens)


def test_an_answer_ends_at_the_context_whatever_was_asked() -> None:
    bench = make_bench(max_model_len=20)
    bench.submit("a", [1] * 15, max_tokens=100, ignore_eos=True)
    bench.run()

    assert len(bench.tokens("a")) == 5
    assert bench.last("a").finish_reason is FinishReason.LENGTH


def test_kv_smaller_than_the_context_limits_prompts() -> None:
    bench = make_bench(num_blocks=4, max_model_len=64)
    with pytest.raises(InvalidRequest, match="serves 16 tokens"):
        bench.submit("a", [1] * 16)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_frees_everything_before_the_next_plan(steps: int) -> None:
    bench = make_bench(chunk_tokens=8)
    bench.submit("a", LONG, max_tokens=30, ignore_eos=True)
    bench.step(steps)
    bench.engine.abort("a")
    bench.step()

    assert bench.last("a").finish_reason is FinishReason.ABORTED
    assert not bench.engine.has_work
    assert bench.engine.stats().kv_used == 0


def test_a_given_back_answer_goes_on_elsewhere_where_it_stopped() -> None:
    first, second = make_bench(), make_bench()
    request = make_generation("a", LONG, False, max_tokens=12, ignore_eos=True, temperature=1.0, seed=7)
    first.engine.submit(request)
    first.step(6)
    first.engine.give_back(["a"])
    first.step()
    last = first.last("a")

    assert last.finish_reason is FinishReason.GIVEN_BACK
    assert 0 < len(last.generated) < 12
    assert list(last.generated) == first.tokens("a")

    second.engine.submit(replace(request, generated=last.generated))
    second.run()
    expected = second.executor.answer(request.prompt, request.sampling, 64)

    assert [*last.generated, *second.tokens("a")] == expected.tokens
    assert second.text("a") == expected.text
    assert second.last("a").num_output == 12
    assert second.engine.stats().service == {(RequestClass.OFFLINE, "default"): 2.0 * (12 - len(last.generated))}


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({"generated": (1, 2, 0)}, "ab", FinishReason.STOP),
        ({"generated": (1, 2, 3), "stop": ("c",)}, "ab", FinishReason.STOP),
        ({"generated": (1, 2, 3), "stop_token_ids": (3,)}, "ab", FinishReason.STOP),
        ({"generated": (1, 2, 3), "max_tokens": 3}, "abc", FinishReason.LENGTH),
        ({"generated": (1, 2, 3), "max_tokens": 2}, "ab", FinishReason.LENGTH),
    ],
)
def test_a_continuation_that_is_complete_already_computes_nothing(
    changes: dict[str, Any], text: str, reason: FinishReason
) -> None:
    bench = make_bench()
    bench.submit("a", **changes)
    bench.step()

    assert (bench.text("a"), bench.last("a").finish_reason) == (text, reason)
    assert bench.executor.batches == []


def test_a_failed_step_ends_who_took_part_and_nobody_else(caplog: Any) -> None:
    bench = make_bench(slots=1)
    bench.submit("in the step", max_tokens=20, ignore_eos=True)
    bench.submit("waiting")
    bench.step(2)
    record = bench.engine.last_step
    bench.executor.fails = 1
    bench.step()

    assert bench.engine.last_step is record
    assert bench.last("in the step").finish_reason is FinishReason.FAILED
    assert "RuntimeError: the device is gone" in bench.last("in the step").error
    assert "step failed requests=1" in KeyValueFormatter().format(caplog.records[-1])

    bench.run()

    assert bench.last("waiting").finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
    assert bench.engine.stats().failed_steps == 1


def test_a_spoilt_block_is_never_found_by_a_later_prompt() -> None:
    bench = make_bench(chunk_tokens=8)
    bench.submit("first", LONG)
    bench.step()
    bench.executor.fails = 1
    bench.step()
    bench.submit("second", LONG)
    bench.run()

    assert bench.outputs["second"][0].num_cached == 8
    assert bench.tokens("second") == bench.alone(LONG).tokens


def test_a_token_outside_the_vocabulary_fails_the_step() -> None:
    bench = make_bench()
    bench.executor.draw = lambda tokens, sampling: 25
    bench.submit("a")
    bench.step()

    assert "outside the vocabulary of 25" in bench.last("a").error


def test_a_shared_prompt_is_computed_once() -> None:
    bench = make_bench(num_blocks=64)
    for i in range(3):
        bench.submit(f"r{i}", [*LONG, 21, i + 1])
        bench.run()
    stats = bench.engine.stats()

    assert [bench.outputs[f"r{i}"][0].num_cached for i in range(3)] == [0, 20, 20]
    assert stats.online.prefill_tokens == 22 + 2 + 2
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (66, 40)


@pytest.mark.parametrize(
    ("options", "changes", "cached"),
    [
        ({}, {}, 20),
        ({"prefix_cache": False}, {}, 0),
        ({}, {"cache_salt": "other"}, 0),
        ({"isolate_tenants": True}, {"tenant": "other"}, 0),
        ({"isolate_tenants": True}, {}, 20),
    ],
)
def test_who_may_use_a_cached_prefix(options: dict[str, Any], changes: dict[str, Any], cached: int) -> None:
    bench = make_bench(options=options)
    bench.submit("a", [*LONG, 21])
    bench.run()
    bench.submit("b", [*LONG, 21], **changes)
    bench.run()

    assert bench.outputs["b"][0].num_cached == cached
    assert bench.tokens("a") == bench.tokens("b")


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    bench = make_bench()
    for name in "ab":
        bench.submit(name, LONG)
        bench.run()

    assert bench.outputs["b"][0].num_cached == 16
    assert bench.tokens("a") == bench.tokens("b")


def test_an_online_burst_preempts_offline_which_then_goes_on_without_computing_all_again() -> None:
    bench = make_bench(num_blocks=16, slots=4, offline_share=0.0, chunk_tokens=64)
    bench.submit("job", LONG, False, max_tokens=20, ignore_eos=True)
    bench.step(4)
    for i in range(3):
        bench.submit(f"r{i}", [i + 1] * 14, max_tokens=6, ignore_eos=True)
    bench.run()
    stats = bench.engine.stats()
    expected = bench.alone(LONG, max_tokens=20, ignore_eos=True)

    assert sum(stats.offline.preemptions.values()) >= 1
    assert bench.tokens("job") == expected.tokens
    assert stats.offline.prefill_tokens == 20
    assert stats.offline.decode_tokens == 20
    assert stats.offline.wasted_tokens > 0
    assert [(each.request_id, each.request_class) for each in bench.admissions] == [
        ("job", OFFLINE), *((f"r{i}", RequestClass.ONLINE) for i in range(3))
    ]  # fmt: skip
    assert bench.engine.stats().service[RequestClass.OFFLINE, "default"] == 20 + 2 * 20


def test_the_step_record_says_what_was_computed() -> None:
    bench = make_bench(chunk_tokens=8)
    bench.submit("a", LONG, max_tokens=9, ignore_eos=True)
    kinds = []
    for _ in range(3):
        bench.step()
        kinds.append((bench.engine.last_step.kind, bench.engine.last_step.num_prefill))
    bench.submit("b", LONG[:3])
    bench.step()
    record = bench.engine.last_step

    assert kinds == [(StepKind.PREFILL, 8), (StepKind.PREFILL, 8), (StepKind.PREFILL, 4)]
    assert (record.kind, record.num_prefill, record.num_decode) == (StepKind.MIXED, 3, 1)
    assert [admission.request_id for admission in record.admissions] == ["b"]
    assert record.seconds > 0


def test_counts_by_class_follow_requests() -> None:
    bench = make_bench(slots=4, offline_share=0.25)
    for i in range(6):
        bench.submit(f"on{i}", max_tokens=30, ignore_eos=True)
        bench.submit(f"off{i}", [4, 5], False, max_tokens=30, ignore_eos=True)
    bench.step(3)
    stats = bench.engine.stats()

    assert (stats.online.running, stats.offline.running) == (3, 1)
    assert (stats.online.waiting, stats.offline.waiting) == (3, 5)
    assert (stats.online.reserved, stats.offline.reserved, stats.offline.borrowed) == (3, 1, 0)
    assert stats.reservation.is_met
    assert stats.kv_used + stats.kv_cached + stats.kv_free == 64
    assert (stats.kv_used, stats.kv_offline) == (7, 1)


def test_a_new_configuration_holds_from_the_next_step_on() -> None:
    bench = make_bench(ttft=5.0)
    engine, before = bench.engine, bench.engine.policy
    bench.submit("configured", max_tokens=30, ignore_eos=True)
    bench.submit("own", max_tokens=30, ignore_eos=True, ttft_seconds=2.0)
    bench.step()
    engine.configure(replace(engine.policy, ttft=1.0, num_blocks=1, block_tokens=3, chunk_tokens=3))
    bench.step()
    ttft = {name: request.ttft for name, request in engine.requests.items()}

    assert ttft == {"configured": 1.0, "own": 2.0}
    assert engine.policy == replace(before, ttft=1.0, chunk_tokens=3)


def test_a_tenants_band_is_capped() -> None:
    bench = make_bench(tenants={"small": TenantShare(max_priority=1)})
    bench.submit("a", tenant="small", priority=9)
    bench.submit("b", tenant="other", priority=9)
    bench.step()

    assert [request.priority for request in bench.engine.requests.values()] == [1, 9]


def test_names_of_tenants_do_not_pile_up() -> None:
    bench = make_bench()
    for i in range(1500):
        bench.submit(f"r{i}", (1,), i < 1480, tenant=f"user-{i}", max_tokens=1)
        while bench.engine.has_work and i % 8 == 7:
            bench.engine.step()
    bench.run()
    service = bench.engine.stats().service

    assert len(service) == MOST_PAYERS + 1 + 20
    assert sum(service.values()) == 1500 * 3
    assert len(bench.engine.host.ledgers[RequestClass.ONLINE].services) <= MOST_KEPT


def test_names_of_offline_tenants_do_not_pile_up_and_the_last_ones_are_kept() -> None:
    counters = EngineCounters()
    for i in range(5 * MOST_PAYERS):
        counters.note_charges([(OFFLINE, {f"user-{i}": 1.0, "regular": 1.0})])
        if i == 2 * MOST_PAYERS:
            counters.note_charges([(OFFLINE, {"late": 5.0})])
        if i > 2 * MOST_PAYERS:
            counters.note_charges([(OFFLINE, {"late": 1.0})])

    service = counters.service
    names = [name for _, name in service]
    assert len(service) <= 3 * MOST_PAYERS + 1
    assert set(names[:2]) == {"user-0", "regular"}, "the first names stay the first, in this order"
    assert {f"user-{i}" for i in range(4 * MOST_PAYERS + 1, 5 * MOST_PAYERS)} <= set(names)
    assert service[OFFLINE, "regular"] == 5 * MOST_PAYERS
    assert service[OFFLINE, "late"] == 5 + 3 * MOST_PAYERS - 1, "a tenant that is charged keeps its count"
    assert sum(service.values()) == 10 * MOST_PAYERS + 5 + 3 * MOST_PAYERS - 1


def test_most_of_what_is_reserved_of_kv_is_used() -> None:
    bench = make_bench(num_blocks=4096, block_tokens=16, max_model_len=2048, slots=16, chunk_tokens=512)
    for i in range(16):
        bench.submit(f"r{i}", [1 + i % 24] * (300 + 37 * i), max_tokens=60, ignore_eos=True)
    wasted = used = 0.0
    while bench.engine.has_work:
        bench.step()
        stats = bench.engine.stats()
        wasted += stats.kv_waste_ratio * stats.kv_used
        used += stats.kv_used

    assert 0 < wasted / used < 0.04


def test_requests_from_many_threads_all_end() -> None:
    bench = make_bench(num_blocks=32)

    def send(name: str) -> None:
        for i in range(20):
            bench.submit(f"{name}{i}", [1 + i % 5] * 9, max_tokens=4)
            if i % 3 == 0:
                bench.engine.abort(f"{name}{i}")

    threads = [threading.Thread(target=send, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        bench.step()
        bench.engine.stats()
    bench.run()

    assert len(bench.outputs) == 80
    assert all(outputs[-1].finish_reason is not None for outputs in bench.outputs.values())


def test_an_idle_engine_may_forget_what_it_saw() -> None:
    bench = make_bench()
    before = bench.engine.host.expectations.expectation
    for i in range(40):
        bench.submit(str(i), LONG, online=False, max_tokens=2)
    bench.run()
    assert bench.engine.host.expectations.expectation != before
    bench.engine.reset()
    stats = bench.engine.stats()

    assert (stats.kv_cached, stats.steps, stats.service) == (0, 0, {})
    assert bench.engine.host.expectations.expectation == before
    check_integrity(bench.engine)


def test_a_broken_book_is_reported() -> None:
    bench = make_bench()
    bench.submit("a", LONG, max_tokens=30, ignore_eos=True)
    bench.step(3)
    bench.engine.requests["a"].num_blocks -= 1

    with pytest.raises(IntegrityError, match="computed 21 of 20 positions"):
        check_integrity(bench.engine)


@pytest.mark.parametrize(
    ("is_aborted", "num_cached"),
    [pytest.param(True, 4, id="of an aborted request"), pytest.param(False, 16, id="of one that computes the rest")],
)
def test_a_half_computed_block_is_nobodys_prefix(is_aborted: bool, num_cached: int) -> None:
    bench = make_bench(chunk_tokens=6)
    bench.submit("a", LONG)
    bench.step()
    if is_aborted:
        bench.engine.abort("a")
    bench.submit("b", LONG)
    bench.run()
    expected = bench.alone(LONG).tokens

    assert bench.outputs["b"][0].num_cached == num_cached
    assert bench.tokens("b") == expected
    assert is_aborted or bench.tokens("a") == expected


def test_an_admission_that_turns_out_not_to_fit_waits_on() -> None:
    bench = make_bench(num_blocks=8)
    sane = bench.planner
    bench.submit("holds two blocks", [21] * 5, False, max_tokens=6, ignore_eos=True)
    bench.submit("victim", LONG, False, max_tokens=12, ignore_eos=True)
    bench.planner = lambda seen: StepPlan(
        tuple((request, request.num_tokens) for request in seen.waiting), seen.waiting
    )
    bench.step()
    bench.submit("admitted", [*LONG, *range(1, 11)], max_tokens=2, ignore_eos=True)

    def overcommitted(snapshot: Any) -> StepPlan:
        """Count the victim's blocks as free although the admitted prompt begins with them."""
        victims = tuple(request for request in snapshot.residents if request.num_prompt == len(LONG))
        (request,) = snapshot.waiting
        return StepPlan(((request, 30 - request.num_cached),), (request,), preempt=victims)

    bench.planner = overcommitted
    bench.step()
    stats = bench.engine.stats()

    assert stats.deferred_grants == 1
    assert (stats.online.waiting, stats.online.running, stats.offline.waiting) == (1, 0, 1)

    bench.planner = sane
    bench.run()

    assert len(bench.tokens("admitted")) == 2
    assert len(bench.tokens("victim")) == 12


def test_more_cached_than_the_plan_knew_of_shortens_the_grant() -> None:
    bench = make_bench()
    bench.submit("a", LONG)
    bench.run()
    bench.submit("b", LONG)
    sane = bench.planner
    bench.planner = lambda snapshot: StepPlan(((snapshot.waiting[0], 20),), tuple(snapshot.waiting))
    bench.step()
    bench.planner = sane
    bench.run()

    assert bench.executor.batches[-8].query_start.tolist() == [0, 4]
    assert bench.tokens("a") == bench.tokens("b")


def test_an_idle_engine_wakes_when_a_request_comes() -> None:
    bench = make_bench()
    sleeper = threading.Thread(target=bench.engine.wait, args=(60.0,))
    sleeper.start()
    bench.submit("a")
    sleeper.join(30)

    assert not sleeper.is_alive()
    bench.run()


def test_an_idle_engine_waits_a_moment_for_what_comes_together() -> None:
    bench = make_bench(batch_window=0.05, offline_share=0.0)
    engine = bench.engine
    bench.submit("first", online=False)
    assert not engine.step()
    assert bench.executor.batches == []
    assert engine.stats().reservation.is_met
    bench.submit("second")
    assert not engine.step()
    assert bench.executor.batches == []
    engine.wait(60.0)  # until the window has passed, and not for a minute
    bench.clock.now += 0.05
    bench.step()

    assert bench.executor.batches[0].num_requests == 2
    assert [admission.steps_waited for admission in engine.last_step.admissions] == [0, 0]
    bench.run()


def test_prefix_keys_stand_together_where_the_first_of_them_came() -> None:
    bench = make_bench(slots=1, offline_share=0.0)
    for name, group in (("a", 7), ("b", None), ("c", 3), ("d", 7), ("e", None), ("f", 3)):
        bench.submit(name, online=False, max_tokens=1, prefix_key=group)
    bench.run()

    assert list(bench.outputs) == ["a", "d", "b", "c", "f", "e"]
