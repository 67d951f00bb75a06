"""What is reserved for offline, and when offline has it."""

from __future__ import annotations

from math import ceil, floor

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from laws import lawful, the_reservation_is_what_residents_and_backlog_say
from workloads import EXACT, Arrival, CountedKv, make_snapshot

from ballast_policy.host import Host
from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, WAITING, Phase, Request, RequestClass
from ballast_policy.reservation import Reservation, most_slots
from ballast_policy.snapshot import PolicyConfig, TenantShare


def reserve(share: float, slots: int = 16, max_share: float = 1.0, ceiling: int | None = None, **sizes) -> Reservation:
    sizes = {"num_blocks": 1000, "chunk_tokens": 512, **sizes}
    config = PolicyConfig(slots, offline_share=share, offline_max_share=max_share, **sizes)
    return config.reservation(ceiling)


@pytest.mark.parametrize(
    ("share", "slots", "ceiling", "expected"),
    [
        pytest.param(0.1, 16, 16, 2, id="a fraction of a slot is a slot"),
        pytest.param(0.1, 30, 30, 3, id="a product that floats just above a whole number is that number"),
        pytest.param(0.0, 16, 16, 0, id="no share reserves nothing"),
        pytest.param(1.0, 16, 16, 15, id="one slot stays for online"),
        pytest.param(0.1, 256, 64, 7, id="the share is of what the SLO allows"),
        pytest.param(0.1, 256, None, 26, id="while that is not known, of all slots"),
        pytest.param(0.5, 1, 1, 0, id="a single slot cannot be shared"),
        pytest.param(0.01, 2, 2, 1, id="the smallest share is one slot"),
    ],
)
def test_a_share_of_the_slots_is_reserved(share: float, slots: int, ceiling: int | None, expected: int):
    assert expected == reserve(share, slots, ceiling=ceiling).slots


@pytest.mark.parametrize(
    ("share", "num_blocks", "expected"),
    [(0.1, 1000, 100), (0.1, 1001, 101), (0.0, 1000, 0), (1.0, 1000, 999), (0.5, 1, 0), (0.3, 10, 3)],
)
def test_the_same_share_of_the_kv_is_reserved(share: float, num_blocks: int, expected: int):
    assert expected == reserve(share, num_blocks=num_blocks).blocks


@pytest.mark.parametrize(
    ("share", "chunk", "expected"), [(0.1, 512, 52), (0.0, 512, 0), (1.0, 512, 448), (0.9, 4, 3), (0.1, 1, 1)]
)
def test_the_same_share_of_the_chunk_is_reserved_and_an_eighth_stays_for_online(
    share: float, chunk: int, expected: int
):
    assert expected == reserve(share, chunk_tokens=chunk).chunk


@pytest.mark.parametrize(("share", "slots", "expected"), [(1.0, 16, 16), (0.5, 5, 2), (0.1, 4, 1), (0.0, 16, 0)])
def test_a_class_may_hold_a_share_of_the_slots_and_one_at_least(share: float, slots: int, expected: int):
    assert expected == most_slots(share, slots)


shares = st.floats(0, 1) | st.integers(0, 100).map(lambda percent: percent / 100)


@given(shares, shares, st.integers(1, 300), st.none() | st.integers(1, 300))
def test_online_keeps_a_slot_and_the_maximum_wins(share: float, max_share: float, slots: int, ceiling: int | None):
    found = reserve(share, slots, max_share, ceiling)

    wanted = ceil(share * min(slots, ceiling or slots) - 1e-9)
    most = max(1, floor(max_share * slots + 1e-9)) if max_share else 0
    assert found.slots == max(0, min(wanted, slots - 1, most))
    assert found.slots <= reserve(share, slots, max_share).slots, "a ceiling shrinks it"


