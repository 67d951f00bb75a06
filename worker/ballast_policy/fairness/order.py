"""The one order in which work goes, for requests in an engine and jobs in the queue alike.

class > priority > tenant (least service first) > order (slack, then the submission of its prefix group, then its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol, TypeVar

from ballast_policy.fairness.ledger import Ledger


class Ordered(Protocol):
    """What the order reads of a request or of a job."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def slack(self) -> float: ...
    @property
    def prefix_seq(self) -> int: ...
    @property
    def seq(self) -> float: ...


OrderedT = TypeVar("OrderedT", bound=Ordered)
Place = tuple[float, int, float]
Turn = tuple[int, float]
Rank = tuple[int, float, float, int, float]


def place(item: Ordered) -> Place:
    """Give its place among the work of one tenant and priority; smaller goes first."""
    return (item.slack, item.prefix_seq, item.seq)


def turning(ledger: Ledger) -> Callable[[Ordered], Turn]:
    """Give the function that says when the turn of an item's tenant comes: how its rank begins."""
    service = ledger.services.get
    return lambda item: (-item.priority, service(item.tenant, 0.0))


def ranking(ledger: Ledger) -> Callable[[Ordered], Rank]:
    """Give the function that says an item's place among the work of one class; smaller goes first."""
    service = ledger.services.get
    return lambda item: (-item.priority, service(item.tenant, 0.0), item.slack, item.prefix_seq, item.seq)


_PRIORITY, _SLACK, _PREFIX_SEQ, _SEQ = map(attrgetter, ("priority", "slack", "prefix_seq", "seq"))


def ranked(items: Iterable[OrderedT], ledger: Ledger) -> list[OrderedT]:
    """Give `sorted(items, key=ranking(ledger))` in half the time: sorted part by part, the last first."""
    ordered = sorted(items, key=_SEQ)
    if len(ordered) > 1:
        service = ledger.services.get
        ordered.sort(key=_PREFIX_SEQ)
        ordered.sort(key=_SLACK)
        ordered.sort(key=lambda item: service(item.tenant, 0.0))
        ordered.sort(key=_PRIORITY, reverse=True)  # keeps the order of equals, reversed or not
    return ordered
