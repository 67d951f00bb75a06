"""Replay a trace on an engine in one thread without HTTP, and record the work and the time of each step.

The engine uses one of three clocks:

- `wall` is the time of the machine.
- `cpu` is the processor time of the engine, without idle time. Other processes on the machine do not count.
- `model` is the time of a step model. Two replays then compute the same steps, and the difference of their real times
  is the noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Protocol

from ballast_engine.batch import Batch
from ballast_engine.build import warm_up
from ballast_engine.engine import BallastEngine
from ballast_engine.executor import Executor
from ballast_engine.loader import LoadedModel, load
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_engine.tokenizer import Tokenizer
from ballast_policy.learning.cost import attended
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.step_model import BatchWork, StepModel
from ballast_sim.replay.traffic import Arrival

BLOCK_TOKENS = 16
WARM_UPS = 3
"""Rounds of the engine's own warm-up. After them, the engine trusts its step times even on a busy machine."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of the engine, with planning and bookkeeping."""

    work: BatchWork
    wall: float
    cpu: float

    def seconds(self, clock: str) -> float:
        """Return the time of the step on a clock."""
        return self.cpu if clock == "cpu" else self.wall


@dataclass(frozen=True, slots=True)
class EngineReplay:
    """The steps and latencies of one replay, without the warm-up."""

    steps: list[MeasuredStep]
    waits: list[float]
    """TTFT of each online request in order of arrival, on the engine's clock."""


class ReplayClock:
    """The engine's clock."""

    def __init__(self, kind: str, model: StepModel | None = None) -> None:
        source: dict[str, Callable[[], float]] = {
            "wall": time.perf_counter,
            "cpu": time.process_time,
            "model": lambda: 0.0,
        }
        self.kind = kind
        self._source = source[kind]
        self._model = model
        self._skipped = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self._source() + self._skipped

    def computed(self, work: BatchWork) -> None:
        """Advance the clock of a step model by the time of a step."""
        if self._model is not None:
            self._skipped += self._model.predict(work)

    def wait_until(self, moment: float) -> None:
        """Wait without computing. Only the wall clock takes real time."""
        if self.kind == "wall":
            time.sleep(max(0.0, moment - self.now()))
        else:
            self._skipped += max(0.0, moment - self.now())


class _RecordingExecutor(Executor):
    """An executor that records the work of each step."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, ticks: ReplayClock) -> None:
        super().__init__(loaded, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
        self.ticks = ticks
        self.work = BatchWork()

    def run(self, batch: Batch, *rest: Any) -> Any:
        """Compute a batch, and record its work."""
        self.work = work_of(batch)
        drawn = super().run(batch, *rest)
        self.ticks.computed(self.work)
        return drawn


def work_of(batch: Batch) -> BatchWork:
    """Return the work of a batch, as the policy's cost model counts it."""
    decodes, ends = batch.num_decodes, batch.context_lens.tolist()
    new = (batch.query_start[decodes + 1 :] - batch.query_start[decodes:-1]).tolist()
    return BatchWork(
        num_prefill=sum(new),
        prefill_context=sum(attended(end - tokens, tokens) for end, tokens in zip(ends[decodes:], new, strict=True)),
        num_decode=decodes,
        decode_context=sum(ends[:decodes]),
    )


class Replays(Protocol):
    """An engine that replays traffic. Each replay starts with an idle engine that trusts its step times."""

    @property
    def config(self) -> PolicyConfig:
        """The configuration of the engine's policy."""

    def replay(self, online: Sequence[Arrival], offline: Sequence[Arrival], ticks: ReplayClock) -> EngineReplay:
        """Serve online requests at their times, and offline work with the remaining capacity."""