def make_host(requests: dict[tuple[RequestClass, Phase], int], tenant: str = "default", **config) -> Host:
    """Return a host whose last plan left so many requests of each class and phase."""
    usual = {"slots": 64, "num_blocks": 5000, "offline_share": 0.1, "offline_max_share": 1.0}
    host = Host(PolicyConfig(**{**usual, **config}), cost=EXACT)
    kv = CountedKv(5000)
    phases = [key for key, number in requests.items() for _ in range(number)]
    entered = [Request(seq, c, 0.0, 8, 8, tenant=tenant, num_tokens=8) for seq, (c, _) in enumerate(phases)]
    for request, (_, phase) in zip(entered, phases, strict=True):
        host.enter(request, 0.0)
        if phase is not WAITING:
            host.admit(request)
        if phase is PARKED:
            host.park(request)
    host.dispatch(host.snapshot(kv, 0.0), StepPlan(), kv)
    return host


BUSY = {(ONLINE, RUNNING): 16}


@pytest.mark.parametrize(
    ("requests", "config", "in_use", "is_met"),
    [
        pytest.param(
            {**BUSY, (OFFLINE, PARKED): 2, (OFFLINE, WAITING): 1000},
            {"slots": 16},
            0,
            False,
            id="parked requests hold no slot",
        ),
        pytest.param(
            {(OFFLINE, RUNNING): 1, (OFFLINE, PARKED): 1}, {"slots": 16}, 1, False, id="a parked request is work"
        ),
        pytest.param({(OFFLINE, RUNNING): 6}, {"offline_max_share": 0.1}, 6, True, id="the maximum is reached"),
        pytest.param(
            {(OFFLINE, RUNNING): 6, (OFFLINE, WAITING): 9},
            {"offline_max_share": 0.1},
            6,
            True,
            id="the maximum is reached while work waits",
        ),
        pytest.param(
            {(OFFLINE, RUNNING): 5, (OFFLINE, WAITING): 9},
            {"offline_max_share": 0.1},
            5,
            False,
            id="one less than the maximum",
        ),
        pytest.param({(OFFLINE, RUNNING): 6, (OFFLINE, WAITING): 1}, {}, 6, False, id="one slot short"),
        pytest.param({(OFFLINE, RUNNING): 9, (OFFLINE, WAITING): 9}, {}, 7, True, id="what is lent does not count"),
        pytest.param({(OFFLINE, RUNNING): 2}, {}, 2, True, id="no more work than runs"),
        pytest.param(BUSY, {"slots": 16}, 0, True, id="nothing of offline waits"),
        pytest.param({}, {}, 0, True, id="an idle engine"),
        pytest.param({**BUSY, (OFFLINE, WAITING): 9}, {"offline_share": 0.0}, 0, True, id="nothing is reserved"),
        pytest.param(
            {**BUSY, (OFFLINE, RUNNING): 3, (OFFLINE, WAITING): 9},
            {"tenants": {"capped": TenantShare(max_slots=3)}, "tenant": "capped"},
            3,
            True,
            id="the only tenant is at its cap, below the reservation",
        ),
        pytest.param(
            {**BUSY, (OFFLINE, RUNNING): 2, (OFFLINE, WAITING): 9},
            {"tenants": {"capped": TenantShare(max_slots=3)}, "tenant": "capped"},
            2,
            False,
            id="the only tenant is below its cap",
        ),
        pytest.param(
            {**BUSY, (OFFLINE, RUNNING): 3, (OFFLINE, WAITING): 9},
            {"tenants": {"capped": TenantShare(max_slots=3)}},
            3,
            False,
            id="the cap is another tenant's",
        ),
    ],
)
def test_the_reservation_is_met_while_as_many_run_as_it_covers_and_caps_allow(requests, config, in_use, is_met):
    reservation = make_host(requests, **config).reservation

    assert (reservation.in_use, reservation.is_met) == (in_use, is_met)


