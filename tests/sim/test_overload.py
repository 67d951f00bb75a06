"""Promises under load: the reservation, tenants by weight, and the part of a run that counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.snapshot import TenantShare
from ballast_sim.replay.fairness import most_ahead
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import simulate, warmup_of
from ballast_sim.replay.traffic import Arrival

CROWD = [Arrival(0.004 * i, 40 + 37 * i % 200, 10 + 7 * i % 40) for i in range(3750)]
"""About ten times what the engine can serve in 15 s."""
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(120)]


@pytest.mark.parametrize(
    ("pool", "least", "most"),
    [
        pytest.param(POOL, 0.0, 0.005, id="that is met, but for a step after some answers"),
        pytest.param([Arrival(0.0, 38_000, 1)], 0.5, 1.0, id="whose KV holds no such prompt"),
    ],
)
def test_ten_times_too_much_online_leaves_offline_a_reservation(make_scenario, pool, least, most):
    config = {"slots": 64, "num_blocks": 2400, "offline_share": 0.1}
    scenario = make_scenario(online=CROWD, config=config, seconds=15.0, warmup_seconds=3.75)

    found = report(simulate(replace(scenario, offline=lambda: [SimulatedJob.endless("job", pool)])))

    assert least <= found.reservation_shortfall <= most
    assert (found.offline.total > 0) is (pool is POOL)


def test_tenants_share_as_their_weights_say(make_scenario):
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    tenants = {name: TenantShare(weight=weight) for name, weight in weights.items()}
    scenario = make_scenario(config={"slots": 32, "num_blocks": 1200, "tenants": tenants}, seconds=15.0)

    run = simulate(
        replace(scenario, offline=lambda: [SimulatedJob.endless(name, POOL, tenant=name) for name in weights])
    )

    samples = run.service.after(3.75)
    served = {name: weight * (samples[-1][name] - samples[0][name]) for name, weight in weights.items()}
    total = sum(served.values())
    assert {name: service / total for name, service in served.items()} == pytest.approx(
        {name: weight / 7 for name, weight in weights.items()}, rel=0.02
    )
    assert 0 < report(run).service_gap <= 2 * most_ahead(32, 359, 53)


@pytest.mark.parametrize(("seconds", "expected"), [(120.0, 30.0), (300.0, 60.0), (6000.0, 60.0)])
def test_a_quarter_of_a_run_at_most_a_minute_does_not_count(seconds, expected):
    assert warmup_of(seconds) == expected
