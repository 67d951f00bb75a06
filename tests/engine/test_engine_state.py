"""Whatever happens around a request, its answer is the one it would have got alone, and all books balance."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from engine_bench import make_bench, make_generation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from ballast_policy.plan import StepPlan
from ballast_policy.request import Phase, Request
from ballast_policy.snapshot import EngineSnapshot

EXAMPLES = int(os.environ.get("BALLAST_ENGINE_EXAMPLES", "150"))
PREFIXES = [[], [3] * 9, [3] * 9 + [5, 6, 7], [8, 8, 8, 8]]


@dataclass
class Chaos:
    """A planner that is sound and senseless: it parks, preempts, resumes and cuts chunks as it pleases."""

    random: Random

    def __call__(self, snapshot: EngineSnapshot) -> StepPlan:
        config, chance = snapshot.config, self.random.random
        free, slots = snapshot.free_blocks, config.slots
        preempt, park, resume, admit, grants = [], [], [], [], []
        for request in snapshot.residents:
            if chance() < 0.1:
                preempt.append(request)
                free += request.num_private_blocks
        stay = [request for request in snapshot.residents if request not in preempt]
        for request in stay:
            if request.phase is Phase.RUNNING:
                if chance() < 0.15:
                    park.append(request)
                else:
                    slots -= 1
        running = [request for request in stay if request.phase is Phase.RUNNING and request not in park]
        parked = [request for request in stay if request.phase is Phase.PARKED]
        waiting = self.random.sample(list(snapshot.waiting), len(snapshot.waiting))
        for source, target in ((running, None), (parked, resume), (waiting, admit)):
            for request in source:
                computed = request.num_cached if target is admit else request.num_computed
                tokens = self.random.randint(1, request.num_tokens - computed)
                need = blocks_for(request, computed, tokens, config.block_tokens)
                need += request.num_cached_idle if target is admit else 0
                if chance() < 0.2 or need > free or (target is not None and slots <= 0):
                    continue
                free -= need
                grants.append((request, tokens))
                if target is not None:
                    target.append(request)
                    slots -= 1
        seconds = self.random.choice([0.0, 0.05, 10.0])
        return StepPlan(
            tuple(grants), tuple(admit), tuple(park), tuple(resume), tuple(preempt), suspendable_seconds=seconds
        )

    def nested(self, snapshot: EngineSnapshot, in_flight: Collection[Request], seconds: float) -> StepPlan:
        """Whoever is in flight is parked at most; newcomers get slots, and all or some of their prefill."""
        config, chance = snapshot.config, self.random.random
        free = snapshot.free_blocks
        preempt = [r for r in snapshot.residents if r.phase is Phase.PARKED and r not in in_flight and chance() < 0.3]
        free += sum(request.num_private_blocks for request in preempt)
        running = [request for request in snapshot.residents if request.phase is Phase.RUNNING]
        park = [request for request in running if chance() < 0.3]
        slots = config.slots - len(running) + len(park)
        grants = []
        for request in snapshot.waiting[:slots]:
            tokens = request.num_tokens - request.num_cached
            tokens = tokens if chance() < 0.7 else self.random.randint(1, tokens)
            need = blocks_for(request, request.num_cached, tokens, config.block_tokens) + request.num_cached_idle
            if need <= free and chance() < 0.8:
                free -= need
                grants.append((request, tokens))
        assert seconds > 0
        return StepPlan(tuple(grants), tuple(r for r, _ in grants), tuple(park), preempt=tuple(preempt))


def suspendable(planner: Callable[[EngineSnapshot], StepPlan]) -> Callable[[EngineSnapshot], StepPlan]:
    """The same plan, but every step may stand still for long."""
    return lambda snapshot: replace(planner(snapshot), suspendable_seconds=10.0)


def blocks_for(request: Request, computed: int, tokens: int, size: int) -> int:
    held = request.num_blocks if request.phase is not Phase.WAITING else computed // size
    return max(0, -(-(computed + tokens) // size) - held)


def machine(*, is_chaotic: bool) -> type:
    class Requests(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.bench = make_bench(num_blocks=14, slots=4, chunk_tokens=12, offline_share=0.25, max_model_len=40)
            self.sane = self.bench.planner, self.bench.nested_planner
            self.bench.planner = suspendable(self.bench.planner)
            self.sent: dict[str, Any] = {}

        @rule(seed=st.integers(0, 2**32))
        def shuffle(self, seed: int) -> None:
            if is_chaotic:
                chaos = Chaos(Random(seed))
                self.bench.planner, self.bench.nested_planner = chaos, chaos.nested

        @rule(
            prefix=st.sampled_from(PREFIXES),
            rest=st.lists(st.integers(1, 24), min_size=1, max_size=16),
            max_tokens=st.integers(1, 20),
            online=st.booleans(),
            is_meanwhile=st.booleans(),
            details=st.fixed_dictionaries(
                {},
                optional={
                    "stop": st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=2).map(tuple),
                    "stop_token_ids": st.lists(st.integers(0, 24), max_size=2).map(tuple),
                    "include_stop": st.booleans(),
                    "ignore_eos": st.booleans(),
                    "temperature": st.sampled_from([0.0, 1.0]),
                    "seed": st.integers(0, 5),
                    "stream": st.booleans(),
                    "tenant": st.sampled_from(["default", "a"]),
                    "priority": st.integers(-1, 1),
                    "cache_salt": st.sampled_from(["", "x"]),
                    "ttft_seconds": st.sampled_from([0.001, 0.5]),
                    "tpot_seconds": st.sampled_from([0.001, 0.1]),
                    "slack": st.floats(0, 10),
                    "prefix_key": st.integers(0, 2),
                },
            ),
        )
        def submit(
            self,
            *,
            prefix: list[int],
            rest: list[int],
            max_tokens: int,
            online: bool,
            is_meanwhile: bool,
            details: dict[str, Any],
        ) -> None:
            request = make_generation(f"r{len(self.sent)}", [*prefix, *rest], online, max_tokens=max_tokens, **details)
            if is_meanwhile:  # in the middle of the next step
                self.bench.executor.meanwhile.append(lambda: self.send(request))
                self.bench.step()
            else:
                self.send(request)

        def send(self, request: Any) -> None:
            name = f"r{len(self.sent)}"
            self.sent[name] = request = replace(request, request_id=name)
            self.bench.engine.submit(request)

        @rule(times=st.integers(1, 6))
        def step(self, times: int) -> None:
            self.bench.step(times)

        @precondition(lambda self: self.sent)
        @rule(data=st.data(), is_meanwhile=st.booleans(), how=st.sampled_from(["abort", "give_back", "both"]))
        def end_early(self, data: st.DataObject, is_meanwhile: bool, how: str) -> None:
            live = [name for name in self.sent if name in self.bench.engine.requests]
            name = data.draw(st.sampled_from(sorted(live or self.sent)))

            def end() -> None:
                if how != "abort":
                    self.bench.engine.give_back([name])
                if how != "give_back":
                    self.bench.engine.abort(name)

            if is_meanwhile:
                self.bench.executor.meanwhile.append(end)
            else:
                end()

        @precondition(lambda self: self.sent)
        @rule(data=st.data())
        def give_back_and_go_on(self, data: st.DataObject) -> None:
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.sent)), min_size=1, max_size=3))
            while self.bench.engine.is_suspended:
                self.bench.step()
            self.bench.engine.give_back(chosen)
            self.bench.step()
            for request_id in set(chosen):
                last = self.bench.last(request_id)
                if last.finish_reason == "given_back":
                    name = f"r{len(self.sent)}"
                    self.send(replace(self.sent[request_id], request_id=name, generated=last.generated))

        @rule(share=st.sampled_from([0.0, 0.25, 0.9]), slots=st.integers(1, 5), chunk=st.integers(1, 30))
        def configure(self, share: float, slots: int, chunk: int) -> None:
            engine = self.bench.engine
            engine.configure(replace(engine.policy, offline_share=share, slots=slots, chunk_tokens=chunk))

        @rule()
        def fail(self) -> None:
            self.bench.executor.fails = 1
            self.bench.step()
            self.bench.executor.fails = 0

        def teardown(self) -> None:
            self.bench.planner, self.bench.nested_planner = self.sane
            self.bench.run()
            for do in self.bench.executor.meanwhile:
                do()
            self.bench.executor.meanwhile = []
            self.bench.run()
            for request_id, request in self.sent.items():
                self.check(request_id, request)
            stats = self.bench.engine.stats()
            assert stats.kv_used == 0
            assert (stats.online.waiting, stats.offline.waiting) == (0, 0)
            assert stats.online.running + stats.offline.running + stats.online.parked + stats.offline.parked == 0

        def check(self, request_id: str, request: Any) -> None:
            bench = self.bench
            expected = bench.executor.answer(request.prompt, request.sampling, bench.engine.max_tokens)
            tokens = [*request.generated, *bench.tokens(request_id)]
            last = bench.last(request_id)
            admissions = sum(each.request_id == request_id for each in bench.admissions)
            assert last.num_output == len(tokens)
            assert admissions == 1 if bench.tokens(request_id) else admissions <= 1
            if last.finish_reason in {"stop", "length"}:
                assert (tokens, bench.text(request_id)) == (expected.tokens, expected.text)
                assert last.finish_reason == expected.reason
            else:
                assert last.finish_reason in {"aborted", "given_back", "failed"}
                assert tokens == expected.tokens[: len(tokens)]
                assert expected.text.startswith(bench.text(request_id))

    return Requests


@pytest.mark.hypothesis
@pytest.mark.parametrize("is_chaotic", [False, True], ids=["the policy", "chaos"])
def test_an_answer_does_not_depend_on_what_happens_around_it(is_chaotic: bool) -> None:
    run_state_machine_as_test(
        machine(is_chaotic=is_chaotic),
        settings=settings(max_examples=EXAMPLES, stateful_step_count=30),
    )
