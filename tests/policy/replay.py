"""An engine without tensors: carries plans out on a real paged pool with a prefix cache, in virtual time.

It refuses whatever an engine could not do. Laws (see `laws`) look at every plan before it is carried out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ballast_policy.admission import UNKNOWN, Expectation
from ballast_policy.backlog import Backlog
from ballast_policy.cost import CostModel, Work, attended
from ballast_policy.fairness import Ledger, token_cost
from ballast_policy.holding import note_holding
from ballast_policy.interference import UNCHECKED, Allowance
from ballast_policy.plan import Plan
from ballast_policy.planner import plan as make_plan
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, Snapshot, take_snapshot

Planner = Callable[[Snapshot], Plan]
Law = Callable[["Replay", Snapshot, Plan], None]

EXACT = CostModel(k0=0.005, k1=5e-5, k2=1e-8, k3=2e-4, k4=2e-7, is_trusted=True)


@dataclass(frozen=True)
class Arrival:
    """A request to come. `shared` tokens of its prompt are the same in the whole prefix group."""

    at: float
    request_class: RequestClass
    prompt: int
    output: int
    tenant: str = "default"
    priority: int = 0
    ttft: float = inf
    tpot: float = inf
    laxity: float = inf
    prefix_group: int = 0
    shared: int = 0
    abort_after: int | None = None
    """Steps after its arrival at which it is aborted, if it still lives."""


class Pool:
    """KV blocks with reference counts; unused ones keep their content until they are taken, oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.unused: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self.users: Counter[int] = Counter()
        self.block_of: dict[object, int] = {}
        self.content: dict[int, object] = {}

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self.unused), f"KV: {count} blocks wanted, {len(self.unused)} free"
        blocks = [self.unused.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.users[block] += 1
            old = self.content.pop(block, None)
            if old is not None:
                del self.block_of[old]
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.unused.pop(block, None)
            self.users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.unused[block] = None

    def register(self, block: int, content: object) -> None:
        if content not in self.block_of and block not in self.content:
            self.block_of[content] = block
            self.content[block] = content


@dataclass
class Life:
    """One request of the run and what the engine alone knows of it."""

    request: Request
    arrival: Arrival
    blocks: list[int] = field(default_factory=list)
    finished_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_preempted: int = 0
    num_charged: int = 0
    """Prompt tokens charged to the tenant."""


class Replay:
    """One run: arrivals in, steps one by one until nothing is left."""

    def __init__(
        self,
        config: PolicyConfig,
        arrivals: Sequence[Arrival],
        *,
        cost: CostModel = EXACT,
        planner: Planner = make_plan,
        laws: Sequence[Law] = (),
        refuses_deferred: bool = True,
        expectation: Expectation = UNKNOWN,
        allowance: Allowance = UNCHECKED,
    ) -> None:
        self.config = config
        self.expectation = expectation
        self.allowance = allowance
        self.cost = cost
        self.planner = planner
        self.laws = laws
        self.now = 0.0
        self.num_steps = 0
        self.pool = Pool(config.num_blocks)
        self.backlog = Backlog()
        weights = {name: share.weight for name, share in config.tenants.items()}
        reserved = {name: share.reserved for name, share in config.tenants.items()}
        self.ledgers = {request_class: Ledger(weights, reserved) for request_class in RequestClass}
        self.lives: dict[Request, Life] = {}
        self.residents: dict[Request, Life] = {}
        self.last_online = -inf
        self.history: list[tuple[Snapshot, Plan]] = []
        self.keeps_history = False
        self._coming = sorted(arrivals, key=lambda arrival: arrival.at, reverse=True)
        self._aborts: dict[int, list[Life]] = {}
        self._next_seq = 0

    # Driving

    @property
    def is_done(self) -> bool:
        return not (self._coming or self.residents or len(self.backlog))

    def run(self, max_steps: int) -> None:
        """Step until everything is over."""
        while not self.is_done:
            assert self.num_steps < max_steps, f"progress: {self._left()} after {self.num_steps} steps"
            self.step()
        self.check_nothing_leaked()

    def step(self) -> Plan:
        """Take in what came, plan, check the laws, and carry the plan out."""
        self._take_in()
        snapshot = self.look()
        plan = self.planner(snapshot)
        for law in self.laws:
            law(self, snapshot, plan)
        if self.keeps_history:
            self.history.append((replace(snapshot, residents=tuple(snapshot.residents)), plan))
        self._apply(plan)
        self.num_steps += 1
        return plan

    def check_nothing_leaked(self) -> None:
        """G8: whatever came and went, the pool is whole and nobody is counted any more."""
        assert len(self.pool.unused) == self.config.num_blocks, "leak: blocks are missing"
        assert not self.pool.users, "leak: blocks are in use"
        assert len(self.backlog) == 0, "leak: the backlog is not empty"
        assert all(self.backlog.count(request_class) == 0 for request_class in RequestClass)
        assert all(life.finished_at is not None for life in self.lives.values()), "leak: a request never ended"

    def look(self) -> Snapshot:
        """What the engine would show the policy now."""
        residents = list(self.residents)
        if self.backlog.count(RequestClass.ONLINE) or any(
            request.request_class is RequestClass.ONLINE for request in residents
        ):
            self.last_online = self.now
        for life in self.residents.values():
            life.request.num_private_blocks = sum(self.pool.users[block] == 1 for block in life.blocks)
        snapshot = take_snapshot(
            now=self.now,
            residents=residents,
            backlog=self.backlog,
            free_blocks=len(self.pool.unused),
            config=self.config,
            cost=self.cost,
            ledgers=self.ledgers,
            last_online=self.last_online,
            typical_prompt=20,
            expectation=self.expectation,
            allowance=self.allowance,
        )
        for request in snapshot.waiting:
            self._hint(self.lives[request])
        return snapshot

    # Inside

    def _take_in(self) -> None:
        if not self.residents and not len(self.backlog) and self._coming:
            self.now = max(self.now, self._coming[-1].at)
        for life in self._aborts.pop(self.num_steps, ()):
            self._abort(life)
        while self._coming and self._coming[-1].at <= self.now:
            self._enter(self._coming.pop())

    def _enter(self, arrival: Arrival) -> None:
        request = Request(
            seq=self._next_seq,
            request_class=arrival.request_class,
            arrival=arrival.at,
            num_prompt=arrival.prompt,
            max_output=arrival.output,
            tenant=arrival.tenant,
            priority=arrival.priority,
            ttft=arrival.ttft,
            tpot=arrival.tpot,
            laxity=arrival.laxity,
            prefix_group=arrival.prefix_group,
            num_tokens=arrival.prompt,
        )
        self._next_seq += 1
        life = self.lives[request] = Life(request, arrival)
        active = self.backlog.tenants(arrival.request_class)
        active |= {r.tenant for r in self.residents if r.request_class is arrival.request_class}
        if arrival.tenant not in active:
            self.ledgers[arrival.request_class].lift(arrival.tenant, active)
        self.backlog.add(request)
        if arrival.abort_after is not None:
            self._aborts.setdefault(self.num_steps + arrival.abort_after, []).append(life)

    def _abort(self, life: Life) -> None:
        if life.finished_at is not None:
            return
        if life.request.phase is Phase.WAITING:
            self.backlog.remove(life.request)
        else:
            self._release(life)
        life.finished_at = self.now

    def _content(self, life: Life, index: int) -> object:
        if (index + 1) * self.config.block_tokens <= min(life.arrival.shared, life.arrival.prompt):
            return ("group", life.request.prefix_group, index)
        return ("own", life.request.seq, index)

    def _cached(self, life: Life) -> list[int]:
        blocks = []
        for index in range((life.request.num_tokens - 1) // self.config.block_tokens):
            block = self.pool.block_of.get(self._content(life, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hint(self, life: Life) -> None:
        blocks = self._cached(life)
        life.request.num_cached = len(blocks) * self.config.block_tokens
        life.request.num_cached_idle = sum(block in self.pool.unused for block in blocks)

    def _release(self, life: Life) -> None:
        request = life.request
        self.pool.release(life.blocks)
        life.blocks = []
        del self.residents[request]
        request.phase = Phase.WAITING
        request.num_computed = request.num_blocks = request.num_private_blocks = 0

    def _apply(self, plan: Plan) -> None:
        for request in plan.preempt:
            life = self.residents[request]
            life.num_preempted += 1
            self._release(life)
            self.backlog.add(request)
        for request in plan.park:
            request.phase = Phase.PARKED
        for request in plan.resume:
            request.phase = Phase.RUNNING
        for request in plan.admit:
            life = self.lives[request]
            self.backlog.remove(request)
            life.blocks = self._cached(life)
            self.pool.share(life.blocks)
            request.num_blocks = len(life.blocks)
            request.num_computed = request.num_cached = len(life.blocks) * self.config.block_tokens
            request.phase = Phase.RUNNING
            self.residents[request] = life
        note_holding(self.ledgers, self.residents, self.backlog, now=self.now, slots=self.config.slots)
        grants = [(self.residents[r], min(tokens, r.remaining)) for r, tokens in plan.grants]
        for life, tokens in grants:
            missing = -(-(life.request.num_computed + tokens) // self.config.block_tokens) - len(life.blocks)
            life.blocks += self.pool.allocate(max(0, missing))
            life.request.num_blocks = len(life.blocks)
        self.now += self.cost.predict(work_of(grants)) or 0.001
        for life, tokens in grants:
            self._compute(life, tokens)

    def _compute(self, life: Life, tokens: int) -> None:
        request = life.request
        request.num_computed += tokens
        new_input = min(request.num_computed, request.num_prompt) - max(life.num_charged, 0)
        self.ledgers[request.request_class].charge(request.tenant, token_cost(max(0, new_input), 0))
        life.num_charged = max(life.num_charged, min(request.num_computed, request.num_prompt))
        for index in range(request.num_computed // self.config.block_tokens):
            self.pool.register(life.blocks[index], self._content(life, index))
        if request.num_computed < request.num_tokens:
            return
        request.num_tokens += 1
        request.num_output += 1
        request.first_token = min(request.first_token, self.now)
        life.first_token_at = life.first_token_at or self.now
        life.last_token_at = self.now
        self.ledgers[request.request_class].charge(request.tenant, token_cost(0, 1))
        if request.num_output == life.arrival.output:
            self._release(life)
            life.finished_at = self.now

    def _left(self) -> str:
        waiting, residents = len(self.backlog), len(self.residents)
        return f"{waiting} waiting, {residents} resident, {len(self._coming)} to come"


def work_of(grants: Sequence[tuple[Life, int]]) -> Work:
    """What a step computes."""
    prefill = [(life, tokens) for life, tokens in grants if life.request.remaining > 1]
    decode = [life for life, _ in grants if life.request.remaining == 1]
    return Work(
        sum(tokens for _, tokens in prefill),
        sum(attended(life.request.num_computed, tokens) for life, tokens in prefill),
        len(decode),
        sum(life.request.num_tokens for life in decode),
    )
