"""Run the demo: warm-up, an SLO from the warm-up, online alone and mixed in turn, and a flood of online requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ballast_cli.demo.figures import percentiles
from ballast_cli.demo.load import Client, HttpCall, Sample, call
from ballast_cli.demo.polling import Block, WorkerPoller, status
from ballast_cli.demo.stack import TENANT, DemoStack
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE, Words, completion, cut, scale
from ballast_cli.errors import CliError
from ballast_cli.worker_file import DEMO_MODEL_NAME
from ballast_sim.replay.traffic import Arrival, read, read_lengths

SLO_FACTOR = 1.25
_SETTLE_SECONDS = 15.0
_MOST_RATE = 60.0
"""Most online requests per second of the client, because it shares the cores with the worker."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The lengths of the demo's parts, and the size of its load."""

    seed: int = 0
    pairs: int = 4
    block_seconds: float = 18.0
    warmup_seconds: float = 20.0
    calibration_seconds: float = 8.0
    flood_seconds: float = 15.0
    min_requests: int = 300
    """Least number of online requests on each side. On a slow machine, blocks are longer."""
    online_load: float = 0.45
    """Share of the measured capacity that the online traffic takes."""
    length_factor: float = 1 / 16
    """Factor of the lengths in both traces, so that they fit the small model."""
    slots: int = 16
    threads: int = 1

    @property
    def total_seconds(self) -> float:
        """Expected length of the demo, with starts and pauses."""
        blocks = 2 * self.pairs * (self.block_seconds + 2.5)
        return 20 + 2 * self.calibration_seconds + self.warmup_seconds + blocks + self.flood_seconds


