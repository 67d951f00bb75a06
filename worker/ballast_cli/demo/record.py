"""What is seen while a block runs: slots ten times a second, tokens by the worker's own counters once a second."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from ballast_cli.demo.load import Client, Sample
from ballast_queue.status import WorkerStatus

LOOK_SECONDS = 0.1
COUNT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """The slots at one moment."""

    at: float
    """Seconds since the demo began."""
    slots: int
    online: int
    offline: int
    parked: int
    """Offline requests that hold KV and no slot."""
    waiting: int
    """Online requests without a slot."""

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return max(0, self.slots - self.online - self.offline)


@dataclass(frozen=True, slots=True)
class Count:
    """The worker's counters at one moment, since it started."""

    at: float
    offline_tokens: float
    """Output tokens of offline items."""
    online_tokens: float
    prompt_tokens: float
    """Of both classes, those from the prefix cache included."""
    cached_tokens: float
    """Prompt tokens that came from the prefix cache."""
    is_reservation_met: bool = True
    """The worker says: in its last step offline took part with its reserved slots, or with all it had."""


@dataclass(frozen=True, slots=True)
class Second:
    """About one second of a block, between two readings of the counters."""

    at: float
    seconds: float
    offline_tokens: float
    online_tokens: float
    most_free: int
    """Most free slots that any look saw."""
    online: float
    """Mean slots held."""
    offline: float
    least_offline: int
    """Fewest offline slots that any look saw."""

    @classmethod
    def between(cls, before: Count, after: Count, looks: Sequence[Look]) -> Self | None:
        """Join two readings and the looks between them; None where there was no look."""
        if not looks:
            return None
        return cls(
            at=before.at,
            seconds=after.at - before.at,
            offline_tokens=after.offline_tokens - before.offline_tokens,
            online_tokens=after.online_tokens - before.online_tokens,
            most_free=max(look.free for look in looks),
            online=sum(look.online for look in looks) / len(looks),
            offline=sum(look.offline for look in looks) / len(looks),
            least_offline=min(look.offline for look in looks),
        )


def by_second(looks: Sequence[Look], counts: Sequence[Count]) -> list[Second]:
    """Cut what was seen into the seconds between readings; the rest at the end belongs to the second before it."""
    if len(counts) > 2 and counts[-1].at - counts[-2].at < COUNT_SECONDS / 2:
        counts = [*counts[:-2], counts[-1]]
    times = [look.at for look in looks]
    seconds = []
    for before, after in pairwise(counts):
        inside = looks[bisect_left(times, before.at) : bisect_left(times, after.at)]
        if second := Second.between(before, after, inside):
            seconds.append(second)
    return seconds


@dataclass(slots=True)
class Block:
    """One stretch of the demo."""

    side: str
    """`online_only`, `mixed`, `flood` or a step of the warm-up."""
    pair: int
    began: float
    ended: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    items_completed: int = 0
    """Offline items."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began

    def gained(self, counter: str) -> float:
        """By how much a counter rose."""
        return float(getattr(self.counts[-1], counter) - getattr(self.counts[0], counter)) if self.counts else 0.0


class Watcher:
    """Looks at the worker beside the load; what it sees goes to the block that is open."""

    def __init__(self, client: Client, began: float) -> None:
        self._client = client
        self._began = began
        self._task: asyncio.Task[None] | None = None
        self.all_looks: list[Look] = []
        """Of the whole demo, for the picture."""
        self._block: Block | None = None
        self._count_due = 0.0

    @property
    def now(self) -> float:
        """Seconds since the demo began."""
        return time.perf_counter() - self._began

    async def open(self, side: str, pair: int = 0) -> Block:
        """Begin a block."""
        block = Block(side, pair, self.now)
        block.counts.append(await self.count())
        self._count_due = block.counts[0].at + COUNT_SECONDS
        self._block = block
        return block

    async def close(self, block: Block) -> None:
        """End a block."""
        self._block = None
        block.counts.append(await self.count())
        block.ended = self.now

    async def look(self) -> Look:
        """See the slots now."""
        status = WorkerStatus.model_validate_json(await self._client.get("/ballast/status"))
        return Look(
            self.now,
            status.slots,
            status.online.running,
            status.offline.running,
            status.offline.parked,
            status.online.waiting,
        )

    async def count(self) -> Count:
        """Read the counters."""
        found = read_metrics((await self._client.get("/metrics")).decode())
        return Count(
            self.now,
            offline_tokens=found.get('ballast_tokens_total{class="offline",phase="decode"}', 0.0),
            online_tokens=found.get('ballast_tokens_total{class="online",phase="decode"}', 0.0),
            prompt_tokens=found.get('ballast_prefix_cache_tokens_total{result="asked"}', 0.0),
            cached_tokens=found.get('ballast_prefix_cache_tokens_total{result="hit"}', 0.0),
            is_reservation_met=found.get("ballast_offline_reservation_met", 0.0) == 1,
        )

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Stop looking."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + LOOK_SECONDS, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            look = await self.look()
            self.all_looks.append(look)
            if (block := self._block) is None:
                continue
            block.looks.append(look)
            if look.at >= self._count_due:
                self._count_due = max(self._count_due, look.at - COUNT_SECONDS) + COUNT_SECONDS
                count = await self.count()
                if self._block is block:  # it may have been closed meanwhile
                    block.counts.append(count)


def read_metrics(text: str) -> dict[str, float]:
    """Read Prometheus text: the name with its labels sorted by name, as a key."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        if "{" in name:
            base, _, labels = name.partition("{")
            name = f"{base}{{{','.join(sorted(labels.rstrip('}').split(',')))}}}"
        with suppress(ValueError):
            found[name] = float(value)
    return found
