"""The one order in which work goes, for requests in an engine and jobs in the queue alike.

class > priority > tenant (least service first) > order (laxity, then prefix group, then submission).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ballast_policy.fairness import Ledger


class Ordered(Protocol):
    """What the order reads of a request or of a job."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def laxity(self) -> float: ...
    @property
    def prefix_group(self) -> int: ...
    @property
    def seq(self) -> float: ...


Place = tuple[float, int, float]
Rank = tuple[int, float, float, int, float]


def place(item: Ordered) -> Place:
    """Give its place among the work of one tenant and priority; smaller goes first."""
    return (item.laxity, item.prefix_group, item.seq)


def ranking(ledger: Ledger) -> Callable[[Ordered], Rank]:
    """Give the function that says an item's place among the work of one class; smaller goes first."""
    service = ledger.services.get
    return lambda item: (-item.priority, service(item.tenant, 0.0), item.laxity, item.prefix_group, item.seq)
