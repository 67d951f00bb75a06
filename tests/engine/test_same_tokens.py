"""The promise of equal answers, with the real model: greedy and seeded, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from batches import Part, logits_of, make_batch
from engine_integrity import check_integrity

from ballast_engine.batch import Batch
from ballast_engine.engine import BallastEngine
from ballast_engine.executor import Executor
from ballast_engine.loader import load
from ballast_engine.options import EngineOptions
from ballast_engine.request import FinishReason, GenerationRequest, SamplingParams
from ballast_engine.suspension import Interrupt, Suspended
from ballast_engine.tokenizer import Tokenizer
from ballast_policy.host import Planner
from ballast_policy.plan import StepPlan
from ballast_policy.request import Phase, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan

MARGIN = 1e-4
"""Two best logits closer than this (of values around 10) may change places; such positions are excused and counted."""
OUTPUT = 24
SIZE = 8


@dataclass
class Model:
    """The shipped model on one backend, and what it answers to each request alone."""

    directory: Path
    backend: str
    alone: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loaded = load(self.directory, dtype="float32", attention=self.backend, threads=1)
        self.tokenizer = Tokenizer(self.directory)

    def executor(self, num_blocks: int = 512) -> Executor:
        return Executor(self.loaded, num_blocks=num_blocks, block_tokens=SIZE)

    def engine(self, *, executor: Any = None, planner: Planner = plan, **policy: Any) -> BallastEngine:
        executor = executor or self.executor()
        told = {"slots": 16, "num_blocks": executor.num_blocks, "block_tokens": SIZE, "chunk_tokens": 512}
        return BallastEngine(
            executor=executor,
            tokenizer=self.tokenizer,
            policy=PolicyConfig(**{**told, **policy}),
            options=EngineOptions(directory=self.directory),
            planner=planner,
        )

    def best_two(self, tokens: list[int]) -> float:
        """How far apart the two best logits behind these tokens are."""
        executor = self.executor(num_blocks=64)
        blocks = range(-(-len(tokens) // SIZE))
        batch = make_batch([Part(tokens, 0, blocks, sampling=greedy_of("x", tokens).sampling)], SIZE)
        best = logits_of(executor, batch)[0].topk(2).values
        return float(best[0] - best[1])


def greedy_of(name: str, prompt: list[int], **changes: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    online = changes.pop("online", True)
    return GenerationRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=replace(sampling, **changes),
        request_class=RequestClass.ONLINE if online else RequestClass.OFFLINE,
    )


@pytest.fixture(scope="module", params=["cpu", "sdpa"])
def model(request: pytest.FixtureRequest, model_dir: Path) -> Model:
    return Model(model_dir, request.param)


@pytest.fixture
def requests(model: Model) -> list[GenerationRequest]:
    """Ten prompts, some of them with a beginning in common; half of them sampled with a seed."""
    text = "The old house stood at the end of the lane, and nobody had lived in it for years. "
    made = []
    for i in range(10):
        prompt = model.tokenizer.encode(text * (1 + i % 3) + f"On day {i * i} the")
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + i} if i % 2 else {}
        made.append(greedy_of(f"r{i}", prompt, online=i % 3 != 0, **sampled))
    if not model.alone:
        for request in made:
            model.alone |= answers(model.engine(), [request])
    return made


def answers(engine: BallastEngine, requests: list[GenerationRequest], most: int = 3000) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for _ in range(most):
        for output in engine.step():
            found[output.request_id] += output.token_ids
            assert output.finish_reason in {None, FinishReason.LENGTH, FinishReason.STOP}, output.error
        check_integrity(engine)
        if not engine.has_work:
            assert engine.stats().kv_used == 0
            return found
    raise AssertionError(f"not done after {most} steps: {engine.stats()}")


def assert_same(model: Model, requests: list[GenerationRequest], found: dict[str, list[int]]) -> None:
    """Equal but for near ties of greedy requests, of which there is at most one."""
    num_excused = 0
    for request in requests:
        expected, got = model.alone[request.request_id], found[request.request_id]
        assert len(expected) == OUTPUT
        if expected == got:
            continue
        at = next(i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
        apart = model.best_two([*request.prompt, *expected[:at]])
        assert request.sampling.temperature == 0, f"{request.request_id} drew another token at {at}"
        assert apart < MARGIN, f"{request.request_id} differs at {at}, where the best two are {apart} apart"
        num_excused += 1
    assert num_excused <= 1


def test_alone_and_in_a_crowd(model: Model, requests: list[GenerationRequest]) -> None:
    assert_same(model, requests, answers(model.engine(), requests))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(model: Model, requests: list[GenerationRequest], chunk: int) -> None:
    assert_same(model, requests, answers(model.engine(chunk_tokens=chunk), requests))


def test_with_a_prefix_from_the_cache(model: Model, requests: list[GenerationRequest]) -> None:
    engine = model.engine()
    answers(engine, requests)
    found = answers(engine, [replace(request, request_id=request.request_id) for request in requests])

    assert engine.stats().prefix_hit_tokens > 100
    assert_same(model, requests, found)


def test_preempted_for_want_of_kv(model: Model, requests: list[GenerationRequest]) -> None:
    engine = model.engine(executor=model.executor(num_blocks=24), offline_share=0.2)
    found = answers(engine, requests)
    stats = engine.stats()

    assert sum(stats.offline.preemptions.values()) + sum(stats.online.preemptions.values()) > 0
    assert_same(model, requests, found)


def juggle(random: Random) -> Callable[[EngineSnapshot], StepPlan]:
    """The policy's plan, with some of the decodes parked instead, and the parked resumed where slots are free."""

    def planner(snapshot: EngineSnapshot) -> StepPlan:
        parked = [request for request in snapshot.residents if request.phase is Phase.PARKED]
        back = [request for request in parked if random.random() < 0.5]
        free = snapshot.free_blocks - len(parked)
        if back and free > 0:
            going = [r for r in snapshot.residents if r.phase is Phase.RUNNING]
            grants = [(request, 1) for request in [*back, *going]][:free]
            granted = {request for request, _ in grants}
            return StepPlan(tuple(grants), resume=tuple(request for request in back if request in granted))
        decided = plan(snapshot)
        park = [
            request
            for request, _ in decided.grants
            if request.phase is Phase.RUNNING and request not in decided.preempt and random.random() < 0.3
        ]
        grants = [grant for grant in decided.grants if grant[0] not in park]
        return replace(decided, grants=tuple(grants), park=(*decided.park, *park))

    return planner


