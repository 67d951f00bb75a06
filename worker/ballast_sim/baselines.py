"""What others do, as policies that the simulator runs beside Ballast's on the same traffic.

All but one form their batch with `Fill`, whose fields are the differences between them:

- online-only: no offline work. offline-only: no online traffic in the scenario, and no limit but the chunk.
- greedy: every step is filled with offline work up to 0.95 of the TPOT, whatever slack the requests have.
- static budget: the same with another fixed step time, found by a sweep.
- naive priority (vLLM's `--scheduling-policy priority`): online is ordered first, and that is all: an offline request
  that is resident takes part in every step, and one that holds a slot keeps it.
- sarathi: the same with a small chunk, so that a prefill never stalls the decodes for long (HyGen's Sarathi++).
- qps-cap: sarathi behind a gateway that releases offline requests at a fixed rate (HyGen*).
- aimd: naive priority behind a gateway that widens and halves the offline requests in flight by what it observes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ballast_policy.plan import StepPlan
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


@dataclass
class Fill:
    """Online first, then offline decodes, offline prefill and offline admissions, within fixed bounds."""

    chunk_tokens: int = 512
    """Most tokens in a step, decodes among them."""
    step_seconds: float = inf
    """Offline work is added while the predicted step stays within it."""
    is_parking: bool = False
    """Resident offline decodes sit out a step they do not fit into, and give up slots to waiting online requests.
    Without it they always take part and keep their slot."""
    takes_offline: bool = True
    kv_watermark: float = 0.10
    """Share of KV blocks that an offline admission leaves free, for the decodes to grow into."""

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """Most offline requests in flight: what a gateway in front of the engine would let through."""
        return snapshot.config.slots if self.takes_offline else 0

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""
        return _Draft(self, snapshot, self.offline_limit(snapshot)).plan()


@dataclass
class QpsCap(Fill):
    """Offline requests come through a gateway at a fixed rate."""

    rate: float = 1.0
    _released: float = 0.0
    _last: float = 0.0
    _seen: int = -1

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """What is in flight, and what the rate allows on top."""
        self._released = min(self._released + self.rate * (snapshot.now - self._last), max(1.0, self.rate))
        self._last = snapshot.now
        held = sum(1 for r in snapshot.residents if r.request_class is OFFLINE)
        return held + int(self._released)

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step, and count what was let through."""
        plan = super().plan(snapshot)
        self._released -= sum(1 for r in plan.admit if r.request_class is OFFLINE and r.num_output == 0)
        return plan


@dataclass
class Aimd(Fill):
    """A gateway in front of the engine: once a second, one more in flight, or half as many when it hurts.

    It sees what a gateway sees: whether online requests queue, how full the KV cache is (Tidal's signals and figures).
    """

    limit: float = 1.0
    high_kv: float = 0.85
    low_kv: float = 0.70
    _next: float = 0.0
    _kv: float = 0.0
    _queued: bool = False

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """The limit in force, adjusted once a second."""
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


def online_only(chunk_tokens: int) -> Fill:
    """Without offline work."""
    return Fill(takes_offline=False, chunk_tokens=chunk_tokens)


def unbounded(chunk_tokens: int = 2048) -> Fill:
    """Offline alone, as fast as it goes."""
    return Fill(chunk_tokens=chunk_tokens)


def held_to(step_seconds: float, chunk_tokens: int = 2048) -> Fill:
    """Offline alone with every step within a time: the SLO-bound ceiling."""
    return Fill(chunk_tokens=chunk_tokens, step_seconds=step_seconds, is_parking=True)


def greedy(tpot: float, chunk_tokens: int) -> Fill:
    """Every step filled to 0.95 of the TPOT."""
    return static_budget(0.95 * tpot, chunk_tokens)


def static_budget(step_seconds: float, chunk_tokens: int) -> Fill:
    """Every step filled to a fixed time."""
    return Fill(chunk_tokens=chunk_tokens, step_seconds=step_seconds, is_parking=True)


def naive_priority() -> Fill:
    """Priority scheduling as in vLLM, with its default of 2,048 tokens a step."""
    return Fill(chunk_tokens=2048)


def sarathi() -> Fill:
    """Chunks of 512 tokens, online first."""
    return Fill(chunk_tokens=512)


def qps_cap(rate: float) -> QpsCap:
    """Sarathi behind a gateway that releases `rate` offline requests a second."""
    return QpsCap(chunk_tokens=512, rate=rate)


def aimd() -> Aimd:
    """Naive priority behind a gateway that adapts the offline requests in flight."""
    return Aimd(chunk_tokens=2048)


