"""A step stands still between two layers, newcomers get their first token, and it goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import Part, make_batch
from engine_bench import make_bench

from ballast_engine.executor import Executor
from ballast_engine.loader import load
from ballast_engine.request import FinishReason, SamplingParams
from ballast_engine.suspension import Interrupt, Suspended
from ballast_policy.learning.cost import Fit, StepWork
from ballast_policy.request import Phase, Request
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.planner import plan

LONG = [1 + i % 20 for i in range(20)]
GREEDY = SamplingParams(temperature=0.0)
SIZE = 8


@pytest.fixture
def bench() -> Any:
    """An engine whose every step may stand still for a second."""
    made = make_bench(chunk_tokens=64, offline_share=0.0)
    let_stand(made, 1.0)
    return made


def let_stand(bench: Any, seconds: float) -> None:
    bench.planner = lambda snapshot: replace(plan(snapshot), suspendable_seconds=seconds)


# The executor


@pytest.fixture(scope="module", params=["cpu", "sdpa"])
def executor(request: pytest.FixtureRequest, model_dir: Path) -> Executor:
    loaded = load(model_dir, dtype="float32", attention=request.param, threads=1)
    return Executor(loaded, num_blocks=64, block_tokens=SIZE)


def test_a_batch_draws_the_same_tokens_whatever_layer_it_stood_still_before(executor: Executor) -> None:
    first = make_batch([Part(range(5, 45), 0, range(5), GREEDY), Part(range(100, 130), 0, range(5, 9), GREEDY)], SIZE)
    # Longer than anything before it: scratch is laid out anew while the first one stands.
    nested = make_batch([Part(range(7, 247), 0, range(20, 50), GREEDY)], SIZE)
    expected = [executor.run(batch).tolist() for batch in (first, nested)]
    for layer in range(4):
        interrupt = Interrupt()
        interrupt.raise_at(layer)
        suspended = executor.run(first, interrupt)
        assert isinstance(suspended, Suspended)
        found = executor.run(nested)
        interrupt.clear()
        resumed = executor.resume(suspended, interrupt)

        assert [np.asarray(resumed).tolist(), np.asarray(found).tolist()] == expected


def test_a_batch_stands_still_as_often_as_it_is_asked(executor: Executor) -> None:
    batch = make_batch([Part(range(5, 45), 0, range(5), GREEDY)], SIZE)
    interrupt = Interrupt()
    interrupt.raise_at(1)
    tokens = executor.run(batch, interrupt)
    for layer in (1, 2, 2, 3):
        interrupt.raise_at(layer)
        assert isinstance(tokens, Suspended)
        tokens = executor.resume(tokens, interrupt)
    assert isinstance(tokens, Suspended)
    tokens = executor.resume(tokens, None)

    assert np.array_equal(tokens, executor.run(batch))


# The engine


def test_a_newcomer_has_its_first_token_before_the_step_goes_on(bench: Any) -> None:
    engine, executor = bench.engine, bench.executor
    bench.submit("job", LONG, online=False, max_tokens=5)
    executor.meanwhile = [lambda: None, lambda: bench.submit("person", [4, 5, 6])]
    bench.step()

    assert engine.is_suspended
    assert len(bench.tokens("person")) == 1
    assert not bench.tokens("job")
    assert [len(batch.token_ids) for batch in executor.batches] == [20, 3]
    bench.step()
    assert not engine.is_suspended
    assert len(bench.tokens("job")) == 1
    bench.run()
    for name, prompt, most in (("job", LONG, 5), ("person", [4, 5, 6], 8)):
        expected = bench.alone(prompt, max_tokens=most)
        assert bench.tokens(name) == expected.tokens


@pytest.mark.parametrize(
    ("seconds", "is_online", "is_early"),
    [
        pytest.param(0.0, True, False, id="the plan does not allow it"),
        pytest.param(1.0, False, False, id="an offline newcomer"),
        pytest.param(1.0, True, True, id="a request that came before the plan"),
    ],
)
def test_only_online_newcomers_suspend_a_step_and_only_if_its_plan_allows_it(
    bench: Any, seconds: float, is_online: bool, is_early: bool
) -> None:
    let_stand(bench, seconds)
    bench.submit("job", LONG, online=False)
    if is_early:
        bench.submit("other")
    else:
        bench.executor.meanwhile = [lambda: bench.submit("other", online=is_online)]
    bench.step()

    assert bench.executor.num_suspended == 0
    assert (len(bench.tokens("job")), len(bench.tokens("other"))) == (1, is_early)


def test_a_step_stands_still_again_while_there_is_time_left(bench: Any) -> None:
    engine = bench.engine
    bench.submit("job", LONG, online=False)
    bench.executor.meanwhile = [
        lambda: bench.submit("first"),
        lambda: bench.submit("second"),  # while the first one prefills
        lambda: None,
        lambda: None,
    ]
    bench.step(2)

    assert engine.is_suspended
    assert (len(bench.tokens("first")), len(bench.tokens("second"))) == (1, 1)
    bench.run()
    assert engine.stats().suspended_steps == 1


def test_time_that_is_used_up_is_not_given_again(bench: Any) -> None:
    engine = bench.engine
    let_stand(bench, 0.001)  # one look at the clock
    bench.submit("job", LONG, online=False)
    bench.executor.meanwhile = [lambda: bench.submit("first"), lambda: bench.submit("second")]
    bench.step(2)

    assert not engine.is_suspended
    assert (len(bench.tokens("first")), len(bench.tokens("job")), len(bench.tokens("second"))) == (1, 1, 0)


def test_newcomers_without_a_slot_wait_for_the_end_of_the_step() -> None:
    bench = make_bench(slots=2)
    let_stand(bench, 1.0)
    engine = bench.engine
    for name in ("a", "b"):
        bench.submit(name, [1, 2, 3], max_tokens=12, ignore_eos=True)
    bench.executor.meanwhile = [lambda: bench.submit("person")]
    bench.step()
    assert engine.is_suspended
    bench.step()

    assert (len(bench.tokens("a")), len(bench.tokens("person"))) == (1, 0)
    bench.run()
    assert bench.last("person").finish_reason in {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("how", ["abort", "give_back"])
def test_who_is_in_flight_ends_when_the_step_has_ended(bench: Any, how: str) -> None:
    """The suspended step still writes its KV: a newcomer must not get those blocks."""
    engine = bench.engine
    bench.submit("job", LONG, online=False, max_tokens=20, ignore_eos=True)
    bench.executor.meanwhile = [
        lambda: engine.abort("job") if how == "abort" else engine.give_back(["job"]),
        lambda: bench.submit("person", LONG),
    ]
    bench.step()
    assert "job" not in bench.outputs
    assert len(bench.tokens("person")) == 1
    bench.step(2)

    assert bench.last("job").finish_reason == {"abort": "aborted", "give_back": "given_back"}[how]
    assert bench.last("job").num_output == 1
    bench.run()


def test_a_newcomer_that_leaves_at_once_leaves_nothing(bench: Any) -> None:
    engine = bench.engine
    bench.submit("job", LONG, online=False, max_tokens=2)

    def come_and_go() -> None:
        bench.submit("person")
        engine.abort("person")

    bench.executor.meanwhile = [come_and_go]
    bench.run()

    assert bench.last("person").finish_reason is FinishReason.ABORTED
    assert engine.stats().kv_used == 0


def test_a_newcomer_takes_nothing_from_the_cache_that_is_not_written_yet(bench: Any) -> None:
    bench.submit("job", LONG, online=False)
    bench.executor.meanwhile = [lambda: bench.submit("twin", LONG)]
    bench.step()
    assert bench.outputs["twin"][0].num_cached == 0
    bench.executor.meanwhile = [lambda: None, lambda: bench.submit("third", LONG)]
    bench.run()

    assert bench.outputs["third"][0].num_cached == 16
    assert bench.tokens("job") == bench.tokens("twin") == bench.tokens("third")


@pytest.mark.parametrize(("fails", "failed"), [(1, {"person"}), (2, {"person", "job"})])
def test_a_failure_ends_those_who_took_part_and_nobody_else(bench: Any, fails: int, failed: set[str]) -> None:
    engine = bench.engine
    bench.submit("job", LONG, online=False)

    def come() -> None:
        bench.executor.fails = fails
        bench.submit("person")

    bench.executor.meanwhile = [come]
    bench.run()

    assert {name for name in ("job", "person") if bench.last(name).finish_reason is FinishReason.FAILED} == failed
    assert not engine.is_suspended
    assert engine.stats().failed_steps == fails
    assert engine.stats().kv_used == 0


def test_a_configuration_comes_into_force_behind_the_step(bench: Any) -> None:
    engine = bench.engine
    bench.submit("job", LONG, online=False)
    bench.executor.meanwhile = [
        lambda: engine.configure(replace(engine.policy, slots=1)),
        lambda: bench.submit("person"),
    ]
    bench.step()
    assert engine.policy.slots == 8
    bench.step(2)

    assert engine.policy.slots == 1


def park_everybody(snapshot: EngineSnapshot, in_flight: Sequence[Request], seconds: float) -> Any:
    from ballast_policy.plan import StepPlan

    assert seconds > 0
    (newcomer,) = snapshot.waiting
    return StepPlan(((newcomer, newcomer.num_tokens),), (newcomer,), park=tuple(in_flight))


def test_who_is_parked_in_flight_still_gets_the_token_of_the_step() -> None:
    bench = make_bench(slots=1, chunk_tokens=64, offline_share=0.0)
    let_stand(bench, 1.0)
    engine = bench.engine
    bench.nested_planner = park_everybody
    bench.submit("job", LONG, online=False, max_tokens=4, ignore_eos=True)
    bench.executor.meanwhile = [lambda: bench.submit("person", max_tokens=3, ignore_eos=True)]
    bench.step(2)

    assert len(bench.tokens("job")) == 1
    assert engine.requests["job"].phase is Phase.PARKED
    assert engine.stats().offline.parked_steps == 0, "it took part in the only step so far"
    bench.run()
    assert len(bench.tokens("job")) == 4


class Times(Fit):
    """A fit that keeps the times of the steps that the host learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def add(self, work: StepWork, seconds: float) -> None:
        self.seconds.append(seconds)
        super().add(work, seconds)


