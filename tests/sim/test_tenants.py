"""Tenants of the arena trace on one engine that cannot do all their work: shares as weights and reservations say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast_policy.snapshot import TenantShare
from ballast_sim.replay.fairness import jain
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.simulation import simulate
from ballast_sim.replay.traffic import Arrival, read

TRACE = Path(__file__).parents[2] / "worker" / "ballast_cli" / "demo" / "traces" / "vtc_arena.csv"
WARMUP = 10.0


@pytest.fixture
def serve(make_scenario):
    """Give the service over weight that each tenant got, all of them waiting all the time."""

    def serve(num_tenants: int, shares: dict[int, TenantShare], seconds: float) -> dict[int, float]:
        lengths: dict[str, list[Arrival]] = {}
        for arrival in read(TRACE):
            lengths.setdefault(arrival.tenant, []).append(arrival)
        names = sorted(lengths, key=lambda name: (-len(lengths[name]), name))[:num_tenants]
        config = {"slots": 12, "num_blocks": 2000, "tenants": {names[i]: share for i, share in shares.items()}}
        scenario = make_scenario(config=config, seconds=seconds, online=[Arrival(0.0, 10, 2)])
        jobs = [SimulatedJob.endless(name, lengths[name], tenant=name) for name in names]
        samples = simulate(replace(scenario, offline=lambda: jobs)).service.after(WARMUP)
        always = set(samples[0]).intersection(*samples)
        assert always == set(names), "somebody ran out of work"
        assert num_tenants < 3 or shares or jain(samples) >= 0.98
        return {i: samples[-1][name] - samples[0][name] for i, name in enumerate(names)}

    return serve


def test_tenants_of_equal_weight_get_equal_service(serve):
    service = serve(12, {}, 50.0)

    assert max(service.values()) < 1.25 * min(service.values())


def test_shares_follow_unequal_weights(serve):
    weights = {0: 1.0, 1: 2.0, 2: 4.0}
    service = serve(3, {i: TenantShare(weight=weight) for i, weight in weights.items()}, 100.0)

    tokens = {i: service[i] * weights[i] for i in weights}
    for i, weight in weights.items():
        assert tokens[i] / sum(tokens.values()) == pytest.approx(weight / 7, rel=0.02)


def test_a_reservation_gives_its_share_beside_many_others(serve):
    service = serve(10, {0: TenantShare(reserved=0.4)}, 50.0)

    assert service[0] / sum(service.values()) == pytest.approx(0.4, abs=0.06)