@dataclass
class _Draft:
    """A plan in the making."""

    fill: Fill
    snapshot: EngineSnapshot
    offline_limit: int
    admit: list[Request] = field(default_factory=list)
    park: dict[int, Request] = field(default_factory=dict)
    resume: list[Request] = field(default_factory=list)
    preempt: dict[int, Request] = field(default_factory=dict)
    grants: dict[int, tuple[Request, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        snapshot = self.snapshot
        self.cost = snapshot.cost
        self.seconds = snapshot.cost.k0
        self.tokens = self.fill.chunk_tokens
        self.blocks = snapshot.free_blocks
        self.online = sorted((r for r in snapshot.residents if r.request_class is ONLINE), key=lambda r: r.seq)
        self.offline = sorted((r for r in snapshot.residents if r.request_class is OFFLINE), key=lambda r: r.seq)
        self.slots = snapshot.config.slots - sum(1 for r in snapshot.residents if r.phase is Phase.RUNNING)

    def plan(self) -> StepPlan:
        """Place online, then offline."""
        for request in self.online:
            if request.seq not in self.preempt:
                self._run(request, inf, must_run=True)
        for request in self.snapshot.waiting:
            if request.request_class is OFFLINE or not self._admit_online(request):
                break
        self._place_offline(self.fill.step_seconds)
        return StepPlan(
            grants=tuple(self.grants.values()),
            admit=tuple(self.admit),
            park=tuple(self.park.values()),
            resume=tuple(self.resume),
            preempt=tuple(self.preempt.values()),
            predicted_seconds=self.seconds,
            budget_seconds=self.fill.step_seconds,
        )

    def _place_offline(self, step: float) -> None:
        """Decodes first, prefill after them, newcomers last."""
        must_run = not self.fill.is_parking
        for request in [r for r in self.offline if r.remaining == 1] + [r for r in self.offline if r.remaining > 1]:
            if request.seq not in self.preempt:
                self._run(request, inf if must_run and request.remaining == 1 else step, must_run=must_run)
        held = len(self.offline) - len(self.preempt)
        room = self.blocks - int(self.fill.kv_watermark * self.snapshot.config.num_blocks)
        room -= sum(self._owed(r) for r in self.snapshot.residents if r.remaining > 1 and r.seq not in self.preempt)
        for request in self.snapshot.waiting:
            if request.request_class is ONLINE:
                continue
            room -= self._blocks(request, request.num_tokens - request.num_cached)
            if held >= self.offline_limit or self.slots <= 0 or self.tokens <= 0 or room < 0:
                break
            if not self._run(request, step, must_run=False):
                break
            held += 1

    def _owed(self, request: Request) -> int:
        """Blocks that a resident needs for the prefill that this step leaves over."""
        _, granted = self.grants.get(request.seq, (request, 0))
        return self._blocks(request, request.remaining) - self._blocks(request, granted)

    def _admit_online(self, request: Request) -> bool:
        """Take in one that waits; where offline yields, it parks for a slot and is preempted for KV."""
        if self.slots <= 0 and self.fill.is_parking:
            running = (r for r in reversed(self.offline) if r.phase is Phase.RUNNING and r.seq not in self.park)
            victim = next(running, None)
            if victim:
                self._park(victim)
        return self.slots > 0 and self._run(request, inf, must_run=True)

    def _park(self, request: Request) -> None:
        self.park[request.seq] = request
        self.slots += 1

    def _run(self, request: Request, step: float, *, must_run: bool) -> bool:
        """Grant what fits of a request; False if nothing does."""
        if request.seq in self.park or (request.phase is not Phase.RUNNING and self.slots <= 0):
            return False
        is_waiting = request.phase is Phase.WAITING
        computed = request.num_cached if is_waiting else request.num_computed
        remaining = request.num_tokens - computed
        if remaining == 1:
            tokens = 1 if must_run or self.seconds + self.cost.decode(computed + 1) <= step else 0
        else:
            tokens = self._chunk(computed, min(remaining, self.tokens), step)
        if tokens and not self._make_room(request, tokens):
            tokens = 0
        if not tokens:
            if request.phase is Phase.RUNNING and request.request_class is OFFLINE and self.fill.is_parking:
                self._park(request)
            return False
        self.grants[request.seq] = (request, tokens)
        self.seconds += self.cost.decode(computed + 1) if remaining == 1 else self.cost.prefill(computed, tokens)
        self.tokens -= tokens
        self.blocks -= self._needs(request, tokens)
        if request.phase is not Phase.RUNNING:
            (self.admit if is_waiting else self.resume).append(request)
            self.slots -= 1
        return True

    def _chunk(self, computed: int, most: int, step: float) -> int:
        """Largest chunk within the step."""
        if most <= 0 or step == inf:
            return max(most, 0)
        return self.cost.largest_chunk(step - self.seconds, computed, most)

    def _blocks(self, request: Request, tokens: int) -> int:
        """Blocks that so many more tokens of it take."""
        size = self.snapshot.config.block_tokens
        if request.phase is Phase.WAITING:
            return -(-(request.num_cached + tokens) // size) - request.num_cached // size
        return max(0, -(-(request.num_computed + tokens) // size) - request.num_blocks)

    def _needs(self, request: Request, tokens: int) -> int:
        """Free blocks that are gone when it computes so many tokens, those of the cache that it takes up included."""
        return self._blocks(request, tokens) + (request.num_cached_idle if request.phase is Phase.WAITING else 0)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Preempt until the blocks are there: offline first, the youngest first; of its own class only younger ones."""
        needed = self._needs(request, tokens)
        if needed <= self.blocks:
            return True
        is_online = request.request_class is ONLINE
        for victim in (*reversed(self.offline), *(reversed(self.online) if is_online else ())):
            if victim.request_class is request.request_class and victim.seq <= request.seq:
                return False
            if victim.seq in self.grants or victim.seq in self.preempt:
                continue
            self.preempt[victim.seq] = victim
            self.blocks += victim.num_private_blocks
            if self.park.pop(victim.seq, None) is None and victim.phase is Phase.RUNNING:
                self.slots += 1
            if needed <= self.blocks:
                return True
        return False
