"""A ledger keeps a limited number of idle tenants, whatever names submitters invent."""

from __future__ import annotations

from ballast_policy.fairness.ledger import Ledger


def test_beside_a_tenant_that_gets_little_the_most_served_idle_tenants_are_kept():
    ledger = Ledger()
    ledger.charge("little", 1)
    for number in range(30):
        ledger.charge(f"user-{number}", 10 + number)

    ledger.forget_idle(["little"], 10)

    assert ledger.services == {"little": 1, **{f"user-{number}": 10 + number for number in range(20, 30)}}


def test_active_tenants_are_kept_beyond_the_limit():
    ledger = Ledger()
    active = [f"user-{number}" for number in range(30)]
    for tenant in (*active, "idle"):
        ledger.charge(tenant, 1)
    ledger.charge("idle", 1)

    ledger.forget_idle(active, 1)

    assert ledger.services == {**dict.fromkeys(active, 1), "idle": 2}


def test_equally_served_idle_tenants_do_not_exceed_the_limit():
    ledger = Ledger()
    for number in range(30):
        ledger.charge(f"user-{number}", 7)

    ledger.forget_idle([], 10)

    assert len(ledger.services) <= 10
