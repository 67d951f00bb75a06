"""Requests that come to a fake engine, and random workloads of them: small engines under every kind of pressure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf
from sys import maxsize

from hypothesis import strategies as st

from ballast_policy.host import Host, Planner
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import UNKNOWN, UNKNOWN_SHARE, Expectation
from ballast_policy.learning.interference import UNCHECKED, Allowance
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, WAITING, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig, TenantShare

EXACT = CostModel(k0=0.005, k1=5e-5, k2=1e-8, k3=2e-4, k4=2e-7, is_trusted=True)
"""How long a step of the fake engine takes."""
UNTRUSTED = CostModel(0.005, 5e-5, 0, 2e-4, 0)


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
    slack: float = inf
    prefix_key: int = 0
    shared: int = 0
    abort_after: int | None = None
    """Steps after its arrival at which it is aborted, if it still lives."""

    def request(self, seq: int) -> Request:
        return Request(
            seq,
            self.request_class,
            self.at,
            num_prompt=self.prompt,
            max_output=self.output,
            tenant=self.tenant,
            priority=self.priority,
            ttft=self.ttft,
            tpot=self.tpot,
            slack=self.slack,
            prefix_key=self.prefix_key or None,
            num_tokens=self.prompt,
        )


@dataclass(frozen=True)
class Workload:
    config: PolicyConfig
    arrivals: tuple[Arrival, ...]
    expectation: Expectation = UNKNOWN
    allowance: Allowance = UNCHECKED

    @property
    def max_steps(self) -> int:
        """More than any run needs, were everything served one by one and each request preempted again and again."""
        tokens = sum(a.prompt + a.output for a in self.arrivals)
        return 200 + 20 * tokens

    def host(self, planner: Planner, cost: CostModel | None) -> Host:
        """Return a host that knows `cost` (None: it learns it) and begins with what was drawn as learned."""
        host = Host(self.config, cost=cost, planner=planner)
        share = host.interference.allowance.share if self.allowance.share is None else self.allowance.share
        host.expectations.expectation, host.interference.allowance = (
            self.expectation,
            replace(self.allowance, share=share),
        )
        return host


@st.composite
def arrivals(draw: st.DrawFn, max_tokens: int, *, has_prefix: bool = False) -> Arrival:
    """Return any request; `has_prefix`: one of which nearly all may be shared, and a large part of the KV."""
    is_online = draw(st.booleans())
    group = draw(st.integers(0, 2))
    if has_prefix and group:
        shared = draw(st.integers(1, max(1, max_tokens * 3 // 5)))
        prompt = min(max_tokens - 1, shared + draw(st.integers(1, 10)))
    else:
        prompt = draw(st.integers(1, min(60, max_tokens - 1)))
        shared = draw(st.integers(0, prompt)) if group else 0
    output = draw(st.integers(1, min(24, max_tokens - prompt)))
    has_slo = is_online and draw(st.booleans())
    return Arrival(
        at=draw(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.1, 0.3])),
        request_class=RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
        prompt=prompt,
        output=output,
        tenant=draw(st.sampled_from("aaabc")),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        ttft=draw(st.sampled_from([0.01, 0.05, 0.2])) if has_slo else inf,
        tpot=draw(st.sampled_from([0.007, 0.02])) if has_slo else inf,
        slack=inf if is_online else draw(st.sampled_from([inf, 1.0, -1.0])),
        prefix_key=group,
        shared=shared,
        abort_after=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def configs(draw: st.DrawFn, *, least_max_share: float = 0.1) -> PolicyConfig:
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    num_blocks = draw(st.integers(2, 12)) * ceil(16 / block_tokens)
    tenants = {}
    if draw(st.booleans()):
        cap = draw(st.sampled_from([None, 1, 1, 2, 3]))
        tenants = {
            "a": TenantShare(
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
                max_slots=cap,
                reserved=draw(st.sampled_from([0.0, 0.0, 0.4])),
            ),
            "b": TenantShare(reserved=draw(st.sampled_from([0.0, 0.2, 0.6]))),
        }
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]))
    slots = draw(st.integers(1, 8))
    can_suspend = draw(st.sampled_from([True, True, False]))
    is_encoder = draw(st.sampled_from([False, False, False, True]))
    return PolicyConfig(
        slots=slots,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        chunk_tokens=draw(st.sampled_from([4, 16, 64])),
        offline_share=share,
        offline_max_share=draw(
            st.sampled_from([s for s in (1.0, 0.5, 0.3, 0.1, 0.0) if s >= max(share, least_max_share)])
        ),
        ttft=draw(st.sampled_from([inf, 0.05, 0.2, 1e-6])),
        tpot=inf if is_encoder else draw(st.sampled_from([inf, 0.02, 1e-6])),
        is_encoder=is_encoder,
        tenants=tenants,
        batch_window=draw(st.sampled_from([0.0, 0.0, 0.004, 0.02])),
        tail_tokens=draw(st.sampled_from([0, 8, 64])),
        watermark=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        can_suspend=can_suspend,
        most_residents=maxsize if can_suspend else draw(st.sampled_from([maxsize, slots, slots + 2])),
        max_interference=draw(st.sampled_from([None, None, 0.1, 1.0, 0.001, 0.0])),
        most_risk=draw(st.sampled_from([0.4, 0.4, 0.0, 1.0])),
        tpot_share=draw(st.sampled_from([1.0, 1.0, 0.3])),
    )


costs = st.sampled_from(
    [
        EXACT,
        UNTRUSTED,
        UNTRUSTED,
        CostModel(k0=0.0, k1=5e-5, k3=2e-4, is_trusted=True),
        CostModel(k0=0.01, k1=1e-4, is_trusted=True),
        CostModel(k0=0.005, k1=0.1, k3=0.3, is_trusted=True),
        CostModel(k0=1e-9, k2=1e-3, k4=1.0, is_trusted=True),
        CostModel(k0=0.002, k1=1e-5, k3=2e-5, k5=0.03, missed=0.97, is_trusted=True),
    ]
)
"""Without a fixed cost, with free decodes, with a single token that takes longer than any promise, and with experts."""

lengths = st.lists(st.integers(1, 24), min_size=1, max_size=4).map(lambda drawn: tuple(sorted(drawn)))
expectations = st.sampled_from([UNKNOWN, replace(UNKNOWN, unknown_share=UNKNOWN_SHARE)]) | st.builds(
    Expectation,
    outputs=st.dictionaries(st.sampled_from(RequestClass), lengths),
    unknown_share=st.sampled_from([UNKNOWN_SHARE, 1.0]),
    online_until=st.sampled_from([-inf, 0.2, inf]),
    online_spread=st.sampled_from([0.0, 100.0]),
    online_answer=st.sampled_from([0.0, 12.0]),
    online_short=st.sampled_from([0, 4]),
)
allowances = st.just(UNCHECKED) | st.builds(
    Allowance,
    share=st.sampled_from([None, 0.0, 0.1, 1.0]),
    typical=st.sampled_from([0.0, 0.008]),
    is_alone=st.sampled_from([False, False, True]),
    lending_ratio=st.sampled_from([0.1, 0.6, 1.0]),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    config = draw(configs())
    has_prefix = draw(st.booleans())
    arrival = arrivals(config.num_blocks * config.block_tokens, has_prefix=has_prefix)
    requests = draw(st.lists(arrival, min_size=6 if has_prefix else 1, max_size=14))
    if config.is_encoder:
        requests = [replace(arrival, output=1, tpot=inf) for arrival in requests]
    return Workload(config, tuple(requests), draw(expectations), draw(allowances))


class CountedKv:
    """Blocks that are free, for a host that is asked for nothing but a snapshot."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free

    def hint(self, request: Request) -> None:
        """Leave in the record what the test wrote there."""


