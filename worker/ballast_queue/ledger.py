"""The ledger of offline tenants that all engines of a queue share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Self

from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

MOST_IDLE = 1000
"""Idle tenants whose service the ledger keeps."""


@dataclass(frozen=True, slots=True)
class Service:
    """The service that each tenant received so far, divided by its weight. A tenant without an entry has `level`."""

    level: float = 0.0
    """Service of the least served tenant with work: an absent tenant and a new name gain nothing."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """The same numbers as the server writes them. A changed text shows that a tenant was charged."""

    @classmethod
    def read(cls, pairs: Sequence[bytes]) -> Self:
        """Return the service in the hash of the ledger."""
        texts = {
            text_of(name): text_of(value)
            for name, value in zip(pairs[::2], pairs[1::2], strict=True)
            if _is_number(value)
        }
        level = float(texts.pop("", 0))
        return cls(level, {name: float(text) for name, text in texts.items()}, texts)

    def of(self, tenant: str) -> float:
        """Return the service of a tenant."""
        return self.tenants.get(tenant, self.level)

    def needless(self, working: Collection[str]) -> list[str]:
        """Return the tenants without work that the ledger can forget.

        These are all tenants that their return would raise to the level anyway. Of the others, the ledger keeps the
        1,000 most served, so that invented names do not fill the memory. A forgotten tenant loses its debt.
        """
        idle = sorted((name for name in self.tenants if name not in working), key=self.of, reverse=True)
        return [name for rank, name in enumerate(idle) if rank >= MOST_IDLE or self.of(name) <= self.level]


def _is_number(value: bytes) -> bool:
    try:
        return isfinite(float(value))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class SharedLedger:
    """The ledger of a queue.

    Service only grows until its tenant is forgotten.
    """

    _store: Store

    def charge(self, costs: Mapping[str, float]) -> Service:
        """Add the service, divided by weight, of offline tenants. A failed call may have counted."""
        return Service.read(self._store.call(self._store.functions.charge(list(costs.items()))))

    def lift(self, level: float, tenants: Sequence[str]) -> Service:
        """Raise the level, and raise the tenants that return from idle to it. Neither ever falls."""
        return Service.read(self._store.call(self._store.functions.lift(level, tenants)))

    def forget(self, service: Service, tenants: Sequence[str]) -> Service:
        """Remove tenants that were not charged since `service` was read."""
        known = [(tenant, service.texts[tenant]) for tenant in tenants]
        return Service.read(self._store.call(self._store.functions.forget_service(known)))
