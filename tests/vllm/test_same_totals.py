"""The native engine and vLLM with Ballast count the same totals for the same requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from bare_core import BLOCK, BareCore
from small_models import make_tokenizer

from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.stats import EngineStats
from ballast_engine.token_bytes import TokenBytes
from ballast_policy.request import OFFLINE, ONLINE, RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_vllm.scheduler import SyncBallastScheduler
from ballast_vllm.stats import engine_stats

SLOTS, CHUNK_TOKENS, STEP_SECONDS = 4, 64, 0.01


@dataclass(frozen=True)
class Arrival:
    """One request of the trace. It arrives before the step with its number."""

    step: int
    request_class: RequestClass
    tenant: str
    prompt: tuple[int, ...]
    num_output: int

    @property
    def name(self) -> str:
        return f"{self.request_class}-{self.step}"


def make_trace(number: int = 40) -> list[Arrival]:
    rng = Random(4)
    return [
        Arrival(
            3 * i,
            rng.choice([ONLINE, OFFLINE]),
            rng.choice(["a", "b"]),
            tuple(rng.randrange(256) for _ in range(rng.randint(1, 150))),
            rng.randint(1, 40),
        )
        for i in range(number)
    ]


def with_shared_openings(trace: list[Arrival]) -> list[Arrival]:
    """Return the trace with one of three openings of three blocks before each prompt."""
    rng = Random(5)
    openings = [tuple(rng.randrange(256) for _ in range(3 * BLOCK)) for _ in range(3)]
    return [replace(each, prompt=openings[i % 3] + each.prompt[:60]) for i, each in enumerate(trace)]


class SteppedClock:
    """A clock that moves between steps only, so that both engines plan by the same times."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SteppedScheduler(SyncBallastScheduler):
    """Ballast's scheduler with such a clock, and with steps of any size, as the native engine has them."""

    multiple = 1
    clock = SteppedClock()


class MadeUpTokens:
    """An executor of the native engine without a model."""

    vocab_size, max_model_len = 258, 2048

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, BLOCK

    def run(self, batch, _):
        return np.full(len(batch.samples), 7)


class Letters:
    """A tokenizer of the native engine."""

    eos_ids = frozenset({257})

    def __init__(self) -> None:
        self.token_bytes = TokenBytes(make_tokenizer().backend_tokenizer)


def run_natively(trace: list[Arrival], num_blocks: int) -> tuple[EngineStats, Counter[str]]:
    """Return the figures of the native engine, and the finished requests by class."""
    clock = SteppedClock()
    engine = BallastEngine(
        executor=MadeUpTokens(num_blocks),
        tokenizer=Letters(),
        policy=PolicyConfig(slots=SLOTS, chunk_tokens=CHUNK_TOKENS, num_blocks=num_blocks, block_tokens=BLOCK),
        options=EngineOptions(directory=Path()),
        clock=clock,
    )
    arrivals, ended, step = list(trace), Counter(), 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.pop(0)
            sampling = SamplingParams(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True)
            engine.submit(
                GenerationRequest(
                    request_id=arrival.name,
                    prompt=arrival.prompt,
                    sampling=sampling,
                    request_class=arrival.request_class,
                    tenant=arrival.tenant,
                )
            )
        clock.now += STEP_SECONDS
        ended.update(o.request_id.split("-")[0] for o in engine.step() if o.finish_reason is not None)
        step += 1
        assert step < 20_000
    return engine.stats(), ended


def run_in_vllm(core: BareCore, trace: list[Arrival]) -> tuple[EngineStats, Counter[str]]:
    """Return the same of vLLM."""
    arrivals, step = list(trace), 0
    while arrivals or not core.is_idle:
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.pop(0)
            core.add(
                str(arrival.request_class),
                request_id=arrival.name,
                prompt=list(arrival.prompt),
                output=arrival.num_output,
                tenant=arrival.tenant,
            )
        SteppedScheduler.clock.now += STEP_SECONDS
        core.step()
        step += 1
        assert step < 20_000
    core.check_idle()
    return engine_stats(core.scheduler.ballast_stats()), Counter(name.split("-")[0] for name in core.ended)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [400, 16], ids=["plenty of KV", "tight KV"])
def test_both_engines_count_the_same_totals_for_the_same_requests(tiny_model, blocks, is_async):
    trace = make_trace()
    policy = {"chunk_tokens": CHUNK_TOKENS}
    core = BareCore(tiny_model, slots=SLOTS, blocks=blocks, is_async=is_async, policy=policy)
    native, ended_natively = run_natively(trace, blocks - 1)  # vLLM keeps one block for itself

    inside, ended_inside = run_in_vllm(core, trace)

    service: Counter[tuple[RequestClass, str]] = Counter()
    for arrival in trace:
        service[arrival.request_class, arrival.tenant] += len(arrival.prompt) + 2 * arrival.num_output
    assert inside.service == native.service == service
    for request_class in RequestClass:
        of = [arrival for arrival in trace if arrival.request_class is request_class]
        expected = (sum(len(arrival.prompt) for arrival in of), sum(arrival.num_output for arrival in of), len(of))
        for stats, ended in ((native, ended_natively), (inside, ended_inside)):
            found = stats.of(request_class)
            assert (found.prefill_tokens, found.decode_tokens, ended[request_class]) == expected
    preempted = [any(stats.of(c).preemptions for c in RequestClass) for stats in (native, inside)]
    assert preempted == [blocks == 16] * 2


CASES = {
    "plenty of KV": (400, False),
    "preemptions of online": (24, False),
    "preemptions of both classes": (16, False),
    "prefix hits": (400, True),
}
"""The blocks of KV, and whether prompts have shared openings. With few blocks and shared openings, the counts differ,
because the prefix caches of the engines evict different blocks."""


@pytest.mark.parametrize("case", CASES)
def test_by_one_clock_both_engines_count_the_same_waste_parking_preemptions_and_prefix_hits(tiny_model, case):
    blocks, is_shared = CASES[case]
    trace = with_shared_openings(make_trace()) if is_shared else make_trace()
    core = BareCore(
        tiny_model, slots=SLOTS, blocks=blocks, scheduler=SteppedScheduler, policy={"chunk_tokens": CHUNK_TOKENS}
    )

    native, _ = run_natively(trace, blocks - 1)
    inside, _ = run_in_vllm(core, trace)

    for request_class in RequestClass:
        assert inside.of(request_class) == native.of(request_class)
    assert inside.prefix_query_tokens == native.prefix_query_tokens > 0
    assert inside.prefix_hit_tokens == native.prefix_hit_tokens
    assert (native.prefix_hit_tokens > 0) == is_shared
    preempting = [c for c in RequestClass if native.of(c).preemptions]
    assert [c for c in RequestClass if native.of(c).wasted_tokens] == preempting
    assert len(preempting) == {400: 0, 24: 1, 16: 2}[blocks]
    assert native.offline.parked_steps > 0 or blocks == 16