class EngineUnderTest:
    """Ballast's own engine with a loaded model."""

    def __init__(self, directory: Path, config: PolicyConfig, threads: int = 1) -> None:
        """Load the model. `num_blocks` of the configuration is enough for the longest context in every slot."""
        self.config, self.slots = config, config.slots
        self._options = EngineOptions(directory, prefix_cache=False)
        self._tokenizer = Tokenizer(directory)
        self._loaded = load(directory, dtype="auto", load_format="auto", attention="auto", threads=threads)

    def replay(self, online: Sequence[Arrival], offline: Sequence[Arrival], ticks: ReplayClock) -> EngineReplay:
        """See `Replays`."""
        self._executor = _RecordingExecutor(self._loaded, num_blocks=self.config.num_blocks, ticks=ticks)
        self.vocab_size = self._executor.vocab_size
        self._engine = BallastEngine(
            executor=self._executor,
            tokenizer=self._tokenizer,
            policy=replace(self.config, can_suspend=False),  # requests arrive between steps
            options=self._options,
            clock=ticks.now,
        )
        for _ in range(WARM_UPS):
            warm_up(self._engine, seconds=inf)
        return Session(self, ticks, online, offline, Random(0)).run()

    def submit(
        self, name: str, prompt: tuple[int, ...], num_output: int, request_class: RequestClass, arrival: float | None
    ) -> None:
        """Add a request."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self._engine.submit(GenerationRequest(name, prompt, sampling, request_class, arrival=arrival, stream=False))

    def step(self) -> list[tuple[str, bool]]:
        """Compute a step."""
        self._executor.work = BatchWork()
        outputs = self._engine.step()
        self.work = self._executor.work
        return [(output.request_id, output.finish_reason is not None) for output in outputs]


class SteppedEngine(Protocol):
    """An engine that a session steps."""

    slots: int
    vocab_size: int
    work: BatchWork
    """The work of the last step."""

    def submit(
        self, name: str, prompt: tuple[int, ...], num_output: int, request_class: RequestClass, arrival: float | None
    ) -> None:
        """Add a request. `arrival` is a time on the engine's clock, None for now."""

    def step(self) -> list[tuple[str, bool]]:
        """Compute a step; return the requests with a new token, and whether each is finished."""


@dataclass
class Session:
    """One replay."""

    engine: SteppedEngine
    ticks: ReplayClock
    online: Sequence[Arrival]
    offline: Sequence[Arrival]
    random: Random
    _due: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Index and arrival of each online request that waits for its first token."""
    _num_offline: int = 0
    """Offline requests that are not finished."""

    def run(self) -> EngineReplay:
        """Compute steps until every online request has arrived and has its first token."""
        steps: list[MeasuredStep] = []
        waits = [inf] * len(self.online)
        pool, names = cycle(self.offline), count()
        prefetched = 2 * self.engine.slots + 1
        begin = self.ticks.now()
        index = 0
        while index < len(self.online) or self._due:
            now = self.ticks.now() - begin
            while index < len(self.online) and self.online[index].seconds <= now:
                due = begin + self.online[index].seconds
                self._due[f"on-{index}"] = (index, due)
                self._submit(f"on-{index}", self.online[index], RequestClass.ONLINE, due)
                index += 1
            while self.offline and self._num_offline < prefetched:
                self._submit(f"off-{next(names)}", next(pool), RequestClass.OFFLINE, None)
                self._num_offline += 1
            step = self._step(waits)
            if step is not None:
                steps.append(step)
            elif index < len(self.online):
                self.ticks.wait_until(begin + self.online[index].seconds)
        return EngineReplay(steps, waits)

    def _step(self, waits: list[float]) -> MeasuredStep | None:
        """Compute one step; return None if nothing could run."""
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for name, is_finished in outputs:
            if name in self._due:
                place, due = self._due.pop(name)
                waits[place] = self.ticks.now() - due
            elif is_finished and name.startswith("off-"):
                self._num_offline -= 1
        work = self.engine.work
        return MeasuredStep(work, wall, cpu) if work.num_prefill or work.num_decode else None

    def _submit(self, name: str, lengths: Arrival, request_class: RequestClass, arrival: float | None) -> None:
        prompt = tuple(self.random.randrange(8, self.engine.vocab_size) for _ in range(lengths.num_prompt))
        self.engine.submit(name, prompt, lengths.num_output, request_class, arrival)