def make_snapshot(host: Host, requests: Iterable[Request], *, now: float, free_blocks: int) -> EngineSnapshot:
    """Return what a host shows the planner. Requests wait, run or are parked as their phase says."""
    for request in requests:
        phase, request.phase = request.phase, WAITING
        host.enter(request, now)
        if phase is not WAITING:
            host.admit(request)
        if phase is PARKED:
            host.park(request)
    return host.snapshot(CountedKv(free_blocks), now)


@st.composite
def snapshots(draw: st.DrawFn) -> EngineSnapshot:
    """Any state an engine might be in, reached by the planner's own plans or not: many parked, odd sizes, no slack."""
    host = Host(draw(configs(least_max_share=0.0)), cost=draw(costs))
    requests, free_blocks = draw(states(host.config))
    for tenant in "abc":
        host.ledgers[OFFLINE].charge(tenant, draw(st.integers(0, 50)))
    snapshot = make_snapshot(host, requests, now=NOW, free_blocks=free_blocks)
    free_places = min(3, host.config.most_residents - len(snapshot.residents))
    num_leaving = draw(st.integers(0, free_places)) if free_places > 0 else 0
    learned = {"expectation": draw(expectations), "allowance": draw(allowances)}
    return replace(snapshot, num_leaving=num_leaving, **learned)


NOW = 10.0


@st.composite
def states(draw: st.DrawFn, config: PolicyConfig) -> tuple[list[Request], int]:
    """Requests that wait, run or are parked, and the blocks that they leave free."""
    size, left, slots = config.block_tokens, config.num_blocks, config.slots
    requests = []
    for seq in range(draw(st.integers(1, 10))):
        tokens = draw(st.integers(1, min(60, config.num_blocks * size - 2)))
        request_class = draw(st.sampled_from(RequestClass))
        request = Request(
            seq,
            request_class,
            arrival=draw(st.sampled_from([NOW - 0.1, NOW - 1])),
            num_prompt=tokens,
            max_output=20,
            tenant=draw(st.sampled_from("aaabc")),
            priority=draw(st.sampled_from([0, 0, 1, -1])),
            ttft=draw(st.sampled_from([inf, 0.2])) if request_class is ONLINE else inf,
            tpot=draw(st.sampled_from([inf, 0.02])) if request_class is ONLINE else inf,
            num_tokens=tokens,
        )
        computed = draw(st.integers(1, tokens))
        blocks = ceil(computed / size)
        if draw(st.booleans()) and blocks <= left:
            request.num_tokens += computed == tokens
            request.num_output += computed == tokens
            request.first_token = draw(st.sampled_from([NOW - 0.1, NOW - 0.01])) if computed == tokens else inf
            request.num_computed, request.num_blocks, request.num_private_blocks = computed, blocks, blocks
            request.phase = RUNNING if slots and draw(st.booleans()) else PARKED
            slots -= request.phase is RUNNING
            left -= blocks
        requests.append(request)
    return requests, left
