"""Random workloads for the planner: small engines under every kind of pressure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from hypothesis import strategies as st
from replay import EXACT, Arrival

from ballast_policy.admission import UNKNOWN, Expectation
from ballast_policy.backlog import Backlog
from ballast_policy.fairness import Ledger
from ballast_policy.interference import UNCHECKED, Allowance
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, Snapshot, TenantShare, take_snapshot


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


@st.composite
def arrivals(draw: st.DrawFn, max_tokens: int) -> Arrival:
    is_online = draw(st.booleans())
    prompt = draw(st.integers(1, min(60, max_tokens - 1)))
    output = draw(st.integers(1, min(24, max_tokens - prompt)))
    has_slo = is_online and draw(st.booleans())
    group = draw(st.integers(0, 2))
    return Arrival(
        at=draw(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.1, 0.3])),
        request_class=RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
        prompt=prompt,
        output=output,
        tenant=draw(st.sampled_from("abc")),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        ttft=draw(st.sampled_from([0.01, 0.05, 0.2])) if has_slo else inf,
        tpot=draw(st.sampled_from([0.007, 0.02])) if has_slo else inf,
        laxity=inf if is_online else draw(st.sampled_from([inf, 1.0, -1.0])),
        prefix_group=group,
        shared=draw(st.integers(0, prompt)) if group else 0,
        abort_after=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def configs(draw: st.DrawFn) -> PolicyConfig:
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    num_blocks = draw(st.integers(2, 12)) * ceil(16 / block_tokens)
    tenants = {}
    if draw(st.booleans()):
        cap = draw(st.none() | st.integers(1, 3))
        tenants = {
            "a": TenantShare(
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
                max_slots=cap,
                reserved=draw(st.sampled_from([0.0, 0.0, 0.4])),
            ),
            "b": TenantShare(reserved=draw(st.sampled_from([0.0, 0.2, 0.6]))),
        }
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]))
    return PolicyConfig(
        slots=draw(st.integers(1, 8)),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        chunk_tokens=draw(st.sampled_from([4, 16, 64])),
        offline_share=share,
        offline_max_share=draw(st.sampled_from([s for s in (0.3, 0.5, 1.0) if s >= share])),
        ttft=draw(st.sampled_from([inf, 0.05, 0.2])),
        tpot=draw(st.sampled_from([inf, 0.02])),
        tenants=tenants,
        batch_window=draw(st.sampled_from([0.0, 0.0, 0.004, 0.02])),
        tail_tokens=draw(st.sampled_from([0, 8, 64])),
        guard_share=draw(st.sampled_from([0.0, 0.05, 0.2])),
        max_interference=draw(st.sampled_from([None, None, 0.1, 1.0])),
    )


lengths = st.lists(st.integers(1, 24), min_size=1, max_size=4).map(lambda drawn: tuple(sorted(drawn)))
expectations = st.just(UNKNOWN) | st.builds(
    Expectation,
    outputs=st.dictionaries(st.sampled_from(RequestClass), lengths),
    guard_share=st.sampled_from([None, 0.05, 0.3]),
    online_rate=st.sampled_from([0.0, 5.0]),
    online_answer=st.sampled_from([0.0, 12.0]),
    online_short=st.sampled_from([0, 4]),
)
allowances = st.just(UNCHECKED) | st.builds(
    Allowance,
    share=st.sampled_from([None, 0.0, 0.1, 1.0]),
    crowding=st.sampled_from([0.0, 0.5, 2.0]),
    typical=st.sampled_from([0.0, 0.008]),
    harvest=st.sampled_from([0.1, 0.6, 1.0]),
    is_patient=st.booleans(),
    leeway=st.sampled_from([0.0, 0.2, 1.0]),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    config = draw(configs())
    requests = draw(st.lists(arrivals(config.num_blocks * config.block_tokens), min_size=1, max_size=14))
    return Workload(config, tuple(requests), draw(expectations), draw(allowances))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any state an engine might be in, reached by the planner's own plans or not: many parked, odd sizes, no slack."""
    config = draw(configs())
    size = config.block_tokens
    residents: list[Request] = []
    waiting: list[Request] = []
    left, slots = config.num_blocks, config.slots
    for seq in range(draw(st.integers(1, 10))):
        tokens = draw(st.integers(1, min(60, config.num_blocks * size - 2)))
        is_online = draw(st.booleans())
        request = Request(
            seq,
            RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
            arrival=draw(st.sampled_from([9.9, 9.0])),
            num_prompt=tokens,
            max_output=20,
            tenant=draw(st.sampled_from("abc")),
            priority=draw(st.sampled_from([0, 0, 1, -1])),
            ttft=draw(st.sampled_from([inf, 0.2])) if is_online else inf,
            tpot=draw(st.sampled_from([inf, 0.02])) if is_online else inf,
            num_tokens=tokens,
        )
        computed = draw(st.integers(1, tokens))
        blocks = ceil(computed / size)
        if draw(st.booleans()) and blocks <= left:
            request.num_tokens += computed == tokens
            request.num_output += computed == tokens
            request.first_token = draw(st.sampled_from([9.9, 9.99])) if computed == tokens else inf
            request.num_computed, request.num_blocks, request.num_private_blocks = computed, blocks, blocks
            request.phase = Phase.RUNNING if slots and draw(st.booleans()) else Phase.PARKED
            slots -= request.phase is Phase.RUNNING
            left -= blocks
            residents.append(request)
        else:
            waiting.append(request)
    reserved = {name: share.reserved for name, share in config.tenants.items()}
    ledgers = {request_class: Ledger(reserved=reserved) for request_class in RequestClass}
    for tenant in "abc":
        ledgers[RequestClass.OFFLINE].charge(tenant, draw(st.integers(0, 50)))
    backlog = Backlog()
    for request in waiting:
        backlog.add(request)
    return take_snapshot(
        now=10.0,
        residents=residents,
        backlog=backlog,
        free_blocks=left,
        config=config,
        cost=EXACT,
        ledgers=ledgers,
        expectation=draw(expectations),
        allowance=draw(allowances),
    )