@pytest.mark.parametrize("seed", range(3))
def test_parked_and_resumed(model: Model, requests: list[GenerationRequest], seed: int) -> None:
    engine = model.engine(planner=juggle(Random(seed)))
    found = answers(engine, requests)

    assert engine.stats().online.parked_steps + engine.stats().offline.parked_steps > 20
    assert_same(model, requests, found)


class Interrupting:
    """The executor, with requests that come in the middle of a step: before a layer drawn at random."""

    engine: BallastEngine

    def __init__(self, inner: Executor, late: list[GenerationRequest], random: Random) -> None:
        self.inner, self.late, self.random = inner, late, random
        self.num_suspended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, batch: Batch, interrupt: Interrupt | None) -> Any:
        return self.note(self.inner.run(batch, self.disturbed(interrupt)))

    def resume(self, suspended: Suspended, interrupt: Interrupt | None) -> Any:
        return self.note(self.inner.resume(suspended, self.disturbed(interrupt)))

    def disturbed(self, interrupt: Interrupt | None) -> Interrupt | None:
        if interrupt is not None and self.late and self.random.random() < 0.7:
            self.engine.submit(self.late.pop())
            interrupt.raise_at(self.random.randrange(4))
        return interrupt

    def note(self, result: Any) -> Any:
        self.num_suspended += isinstance(result, Suspended)
        return result


@pytest.mark.parametrize("seed", range(3))
def test_suspended_and_beside_newcomers(model: Model, requests: list[GenerationRequest], seed: int) -> None:
    random = Random(seed)
    late = [request for request in requests if request.request_class is RequestClass.ONLINE]
    executor = Interrupting(model.executor(), random.sample(late, len(late)), random)
    engine = executor.engine = model.engine(
        executor=executor,
        planner=lambda snapshot: replace(plan(snapshot), suspendable_seconds=10.0),
        chunk_tokens=48,
    )
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        if request not in late:
            engine.submit(request)
    while executor.late or engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        check_integrity(engine)

    assert executor.num_suspended >= 3
    assert engine.stats().suspended_steps >= 1
    assert engine.stats().kv_used == 0
    assert_same(model, requests, found)


def test_given_back_and_continued_by_another_engine(model: Model, requests: list[GenerationRequest]) -> None:
    first, second = model.engine(), model.engine(chunk_tokens=16)
    for request in requests:
        first.submit(request)
    for _ in range(8):
        first.step()
    first.give_back([request.request_id for request in requests])
    given = {output.request_id: output.generated for output in first.step()}
    assert not first.has_work
    rest = answers(second, [replace(request, generated=given[request.request_id]) for request in requests])

    assert all(0 < len(tokens) < OUTPUT for tokens in given.values())
    assert_same(model, requests, {name: [*given[name], *tokens] for name, tokens in rest.items()})


def test_beside_requests_that_are_aborted(model: Model, requests: list[GenerationRequest]) -> None:
    engine, random = model.engine(num_blocks=60), Random(1)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    late = list(requests)
    for i, request in enumerate(requests):
        engine.submit(replace(request, request_id=f"other{i}"))
    while late or engine.has_work:
        if late:
            engine.submit(late.pop())
            engine.abort(f"other{random.randrange(10)}")
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        check_integrity(engine)

    assert any(len(found[f"other{i}"]) < OUTPUT for i in range(10))
    assert_same(model, requests, found)