@pytest.mark.parametrize("is_encoder", [False, True])
@pytest.mark.parametrize("has_online", [False, True])
def test_long_prompts_that_take_the_reserved_tokens_meet_the_reservation_in_fewer_slots(has_online, is_encoder):
    """Their answers are short, so that few of them decode while the next ones compute their prompts."""
    config = PolicyConfig(16, 2000, 4, chunk_tokens=64, offline_share=0.25, is_encoder=is_encoder, ttft=1.0)
    output = 1 if is_encoder else 2
    flood = [Arrival(0.0, OFFLINE, 60 if is_encoder else 200, output)] * 60
    flood += [Arrival(0.0, ONLINE, 30, output)] * 500 * has_online
    engine = FakeEngine(Host(config, cost=EXACT, planner=lawful), flood)
    in_use = set()
    for _ in range(40):
        dispatch = engine.begin()
        the_reservation_is_what_residents_and_backlog_say(engine.host, dispatch)
        assert engine.host.reservation.is_met
        in_use.add(engine.host.reservation.in_use)
        engine.compute(dispatch)

    assert min(in_use) < engine.host.reservation.slots == 4


@pytest.mark.parametrize("is_encoder", [False, True])
def test_online_requests_get_their_tokens_if_everything_is_reserved(is_encoder):
    config = PolicyConfig(16, 2000, 4, chunk_tokens=64, offline_share=1.0, is_encoder=is_encoder)
    flood = [Arrival(0.0, OFFLINE, 60, 1)] * 100 + [Arrival(0.01, ONLINE, 8, 1)] * 8
    engine = FakeEngine(Host(config, cost=EXACT, planner=lawful), flood)
    engine.run()

    ends = {c: [end for arrival, end in engine.ended.values() if arrival.request_class is c] for c in (ONLINE, OFFLINE)}
    assert max(ends[ONLINE]) < max(ends[OFFLINE]) / 4


def test_caps_are_counted_tenant_by_tenant():
    caps = {"tenants": {"capped": TenantShare(max_slots=3)}}
    host = make_host({**BUSY, (OFFLINE, RUNNING): 3, (OFFLINE, WAITING): 9}, "capped", **caps)
    host.enter(Request(999, OFFLINE, 0.0, 8, 8, tenant="free", num_tokens=8), 0.0)

    host.dispatched(StepPlan(), (), 0.0)

    assert not host.reservation.is_met, "a fourth could run"


def test_an_engine_that_falls_idle_owes_nothing():
    host = make_host({(OFFLINE, WAITING): 2, (ONLINE, WAITING): 1})
    assert not host.reservation.is_met
    for request in list(host.backlog):
        host.leave(request, 1.0, is_complete=False)
    host.enter(ended := Request(9, OFFLINE, 0.0, 8, 8, num_tokens=8), 1.0)
    host.admit(ended)
    host.dispatched(StepPlan(), (), 0.0)
    assert host.reservation.in_use == 1
    host.leave(ended, 2.0, is_complete=True)

    assert host.reservation == host.config.reservation(host.ceiling)


def test_the_reserved_slot_of_a_request_that_lost_its_kv_passes_to_a_decode_and_not_to_a_prompt():
    """The prompt gets no tokens beside three online prompts. If it kept the slot, the slot would be empty."""
    config = PolicyConfig(3, 40, block_tokens=4, chunk_tokens=16, offline_share=0.1, tail_tokens=0, watermark=0.0)
    sizes = [(24, 23), (80, 40), (92, 91)]
    holds = {"phase": RUNNING, "max_output": 20}
    offline = [
        Request(
            seq, OFFLINE, 9.9, tokens, num_tokens=tokens, num_computed=computed, num_blocks=ceil(computed / 4),
            num_private_blocks=ceil(computed / 4), **holds,
        )
        for seq, (tokens, computed) in enumerate(sizes)
    ]  # fmt: skip
    online = [Request(3 + index, ONLINE, 9.9, size, 20, num_tokens=size) for index, size in enumerate((12, 4, 4))]
    snapshot = make_snapshot(Host(config, cost=EXACT), [*offline, *online], now=10.0, free_blocks=1)

    found = lawful(snapshot)

    assert list(found.preempt) == offline[:1]
    assert list(found.park) == offline[1:2]
    assert dict(found.grants) == {offline[2]: 1, online[0]: 12, online[1]: 4}
