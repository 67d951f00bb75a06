"""Tenant fairness: weighted virtual token counters (VTC).

A tenant's service is what it was given over its weight: `(uncached input * 1 + output * 2) / weight`. The waiting
tenant with the least service goes first. A tenant that was away is lifted to those that were not, so that absence
earns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

INPUT_COST = 1.0
OUTPUT_COST = 2.0


def token_cost(num_input: int, num_output: int) -> float:
    """Give what tokens cost a tenant: input that the prefix cache did not give once, output twice."""
    return INPUT_COST * num_input + OUTPUT_COST * num_output


def most_ahead(slots: int, max_input: int, max_output: int, weight: float = 1.0) -> float:
    """Give the most by which a tenant's service exceeds that of another which waits.

    `(2 * max_input * 1 + slots * max_output * 2) / weight`, by the longest prompt and answer and the lesser weight of
    both; for requests of one priority that fit the KV, without caps and reservations of tenants.

    When the tenant last got a slot it was the least served of those that wait, what was admitted before it in that step
    counted in. Of that at most one prompt is not computed in the step, the one that the reservation of offline began.
    Since then it was charged for what its slots hold: one more prompt that is not computed (a step admits nobody behind
    an unfinished one), and an answer for each slot. So the service of two tenants that both wait differs by no more
    than this at any time, and grows apart by no more than twice of it over any span. Who was away is lifted to the
    least served, and so keeps the bound.
    """
    return (2 * INPUT_COST * max_input + OUTPUT_COST * slots * max_output) / weight


class Ledger:
    """Service of the tenants of one class, in tokens over weight.

    The engine charges each token when it is computed for the first time (what a preemption computes again is nobody's
    bill) and lifts a tenant whenever its first request comes in after none waited or ran.
    """

    __slots__ = ("_last", "_service", "_weights", "reserved")

    def __init__(self, weights: Mapping[str, float] | None = None, reserved: Mapping[str, float] | None = None) -> None:
        self.reserved: dict[str, float] = {}
        """Shares of the slots of the class, for tenants with a reservation."""
        self._weights = dict(weights or {})
        self._service: dict[str, float] = {}
        self._last = 0.0
        self.reserve(reserved or {})

    def service(self, tenant: str) -> float:
        """Give what the tenant received so far, over its weight."""
        return self._service.get(tenant, 0.0)

    @property
    def services(self) -> Mapping[str, float]:
        """Service by tenant, of those that were charged or lifted."""
        return self._service

    def weight(self, tenant: str) -> float:
        """Give the tenant's weight, 1 unless it was declared."""
        return self._weights.get(tenant, 1.0)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Use these weights from now on; what was charged stays as it was charged."""
        self._weights = dict(weights)

    def reserve(self, reserved: Mapping[str, float]) -> None:
        """Go by these shares of the slots from now on.

        Who reserves less than before starts level with the most served of the others: what it got by its reservation
        is no debt to them.
        """
        for tenant, share in self.reserved.items():
            if reserved.get(tenant, 0.0) < share and tenant in self._service:
                most = max((service for other, service in self._service.items() if other != tenant), default=0.0)
                self._service[tenant] = min(self._service[tenant], most)
        self.reserved = {tenant: share for tenant, share in reserved.items() if share > 0}

    def charge(self, tenant: str, cost: float) -> None:
        """Add a cost (`token_cost`) to the tenant's service."""
        weighted = cost / self._weights.get(tenant, 1.0)
        self._last = self._service[tenant] = self._service.get(tenant, 0.0) + weighted

    def lift(self, tenant: str, active_tenants: Iterable[str]) -> None:
        """Raise a tenant that returns from idle to the least served of the tenants that wait or run.

        With nobody active it is raised to the one charged last: neither has a claim from before.
        """
        level = min((self.service(other) for other in active_tenants if other != tenant), default=self._last)
        if level > self.service(tenant):
            self._service[tenant] = level

    def forget_idle(self, active_tenants: Iterable[str]) -> None:
        """Drop idle tenants whose return would lift them anyway, so that names do not pile up."""
        active = set(active_tenants)
        level = min((self.service(tenant) for tenant in active), default=self._last)
        self._service = {tenant: s for tenant, s in self._service.items() if tenant in active or s > level}

    def absorb(self, services: Mapping[str, float]) -> None:
        """Take the totals of a ledger that several engines share as the truth for the tenants that it names."""
        self._service.update(services)


EMPTY = Ledger()
"""Nobody was served anything: all tenants are equal. Never charged."""
