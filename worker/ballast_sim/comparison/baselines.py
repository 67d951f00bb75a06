"""Baselines: the policies of other systems, to run on the same traffic as Ballast.

All of them form their batch with `Fill`. They differ in its fields (`Bench.rows`), and in the requests that a gateway
in front of the engine releases:

- greedy: every step is filled with offline work up to 0.95 of the TPOT, independent of the slack of requests.
- static budget (`replay.policies.held_to`): the same with another fixed step time, found by a sweep.
- naive priority (vLLM's `--scheduling-policy priority`): online is ordered first, and that is all. A resident offline
  request takes part in every step, and keeps its slot.
- sarathi: the same with a chunk of 512 tokens, so that a prefill never stalls the decodes for long (HyGen's Sarathi++).
- qps-cap: sarathi behind a gateway that releases offline requests at a fixed rate (HyGen*).
- aimd: naive priority behind a gateway that adjusts the number of offline requests in flight to the online queue and to
  the KV cache in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_sim.replay.policies import Fill, held_to


@dataclass
class QpsCap(Fill):
    """A gateway in front of sarathi releases offline requests at a fixed rate."""

    chunk_tokens: int = 512
    rate: float = 1.0
    _released: float = 0.0
    _last: float = 0.0

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """Return the offline requests in flight, and those that the rate allows in addition."""
        self._released = min(self._released + self.rate * (snapshot.now - self._last), max(1.0, self.rate))
        self._last = snapshot.now
        held = sum(1 for r in snapshot.residents if r.request_class is OFFLINE)
        return held + int(self._released)

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Plan the next step, and count the released requests."""
        plan = super().plan(snapshot)
        self._released -= sum(1 for r in plan.admit if r.request_class is OFFLINE and r.num_output == 0)
        return plan


@dataclass
class Aimd(Fill):
    """A gateway adds one offline request in flight each second, and halves their number if online requests queue.

    It observes whether online requests queue and how full the KV cache is (the signals and figures of Tidal).
    """

    limit: float = 1.0
    high_kv: float = 0.85
    low_kv: float = 0.70
    _next: float = 0.0
    _kv: float = 0.0
    _queued: bool = False

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """Return the current limit, which is adjusted once a second."""
        used = 1.0 - snapshot.free_blocks / snapshot.config.num_blocks
        self._queued |= any(
            r.request_class is ONLINE and snapshot.now - r.arrival > 0.25 * snapshot.config.ttft
            for r in snapshot.waiting[:1]
        )
        if snapshot.now >= self._next:
            self._next = snapshot.now + 1.0
            self._kv += 0.5 * (used - self._kv)
            if self._queued or self._kv > self.high_kv:
                self.limit = max(1.0, self.limit / 2)
            elif self._kv < self.low_kv:
                self.limit = min(float(snapshot.config.slots), self.limit + 1)
            self._queued = False
        return int(self.limit)


PEERS: dict[str, Callable[[PolicyConfig], Fill]] = {
    "naive-priority": lambda _: Fill(),
    "sarathi": lambda _: Fill(chunk_tokens=512),
    "aimd": lambda _: Aimd(),
    "greedy": lambda config: held_to(0.95 * config.tpot, config.chunk_tokens),
}
"""The baselines that need no value and no tuning, by the names of `ballast bench`."""
