"""vLLM's default scheduling as a policy of the simulator: one queue in order of arrival, whatever the class.

Batch requests come as a client or a gateway sends them: at a constant rate, or a fixed number at a time. A request that
runs keeps its slot. If KV is short, the request that came last is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ballast_policy.plan import StepPlan
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot


@dataclass
class FirstCome:
    """Decides the steps of one replica."""

    chunk_tokens: int = 2048
    """Most tokens in a step: vLLM's default on this chip."""
    rate: float = inf
    """Batch requests that are sent to this replica per second."""
    concurrency: float = inf
    """Batch requests that are sent to this replica and not yet answered, at most."""
    _turns: dict[int, int] = field(init=False, default_factory=dict)
    """`seq` of every request that has been sent -> its place in the order of arrival."""
    _num_sent: int = field(init=False, default=0)

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""
        draft = _Draft(snapshot, self.chunk_tokens)
        draft.run(sorted(snapshot.residents, key=self._turn))
        if not draft.preempt:
            draft.start(sorted(self._sent(snapshot), key=self._turn))
        upcoming = (self._num_sent + 1) / self.rate if self.rate < inf else -inf
        return StepPlan(
            grants=tuple(draft.grants),
            admit=tuple(draft.admit),
            preempt=tuple(draft.preempt),
            wait_until=upcoming,
        )

    def _turn(self, request: Request) -> int:
        return self._turns.setdefault(request.seq, len(self._turns))

    def _sent(self, snapshot: EngineSnapshot) -> list[Request]:
        """Return the waiting requests that have been sent, and send those that are due."""
        offline = [r for r in (*snapshot.residents, *snapshot.waiting) if r.request_class is RequestClass.OFFLINE]
        in_flight = sum(1 for request in offline if request.seq in self._turns)
        due = min(self.concurrency - in_flight, self.rate * snapshot.now - self._num_sent)
        sent = []
        for request in snapshot.waiting:
            if request.request_class is RequestClass.OFFLINE and request.seq not in self._turns:
                if due < 1:
                    continue
                due -= 1
                self._num_sent += 1
                self._turn(request)
            sent.append(request)
        return sent


@dataclass
class _Draft:
    """A plan in the making."""

    snapshot: EngineSnapshot
    tokens: int
    """Tokens that the step can still take."""
    grants: list[tuple[Request, int]] = field(default_factory=list)
    admit: list[Request] = field(default_factory=list)
    preempt: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.snapshot.free_blocks
        self.slots = self.snapshot.config.slots - len(self.snapshot.residents)
        self.block_tokens = self.snapshot.config.block_tokens

    def run(self, residents: list[Request]) -> None:
        """Grant tokens to the residents, the first first; preempt the last ones if KV is short."""
        end = len(residents)
        index = 0
        while index < end and self.tokens > 0:
            request = residents[index]
            tokens = min(request.remaining, self.tokens)
            needed = -(-(request.num_computed + tokens) // self.block_tokens) - request.num_blocks
            while needed > self.free and end > index:
                end -= 1
                self.preempt.append(residents[end])
                self.free += residents[end].num_private_blocks
            if end > index:
                self._grant(request, tokens, max(needed, 0))
            index += 1

    def start(self, waiting: list[Request]) -> None:
        """Admit waiting requests in order, as long as tokens, slots and KV allow."""
        for request in waiting:
            cached = request.num_cached
            tokens = min(request.num_tokens - cached, self.tokens)
            needed = -(-(cached + tokens) // self.block_tokens) - cached // self.block_tokens + request.num_cached_idle
            if tokens <= 0 or self.slots <= 0 or needed > self.free:
                return
            self.slots -= 1
            self.admit.append(request)
            self._grant(request, tokens, needed)

    def _grant(self, request: Request, tokens: int, blocks: int) -> None:
        self.tokens -= tokens
        self.free -= blocks
        self.grants.append((request, tokens))
