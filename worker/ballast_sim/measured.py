"""The real engine on recorded traffic, one thread, no HTTP: what its steps compute and how long they take.

The engine goes by one of three clocks. `wall` is the machine's. `cpu` is the engine's own processor time, idle time
skipped: other processes on the machine take the core away without being counted. By `model` time passes as a step
model says, so that two replays compute the very same steps, and how far their real times differ is the noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from math import inf
from pathlib import Path
from random import Random
from typing import Any

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
from ballast_sim.step_model import BatchWork, StepModel
from ballast_sim.traffic import Arrival

BLOCK_TOKENS = 16
WARM_UPS = 3
"""Rounds of the engine's own warm-up: by then it trusts its step times, whatever the machine is doing."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of the engine, planning and bookkeeping included."""

    work: BatchWork
    wall: float
    cpu: float

    def seconds(self, clock: str) -> float:
        """Its time on a clock."""
        return self.cpu if clock == "cpu" else self.wall


@dataclass(frozen=True, slots=True)
class Replay:
    """What one slice of traffic came to. Steps that the warm-up took are left out."""

    steps: list[Timed]
    waits: list[float]
    """TTFT of each online request, in order of arrival, on the engine's clock."""


class Ticks:
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
        """Seconds."""
        return self._source() + self._skipped

    def computed(self, work: BatchWork) -> None:
        """A step was computed; by the step model's clock that is what takes time."""
        if self._model is not None:
            self._skipped += self._model.seconds(work)

    def wait_until(self, moment: float) -> None:
        """Let time pass in which nothing is computed."""
        if self.kind == "wall":
            time.sleep(max(0.0, moment - self.now()))
        else:
            self._skipped += max(0.0, moment - self.now())


class _Watched(Executor):
    """An executor that says what it computed."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, ticks: Ticks) -> None:
        super().__init__(loaded, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
        self.ticks = ticks
        self.work = BatchWork()

    def run(self, batch: Batch, *rest: Any) -> Any:
        """Compute a batch, as the executor does it."""
        self.work = work_of(batch)
        drawn = super().run(batch, *rest)
        self.ticks.computed(self.work)
        return drawn


def work_of(batch: Batch) -> BatchWork:
    """Sum up a batch as the step models see it."""
    decodes = batch.num_decodes
    after = batch.context_lens[decodes:].tolist()
    new = (batch.query_start[decodes + 1 :] - batch.query_start[decodes:-1]).tolist()
    before = [end - tokens for end, tokens in zip(after, new, strict=True)]
    return BatchWork(
        num_prefill=sum(new),
        prefill_context=sum(attended(start, tokens) for start, tokens in zip(before, new, strict=True)),
        prefill_before=sum(before),
        num_decode=decodes,
        decode_context=int(batch.context_lens[:decodes].sum()),
        num_chunks=len(new),
    )


@dataclass
class Bed:
    """A model under test. Each replay starts from an idle engine that knows its step times."""

    directory: Path
    config: PolicyConfig
    """`num_blocks` is what there is: enough for every slot's longest context."""
    threads: int = 1
    _loaded: LoadedModel = field(init=False)
    _tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer(self.directory)
        self._loaded = load(
            self.directory, device="cpu", dtype="auto", load_format="auto", attention="auto", threads=self.threads
        )

    def replay(self, online: Sequence[Arrival], offline: Sequence[Arrival], ticks: Ticks, *, seed: int = 0) -> Replay:
        """Serve the online requests as they are due, offline work in all that is left."""
        executor = _Watched(self._loaded, num_blocks=self.config.num_blocks, ticks=ticks)
        engine = BallastEngine(
            executor=executor,
            tokenizer=self._tokenizer,
            policy=self.config,
            options=EngineOptions(self.directory, prefix_cache=False),
            clock=ticks.now,
        )
        for _ in range(WARM_UPS):
            warm_up(engine, seconds=inf)
        return _Session(engine, executor, ticks, online, offline, Random(seed)).run()


@dataclass
class _Session:
    engine: BallastEngine
    executor: _Watched
    ticks: Ticks
    online: Sequence[Arrival]
    offline: Sequence[Arrival]
    random: Random
    _due: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Online requests that wait for their first token: which, and since when."""
    _num_offline: int = 0
    """Offline requests that are not done."""

    def run(self) -> Replay:
        """Go on until every online request has its first token and the last one came."""
        steps: list[Timed] = []
        waits = [inf] * len(self.online)
        pool, names = cycle(self.offline), count()
        at_hand = 2 * self.engine.policy.slots + 1
        begin = self.ticks.now()
        index = 0
        while index < len(self.online) or self._due:
            now = self.ticks.now() - begin
            while index < len(self.online) and self.online[index].seconds <= now:
                due = begin + self.online[index].seconds
                self._due[f"on-{index}"] = (index, due)
                self._submit(f"on-{index}", self.online[index], RequestClass.ONLINE, due)
                index += 1
            while self.offline and self._num_offline < at_hand:
                self._submit(f"off-{next(names)}", next(pool), RequestClass.OFFLINE, None)
                self._num_offline += 1
            step = self._step(waits)
            if step is not None:
                steps.append(step)
            elif index < len(self.online):
                self.ticks.wait_until(begin + self.online[index].seconds)
        return Replay(steps, waits)

    def _step(self, waits: list[float]) -> Timed | None:
        """Do one step; None where nothing could run."""
        self.executor.work = BatchWork()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for output in outputs:
            if output.request_id in self._due:
                place, due = self._due.pop(output.request_id)
                waits[place] = self.ticks.now() - due
            elif output.finish_reason is not None and output.request_id.startswith("off-"):
                self._num_offline -= 1
        work = self.executor.work
        return Timed(work, wall, cpu) if work.num_prefill or work.num_decode else None

    def _submit(self, name: str, lengths: Arrival, request_class: RequestClass, arrival: float | None) -> None:
        vocabulary = self.executor.vocab_size
        prompt = tuple(self.random.randrange(8, vocabulary) for _ in range(lengths.num_prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=lengths.num_output, ignore_eos=True)
        self.engine.submit(GenerationRequest(name, prompt, sampling, request_class, arrival=arrival, stream=False))