@dataclass(slots=True)
class DemoRecord:
    """All measurements of the demo."""

    plan: DemoPlan
    capacity: float = 0.0
    """Online requests per second of this traffic that the worker can serve."""
    maximum: float = 0.0
    """Offline output tokens per second of the same engine without online requests."""
    speed: float = 1.0
    """Divisor of the times in the online trace."""
    trace_start: float = 0.0
    """Start of the slice in the trace, in seconds."""
    block_seconds: float = 0.0
    slo: dict[str, float] = field(default_factory=dict)
    warmup: Block | None = None
    blocks: list[Block] = field(default_factory=list)
    flood: Block | None = None
    reserved: int = 0
    """Reserved slots of offline, as the worker reports them."""
    polls: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, online slots and offline slots of each poll of the demo."""
    client_cpu: float = 0.0
    """Share of a core that the load generator used while blocks ran."""

    def of(self, side: str) -> list[Block]:
        """Return the blocks of a side in order."""
        return [block for block in self.blocks if block.side == side]


class Demo:
    """Runs the demo on a running stack."""

    def __init__(self, stack: DemoStack, plan: DemoPlan, words: Words, tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._plan = plan
        self._words = words
        self._tell = tell
        self._random = Random(plan.seed)
        self._online = scale(read(ONLINE_TRACE), length=plan.length_factor)
        self._client: Client = stack.client()
        self._poller = WorkerPoller(stack.client(), time.perf_counter())
        self._record = DemoRecord(plan)
        self._job = ""
        self._items_per_second = 0.0

    async def run(self) -> DemoRecord:
        """Run all parts of the demo."""
        poller = self._poller
        poller.start()
        try:
            await self._measure_maximum()
            await self._measure_capacity()
            await self._submit_job()
            await self._warm_up()
            await self._alternate()
            await self._flood()
        finally:
            await poller.stop()
            self._client.close()
        self._record.polls = [(poll.at, poll.online, poll.offline) for poll in poller.all_polls]
        return self._record

    # The steps, in order.

    async def _measure_maximum(self) -> None:
        plan, queue = self._plan, self._stack.queue
        self._tell("Offline alone: measuring the highest offline rate")
        self._job = self._submit(int(_FIRST_ITEMS_PER_SECOND * plan.calibration_seconds), "warm-up")
        await self._resume()
        await asyncio.sleep(1.5)
        before = self._stack.counts(self._job).counts.succeeded
        block = await self._poller.open("offline_only")
        await asyncio.sleep(plan.calibration_seconds - 2)
        await self._poller.close(block)
        self._record.maximum = block.gained("offline_tokens") / block.seconds
        self._items_per_second = (self._stack.counts(self._job).counts.succeeded - before) / block.seconds
        await self._pause()
        queue.jobs.cancel(self._job)

    async def _measure_capacity(self) -> None:
        self._tell("Online alone: measuring the capacity")
        plan = self._plan
        samples = await self._client.saturate(self._endless(), width=2 * plan.slots, seconds=plan.calibration_seconds)
        good = [s for s in samples if not s.failure and s.last is not None]
        if len(good) < len(samples):
            raise CliError(f"{len(samples) - len(good)} calibration requests failed: {_first_failure(samples)}")
        half = plan.calibration_seconds / 2
        ended = [s for s in good if s.last is not None and half <= s.at + s.last < plan.calibration_seconds]
        self._record.capacity = len(ended) / half
        trace_seconds = self._online[-1].seconds
        rate = min(plan.online_load * self._record.capacity, _MOST_RATE)
        self._record.speed = rate / (len(self._online) / trace_seconds)
        self._record.block_seconds = max(plan.block_seconds, math.ceil(1.1 * plan.min_requests / plan.pairs / rate))
        wanted = self._record.speed * plan.pairs * self._record.block_seconds
        if wanted > trace_seconds:
            self._record.speed *= trace_seconds / wanted * 0.999
            wanted = trace_seconds * 0.999
        self._record.trace_start = self._random.uniform(0, trace_seconds - wanted)

    async def _submit_job(self) -> None:
        """Submit the offline job of the demo. The blocks, which the capacity can lengthen, have their length by now."""
        plan = replace(self._plan, block_seconds=self._record.block_seconds)
        # Twice the items that the engine can compute without online requests: the job never runs out.
        count = int(2 * self._items_per_second * (plan.total_seconds / 2 + plan.flood_seconds)) + 500
        self._tell(f"Submitting the offline job of {count:,} items")
        self._job = self._submit(count, "item")
        await self._settle()  # the worker claims items before the job is paused

    async def _warm_up(self) -> None:
        plan, record = self._plan, self._record
        self._tell(f"Online alone: warm-up with parts of all blocks; the SLO is {SLO_FACTOR} times its p99")
        # An SLO from quiet minutes could not be kept in busy ones, so the warm-up has parts of all blocks.
        part = min(plan.warmup_seconds / plan.pairs, record.block_seconds)
        slices = [(pair * record.block_seconds, part) for pair in range(plan.pairs)]
        block = await self._online_block("warm_up", 0, slices)
        record.warmup = block
        ttft = percentiles([s.ttft * 1000 for s in block.samples if s.ttft is not None])["p99"]
        tpot = percentiles([s.tpot * 1000 for s in block.samples if s.tpot is not None])["p99"]
        if ttft is None or tpot is None:
            raise CliError(f"No warm-up request succeeded: {_first_failure(block.samples)}")
        record.slo = {"ttft_ms": round(SLO_FACTOR * ttft, 3), "tpot_ms": round(SLO_FACTOR * tpot, 3)}
        wanted = self._stack.set_slo(**record.slo)
        began = time.monotonic()
        while (await status(self._client)).config_hash != wanted:
            if time.monotonic() - began > _SETTLE_SECONDS:
                raise CliError(f"The worker did not apply the SLO in time. {self._stack.worker.last_lines()}")
            await asyncio.sleep(0.2)

    async def _alternate(self) -> None:
        record, plan = self._record, self._plan
        for pair in range(plan.pairs):
            slice_ = (pair * record.block_seconds, record.block_seconds)
            for side in ("online_only", "mixed"):
                self._stack.require_alive()
                self._tell(f"Pair {pair + 1} of {plan.pairs}: {_SIDES[side]}")
                if side == "mixed":
                    await self._resume()
                before = self._stack.counts(self._job).counts.succeeded
                cpu = time.process_time()
                block = await self._online_block(side, pair, [slice_])
                record.client_cpu += (time.process_time() - cpu) / block.seconds / (2 * plan.pairs)
                block.items_completed = self._stack.counts(self._job).counts.succeeded - before
                record.blocks.append(block)
                if side == "mixed":
                    await self._pause()

    async def _flood(self) -> None:
        plan = self._plan
        self._tell("Flood of online requests: offline keeps its reservation")
        await self._resume()
        flood = asyncio.ensure_future(
            self._client.saturate(self._endless(), width=3 * plan.slots, seconds=plan.flood_seconds + 1)
        )
        await asyncio.sleep(1)
        before = self._stack.counts(self._job).counts.succeeded
        self._record.reserved = (await status(self._client)).offline.reserved
        block = await self._poller.open("flood")
        await asyncio.sleep(plan.flood_seconds)
        await self._poller.close(block)
        block.items_completed = self._stack.counts(self._job).counts.succeeded - before
        block.samples = await flood
        self._record.flood = block

    # Parts of the steps.

    async def _online_block(self, side: str, pair: int, slices: Sequence[tuple[float, float]]) -> Block:
        """Replay slices of the traffic one after the other. Each is a start and a length, in seconds of the demo."""
        speed, begin = self._record.speed, self._record.trace_start
        arrivals = cut(self._online, [(begin + start * speed, seconds * speed) for start, seconds in slices])
        calls = [self._call(arrival) for arrival in scale(arrivals, length=1, speed=speed)]
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            block = await self._poller.open(side, pair)
            block.samples = await self._client.replay(calls)
            await self._poller.close(block)
        finally:
            gc.enable()
            gc.unfreeze()
        return block

    def _call(self, arrival: Arrival) -> HttpCall:
        return call(arrival, completion(arrival, self._words, self._random, model=DEMO_MODEL_NAME, stream=True))

    def _endless(self) -> Iterator[HttpCall]:
        start = self._random.randrange(len(self._online))
        for arrival in itertools.cycle(self._online[start:] + self._online[:start]):
            yield self._call(arrival)

    def _submit(self, count: int, name: str) -> str:
        """Submit an offline job with a number of items, and pause it."""
        plan = self._plan
        lengths = scale(read_lengths(OFFLINE_TRACE), length=plan.length_factor)
        first = self._random.randrange(len(lengths))

        def lines() -> Iterator[str]:
            for index in range(count):
                arrival = lengths[(first + index) % len(lengths)]
                body = completion(arrival, self._words, self._random, model=DEMO_MODEL_NAME, stream=False)
                yield json.dumps(
                    {"custom_id": f"{name}-{index}", "method": "POST", "url": "/v1/completions", "body": body}
                )

        job_id = self._stack.queue.submissions.submit(lines(), tenant=TENANT).job_id
        self._stack.queue.jobs.pause(job_id)
        return job_id

    async def _pause(self) -> None:
        """Pause the offline job, and wait until no request holds a slot."""
        self._stack.pause(self._job)
        await self._settle()

    async def _settle(self) -> None:
        began = time.monotonic()
        while (poll := await self._poller.poll()).offline or poll.parked or poll.online:
            if time.monotonic() - began > _SETTLE_SECONDS:
                raise CliError(
                    f"{poll.offline} offline items (and {poll.parked} parked, {poll.online} online requests) still run "
                    f"{_SETTLE_SECONDS:.0f} s after the job was paused. {self._stack.worker.last_lines()}"
                )
            await asyncio.sleep(0.1)

    async def _resume(self) -> None:
        """Resume the offline job, and wait until it holds slots."""
        self._stack.queue.jobs.resume(self._job)
        began = time.monotonic()
        while not (await self._poller.poll()).offline:
            if time.monotonic() - began > _SETTLE_SECONDS:
                raise CliError(f"The worker claimed no offline item in time. {self._stack.worker.last_lines()}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)


_FIRST_ITEMS_PER_SECOND = 400
"""Offline items per second that measure the maximum offline rate. A few cores cannot compute as many."""
_SIDES = {"online_only": "online alone", "mixed": "online with the offline job"}


def _first_failure(samples: Sequence[Sample]) -> str:
    return next((sample.failure for sample in samples if sample.failure), "without a reason")
