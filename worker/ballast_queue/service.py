"""The ledger of offline tenants that all engines of a queue share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ballast_queue.store import Store

MOST_IDLE = 1000
"""Idle tenants whose service is remembered."""


@dataclass(frozen=True, slots=True)
class Service:
    """What tenants were served so far, over their weights. Who is not named stands at `level`."""

    level: float = 0.0
    """Of the least served of those that had work: absence and a new name earn nothing."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """The same as the server writes it, which tells whether somebody was charged since."""

    @classmethod
    def read(cls, pairs: Sequence[bytes]) -> Self:
        """Read the hash."""
        texts = {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        level = float(texts.pop("", 0))
        return cls(level, {name: float(text) for name, text in texts.items()}, texts)

    def of(self, tenant: str) -> float:
        """Give what a tenant was served."""
        return self.tenants.get(tenant, self.level)

    def needless(self, working: set[str]) -> list[str]:
        """Give the tenants without work that can be forgotten.

        Those are all that their return would lift anyway. Of the others the most served 1,000 are kept, so that
        invented names fill no memory; each that goes gains what it had beyond the level.
        """
        idle = sorted((name for name in self.tenants if name not in working), key=self.of, reverse=True)
        return [name for rank, name in enumerate(idle) if rank >= MOST_IDLE or self.of(name) <= self.level]


class Charging(Store):
    """The side of workers that keeps the ledger."""

    def charge(self, costs: Mapping[str, float]) -> Service:
        """Add what offline tenants were served, over their weights. A call that failed may have counted."""
        return Service.read(self._run(self._functions.charge(list(costs.items()))))

    def lift(self, level: float, tenants: Sequence[str]) -> Service:
        """Raise the level, and to it the tenants that return from idle; neither is ever lowered."""
        return Service.read(self._run(self._functions.lift(level, tenants)))

    def forget_service(self, service: Service, tenants: Sequence[str]) -> Service:
        """Drop tenants that have not been charged since `service` was read."""
        known = [(tenant, service.texts[tenant]) for tenant in tenants]
        return Service.read(self._run(self._functions.forget_service(known)))

    def service(self) -> Service:
        """Give the ledger of offline tenants."""
        return self.charge({})
