"""Poll the worker while a block runs: its slots ten times per second, and its token counters once per second."""

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

POLL_SECONDS = 0.1
COUNT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SlotPoll:
    """The slots at one moment."""

    at: float
    """Seconds since the demo began."""
    slots: int
    online: int
    offline: int
    parked: int
    """Offline requests that hold KV but no slot."""
    waiting: int
    """Online requests without a slot."""

    @property
    def free(self) -> int:
        """Slots that no request holds."""
        return max(0, self.slots - self.online - self.offline)


@dataclass(frozen=True, slots=True)
class CounterPoll:
    """The worker's counters at one moment. They count from the start of the worker."""

    at: float
    offline_tokens: float
    """Output tokens of offline items."""
    online_tokens: float
    prompt_tokens: float
    """Prompt tokens of both classes, with those from the prefix cache."""
    cached_tokens: float
    """Prompt tokens that came from the prefix cache."""
    is_reservation_met: bool = True
    """Whether the worker reports the reservation of offline as met in its last step."""


@dataclass(frozen=True, slots=True)
class Second:
    """About one second of a block, between two polls of the counters."""

    at: float
    seconds: float
    offline_tokens: float
    online_tokens: float
    most_free: int
    """Most free slots in any poll."""
    online: float
    """Mean slots held by online."""
    offline: float
    least_offline: int
    """Fewest offline slots in any poll."""

    @classmethod
    def between(cls, before: CounterPoll, after: CounterPoll, polls: Sequence[SlotPoll]) -> Self | None:
        """Join two polls of the counters and the polls of the slots between them; return None if there are none."""
        if not polls:
            return None
        return cls(
            at=before.at,
            seconds=after.at - before.at,
            offline_tokens=after.offline_tokens - before.offline_tokens,
            online_tokens=after.online_tokens - before.online_tokens,
            most_free=max(poll.free for poll in polls),
            online=sum(poll.online for poll in polls) / len(polls),
            offline=sum(poll.offline for poll in polls) / len(polls),
            least_offline=min(poll.offline for poll in polls),
        )


def by_second(polls: Sequence[SlotPoll], counts: Sequence[CounterPoll]) -> list[Second]:
    """Divide a block into the seconds between polls of the counters. A short rest belongs to the last second."""
    if len(counts) > 2 and counts[-1].at - counts[-2].at < COUNT_SECONDS / 2:
        counts = [*counts[:-2], counts[-1]]
    times = [poll.at for poll in polls]
    seconds = []
    for before, after in pairwise(counts):
        inside = polls[bisect_left(times, before.at) : bisect_left(times, after.at)]
        if second := Second.between(before, after, inside):
            seconds.append(second)
    return seconds


@dataclass(slots=True)
class Block:
    """One part of the demo."""

    side: str
    """`online_only`, `mixed`, `flood` or a part of the warm-up."""
    pair: int
    began: float
    ended: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    polls: list[SlotPoll] = field(default_factory=list)
    counts: list[CounterPoll] = field(default_factory=list)
    items_completed: int = 0
    """Offline items that were completed in the block."""

    @property
    def seconds(self) -> float:
        """Length of the block."""
        return self.ended - self.began

    def gained(self, counter: str) -> float:
        """Return the increase of a counter in the block."""
        return float(getattr(self.counts[-1], counter) - getattr(self.counts[0], counter)) if self.counts else 0.0


async def status(client: Client) -> WorkerStatus:
    """Fetch the status of the worker."""
    return WorkerStatus.model_validate_json(await client.get("/ballast/status"))


class WorkerPoller:
    """Polls the worker while the load runs, and adds the polls to the open block."""

    def __init__(self, client: Client, began: float) -> None:
        self._client = client
        self._began = began
        self._task: asyncio.Task[None] | None = None
        self.all_polls: list[SlotPoll] = []
        """Polls of the whole demo, for the picture."""
        self._block: Block | None = None
        self._count_due = 0.0

    @property
    def now(self) -> float:
        """Seconds since the demo began."""
        return time.perf_counter() - self._began

    async def open(self, side: str, pair: int = 0) -> Block:
        """Start a block."""
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

    async def poll(self) -> SlotPoll:
        """Poll the slots."""
        found = await status(self._client)
        return SlotPoll(
            self.now,
            found.slots,
            found.online.running,
            found.offline.running,
            found.offline.parked,
            found.online.waiting,
        )

    async def count(self) -> CounterPoll:
        """Poll the counters."""
        found = read_metrics((await self._client.get("/metrics")).decode())
        return CounterPoll(
            self.now,
            offline_tokens=found.get('ballast_tokens_total{class="offline",phase="decode"}', 0.0),
            online_tokens=found.get('ballast_tokens_total{class="online",phase="decode"}', 0.0),
            prompt_tokens=found.get('ballast_prefix_cache_tokens_total{result="asked"}', 0.0),
            cached_tokens=found.get('ballast_prefix_cache_tokens_total{result="hit"}', 0.0),
            is_reservation_met=found.get("ballast_offline_reservation_met", 0.0) == 1,
        )

    def start(self) -> None:
        """Start to poll."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Stop to poll."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])  # unlike `await`, it raises only if the caller is cancelled

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + POLL_SECONDS, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            poll = await self.poll()
            self.all_polls.append(poll)
            if (block := self._block) is None:
                continue
            block.polls.append(poll)
            if poll.at >= self._count_due:
                self._count_due = max(self._count_due, poll.at - COUNT_SECONDS) + COUNT_SECONDS
                count = await self.count()
                if self._block is block:  # the block may be closed by now
                    block.counts.append(count)


def read_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus text into values by metric, with the labels of each metric sorted by name."""
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
