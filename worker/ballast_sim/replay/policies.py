"""The policies that a replay runs: Ballast's own, and a plain one that fills each batch with offline work."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.planner import plan


class Ballast:
    """The policy that ships."""

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Plan the next step."""
        return plan(snapshot)


@dataclass
class Fill:
    """Fills a step: online first, then offline decodes, offline prefill and offline admissions, within fixed bounds.

    By default, the time of a step has no bound.
    """

    chunk_tokens: int = 2048
    """Most tokens in a step, with the decodes. The default is that of vLLM."""
    step_seconds: float = inf
    """Longest predicted time of a step with offline work."""
    is_parking: bool = False
    """Whether resident offline decodes are left out of a step that they do not fit into, and give up their slots to
    waiting online requests. Otherwise, they take part in every step and keep their slots."""
    kv_watermark: float = 0.10
    """Share of the KV blocks that an offline admission leaves free for the growth of decodes."""

    def offline_limit(self, snapshot: EngineSnapshot) -> int:
        """Return the most offline requests in flight that a gateway in front of the engine allows."""
        return snapshot.config.slots

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Plan the next step."""
        return _Draft(self, snapshot, self.offline_limit(snapshot)).plan()


def held_to(step_seconds: float, chunk_tokens: int = 2048) -> Fill:
    """Make a policy that fills every step to a fixed time. Offline work alone then has the SLO-bound throughput."""
    return Fill(chunk_tokens=chunk_tokens, step_seconds=step_seconds, is_parking=True)


@dataclass
class _Draft:
    """A plan that is being made."""

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
        self.tokens, self.num_tokens = self.fill.chunk_tokens, 0
        self.blocks = snapshot.free_blocks
        self.online = sorted((r for r in snapshot.residents if r.request_class is ONLINE), key=lambda r: r.seq)
        self.offline = sorted((r for r in snapshot.residents if r.request_class is OFFLINE), key=lambda r: r.seq)
        self.slots = snapshot.config.slots - sum(1 for r in snapshot.residents if r.phase is Phase.RUNNING)

    def plan(self) -> StepPlan:
        """Add online requests, then offline requests."""
        for request in self.online:
            if request.seq not in self.preempt:
                self._run(request, inf)
        for request in self.snapshot.waiting:
            if request.request_class is OFFLINE or not self._admit_online(request):
                break
        self._place_offline()
        return StepPlan(
            grants=tuple(self.grants.values()),
            admit=tuple(self.admit),
            park=tuple(self.park.values()),
            resume=tuple(self.resume),
            preempt=tuple(self.preempt.values()),
            predicted_seconds=self.seconds,
            budget_seconds=self.fill.step_seconds,
        )

    def _place_offline(self) -> None:
        """Add offline decodes, then offline prefill, then newcomers."""
        step = self.fill.step_seconds
        for request in [r for r in self.offline if r.remaining == 1] + [r for r in self.offline if r.remaining > 1]:
            if request.seq not in self.preempt:
                self._run(request, inf if request.remaining == 1 and not self.fill.is_parking else step)
        held = len(self.offline) - len(self.preempt)
        free = self.blocks - int(self.fill.kv_watermark * self.snapshot.config.num_blocks)
        free -= sum(self._owed(r) for r in self.snapshot.residents if r.remaining > 1 and r.seq not in self.preempt)
        for request in self.snapshot.waiting:
            if request.request_class is ONLINE:
                continue
            free -= self._blocks(request, request.num_tokens - request.num_cached)
            if held >= self.offline_limit or self.slots <= 0 or self.tokens <= 0 or free < 0:
                break
            if not self._run(request, step):
                break
            held += 1

    def _owed(self, request: Request) -> int:
        """Return the blocks that a resident needs for its remaining prefill after this step."""
        _, granted = self.grants.get(request.seq, (request, 0))
        return self._blocks(request, request.remaining) - self._blocks(request, granted)

    def _admit_online(self, request: Request) -> bool:
        """Admit a waiting online request, and park an offline request for its slot if the policy parks."""
        if self.slots <= 0 and self.fill.is_parking:
            running = (r for r in reversed(self.offline) if r.phase is Phase.RUNNING and r.seq not in self.park)
            victim = next(running, None)
            if victim:
                self._park(victim)
        return self.slots > 0 and self._run(request, inf)

    def _park(self, request: Request) -> None:
        self.park[request.seq] = request
        self.slots += 1

    def _run(self, request: Request, step: float) -> bool:
        """Grant as many tokens of a request as fit into `step` seconds; return False if none does."""
        if request.seq in self.park or (request.phase is not Phase.RUNNING and self.slots <= 0):
            return False
        is_waiting = request.phase is Phase.WAITING
        computed = request.num_cached if is_waiting else request.num_computed
        remaining, beside = request.num_tokens - computed, self.num_tokens
        if remaining == 1:
            tokens = 1 if self.seconds + self.cost.decode(computed + 1, beside) <= step else 0
        else:
            tokens = self.cost.largest_chunk(step - self.seconds, computed, min(remaining, self.tokens), beside)
        if tokens and not self._preempt_for(request, tokens):
            tokens = 0
        if not tokens:
            if request.phase is Phase.RUNNING and request.request_class is OFFLINE and self.fill.is_parking:
                self._park(request)
            return False
        self.grants[request.seq] = (request, tokens)
        if remaining == 1:
            self.seconds += self.cost.decode(computed + 1, beside)
        else:
            self.seconds += self.cost.prefill(computed, tokens, beside)
        self.num_tokens += tokens
        self.tokens -= tokens
        self.blocks -= self._needs(request, tokens)
        if request.phase is not Phase.RUNNING:
            (self.admit if is_waiting else self.resume).append(request)
            self.slots -= 1
        return True

    def _blocks(self, request: Request, tokens: int) -> int:
        """Return the new blocks that further tokens of a request take."""
        size = self.snapshot.config.block_tokens
        if request.phase is Phase.WAITING:
            return -(-(request.num_cached + tokens) // size) - request.num_cached // size
        return max(0, -(-(request.num_computed + tokens) // size) - request.num_blocks)

    def _needs(self, request: Request, tokens: int) -> int:
        """Return the free blocks that computing the tokens takes, with the idle cached blocks that the request uses."""
        return self._blocks(request, tokens) + (request.num_cached_idle if request.phase is Phase.WAITING else 0)

    def _preempt_for(self, request: Request, tokens: int) -> bool:
        """Preempt requests until the blocks are free: offline first, the youngest first, and no older one of its class.

        Return False if there are not enough blocks.
        """
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
