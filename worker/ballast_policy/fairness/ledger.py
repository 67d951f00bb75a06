"""Tenant fairness: weighted virtual token counters (VTC).

The service of a tenant is `(uncached input * 1 + output * 2) / weight`. The waiting tenant with the least goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

INPUT_COST, OUTPUT_COST = 1.0, 2.0
"""The weights of the VTC paper (arXiv 2401.00588). `benchmarks/fairness.py` prints how equal the services are."""


def token_cost(num_input: int, num_output: int) -> float:
    """Return the cost to a tenant: each uncached input token counts once, each output token twice."""
    return INPUT_COST * num_input + OUTPUT_COST * num_output


@dataclass(slots=True)
class Ledger:
    """Service of the tenants of one class, in tokens over weight.

    The host charges each token when it is computed for the first time. It lifts a tenant when a request arrives while
    no other of the tenant waits or runs.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """1 for other tenants. A change affects later charges."""
    services: dict[str, float] = field(default_factory=dict)
    reserved: dict[str, float] = field(default_factory=dict)
    """Shares of the slots of the class, for tenants with a reservation."""
    _last: float = 0.0

    def service(self, tenant: str) -> float:
        return self.services.get(tenant, 0.0)

    def reserve(self, reserved: Mapping[str, float]) -> None:
        """Use these shares of the slots from now on.

        Service by a reservation is no debt. If the share of a tenant shrinks, its service becomes at most that of the
        most served other tenant.
        """
        for tenant, share in self.reserved.items():
            if reserved.get(tenant, 0.0) < share and tenant in self.services:
                most = max((service for other, service in self.services.items() if other != tenant), default=0.0)
                self.services[tenant] = min(self.services[tenant], most)
        self.reserved = {tenant: share for tenant, share in reserved.items() if share > 0}

    def charge(self, tenant: str, cost: float) -> None:
        self._last = self.services[tenant] = self.service(tenant) + cost / self.weights.get(tenant, 1.0)

    def lift(self, tenant: str, active_tenants: Iterable[str]) -> None:
        """Raise a tenant that returns from idle to the least served active one, or else to the last one charged."""
        level = min((self.service(other) for other in active_tenants if other != tenant), default=self._last)
        if level > self.service(tenant):
            self.services[tenant] = level

    def forget_idle(self, active_tenants: Iterable[str], most: int = 1000) -> None:
        """Drop idle tenants that would be lifted when they return, and all but the `most` most served others."""
        active = set(active_tenants)
        idle = sorted((s for tenant, s in self.services.items() if tenant not in active), reverse=True)
        level = max(0.0, min((self.service(tenant) for tenant in active), default=self._last), *idle[most : most + 1])
        self.services = {tenant: s for tenant, s in self.services.items() if tenant in active or s > level}


EMPTY = Ledger()
"""Treats all tenants as equal. It is never charged."""
