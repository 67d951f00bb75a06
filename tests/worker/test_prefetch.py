from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.jobs.choice import Candidate, share_out
from ballast_queue.claimable import Group
from ballast_worker.prefetch import LEAST_AHEAD, OfflineSlots, Prefetch, groups_to_read, num_to_claim


def make_slots(**changes) -> OfflineSlots:
    return OfflineSlots(**({"slots": 10, "maximum": 10, "reserved": 1, "online": 0, "offline": 0} | changes))


def make_candidate(job_id: str, **changes) -> Candidate:
    fields = {
        "job_id": job_id,
        "tenant": "a",
        "priority": 0,
        "slack": float("inf"),
        "prefix_key": None,
        "seq": 0.0,
        "waiting": 100,
    }
    return Candidate(**(fields | changes))


@pytest.mark.parametrize(
    ("slots", "usable"),
    [
        pytest.param(make_slots(), 10, id="an idle engine"),
        pytest.param(make_slots(online=4), 6, id="what online leaves"),
        pytest.param(make_slots(online=4, offline=6), 0, id="full"),
        pytest.param(make_slots(online=10), 1, id="the reservation, however heavy online is"),
        pytest.param(make_slots(online=30, offline=1), 0, id="the reservation in use"),
        pytest.param(make_slots(maximum=5, offline=3), 2, id="up to the cap"),
        pytest.param(make_slots(maximum=5, offline=5), 0, id="at the cap"),
        pytest.param(make_slots(maximum=0, reserved=0), 0, id="no offline at all"),
        pytest.param(make_slots(slots=4, offline=6), 0, id="above a ceiling that came down"),
    ],
)
def test_usable_slots(slots, usable) -> None:
    assert slots.usable() == usable


offline_slots = st.builds(
    OfflineSlots,
    slots=st.integers(1, 64),
    maximum=st.integers(0, 64),
    reserved=st.integers(0, 8),
    online=st.integers(0, 200),
    offline=st.integers(0, 64),
)


@given(slots=offline_slots, ahead=st.integers(0, 20), prefetched=st.integers(0, 200))
def test_with_what_is_claimed_a_worker_has_what_it_can_use_and_little_more(slots, ahead, prefetched) -> None:
    count = num_to_claim(slots, ahead, prefetched)

    assert count >= 0
    if slots.maximum == 0:
        assert count == 0
        return
    assert prefetched + count >= slots.usable(), "a free slot must be filled at the next step"
    if count:
        assert prefetched + count <= slots.usable() + ahead


def test_the_look_ahead_grows_with_the_rate_and_with_a_slow_redis() -> None:
    slow, quick, far = Prefetch(), Prefetch(rate=100, round_trip=0.002), Prefetch(rate=100, round_trip=0.1)

    assert slow.ahead() == LEAST_AHEAD
    assert slow.ahead() < quick.ahead() < far.ahead()
    assert far.ahead() >= 100 * 0.1 * 2


def test_the_rate_follows_what_starts() -> None:
    prefetch = Prefetch()
    for _ in range(100):
        prefetch.add_starts(5, 0.1)
    busy = prefetch.rate
    for _ in range(100):
        prefetch.add_starts(0, 0.1)

    assert busy == pytest.approx(50, rel=0.05)
    assert prefetch.rate < 5


def test_a_slow_round_trip_counts_at_once_and_is_forgotten_slowly() -> None:
    prefetch = Prefetch()
    prefetch.add_round_trip(0.5)
    assert prefetch.round_trip == 0.5
    prefetch.add_round_trip(0.001)

    assert 0.4 < prefetch.round_trip < 0.5


def test_enough_groups_are_read_and_no_more() -> None:
    groups = [Group(0, f"t{i:04}") for i in range(1000)]
    services = {group.tenant: float(i) for i, group in enumerate(reversed(groups))}
    found = groups_to_read(
        [Group(1, "above"), *groups], services, count=3, limits={"t0999": 0, "t0998": 5}, reserved={"t0001"}
    )

    assert found == [groups[1], Group(1, "above"), *(groups[i] for i in range(998, 998 - 5 - LEAST_AHEAD, -1))]


@given(
    waiting=st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 1), st.integers(1, 4)), max_size=40),
    services=st.lists(st.integers(0, 500), min_size=31, max_size=31),
    count=st.integers(1, 6),
    cost=st.integers(1, 100),
)
def test_what_is_read_is_enough_to_choose_as_from_all(waiting, services, count, cost) -> None:
    """Where no tenant stands in two bands: there an earlier pick may put another tenant before one that was read."""
    band = {tenant: priority for tenant, priority, _ in reversed(waiting)}
    candidates = [
        make_candidate(f"j{i:02}", tenant=f"t{tenant}", priority=band[tenant], waiting=n)
        for i, (tenant, _, n) in enumerate(waiting)
    ]
    served = {f"t{i}": float(service) for i, service in enumerate(services)}
    groups = sorted({Group(c.priority, c.tenant) for c in candidates}, key=lambda g: (-g.priority, g.tenant))

    read = set(groups_to_read(groups, served, count=count, limits={}, reserved=()))
    few = [c for c in candidates if Group(c.priority, c.tenant) in read]
    taken = share_out(few, served, {}, count=count, cost=cost)

    assert taken == share_out(candidates, served, {}, count=count, cost=cost)
