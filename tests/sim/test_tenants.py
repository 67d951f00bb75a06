"""Tenants of the arena trace on one engine that cannot do all their work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast_policy.snapshot import TenantShare
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.simulation import simulate
from ballast_sim.replay.traffic import Arrival, read

TRACE = Path(__file__).parents[2] / "worker" / "ballast_cli" / "demo" / "traces" / "vtc_arena.csv"
NUM_TENANTS = 10


def test_a_reservation_gives_its_share_beside_many_others(make_scenario):
    lengths: dict[str, list[Arrival]] = {}
    for arrival in read(TRACE):
        lengths.setdefault(arrival.tenant, []).append(arrival)
    names = sorted(lengths, key=lambda name: (-len(lengths[name]), name))[:NUM_TENANTS]
    config = {"slots": 12, "num_blocks": 2000, "tenants": {names[0]: TenantShare(reserved=0.4)}}
    scenario = make_scenario(config=config, seconds=50.0, online=[Arrival(0.0, 10, 2)])
    jobs = [SimulatedJob.endless(name, lengths[name], tenant=name) for name in names]

    samples = simulate(replace(scenario, offline=lambda: jobs)).service.after(10.0)
    service = {name: samples[-1][name] - samples[0][name] for name in names}

    assert set(samples[0]).intersection(*samples) == set(names), "a tenant has no work left"
    assert service[names[0]] / sum(service.values()) == pytest.approx(0.4, abs=0.06)