def test_the_time_that_a_step_stood_is_not_its_own(bench: Any) -> None:
    engine, clock = bench.engine, bench.clock
    records = []
    engine.host.fit = Times()

    def come() -> None:
        bench.submit("person", [4, 5, 6])
        clock.now += 5.0

    def prefill() -> None:
        clock.now += 0.5

    bench.submit("job", LONG, online=False)
    bench.executor.meanwhile = [come, prefill]
    for _ in range(2):
        bench.step()
        records.append(engine.last_step)
    nested, step = records

    assert (nested.num_prefill, nested.num_decode) == (3, 0)
    assert [admission.request_id for admission in nested.admissions] == ["person"]
    assert nested.admissions[0].steps_waited == 0
    assert nested.seconds == pytest.approx(0.5, abs=0.1)
    assert step.num_prefill == 20
    assert step.seconds == pytest.approx(5.0, abs=0.1)
    assert engine.stats().suspended_steps == 1
    assert engine.host.fit.seconds == pytest.approx([0.5, 5.0], abs=0.1)


def test_the_first_token_is_noted_when_it_is_there(bench: Any) -> None:
    engine = bench.engine
    bench.submit("person", max_tokens=3, ignore_eos=True)
    before = bench.clock.now
    bench.step()
    request = engine.requests["person"]
    first = request.first_token
    bench.step()

    assert before < first < bench.clock.now
    assert request.first_token == first
