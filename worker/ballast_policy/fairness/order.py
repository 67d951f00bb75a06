"""The order of work, for requests in an engine and for jobs in the queue.

class > priority > tenant (least service first) > order (slack, prefix key, submission).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.request import Request


class Ordered(Protocol):
    """A request or a job, as far as its place depends on it."""

    @property
    def slack(self) -> float: ...
    @property
    def prefix_seq(self) -> int: ...
    @property
    def seq(self) -> float: ...


Place = tuple[float, int, float]


def place(item: Ordered) -> Place:
    """Return the sort key of an item among those of its tenant and priority."""
    return (item.slack, item.prefix_seq, item.seq)


_PRIORITY, _SLACK, _PREFIX_SEQ, _SEQ = map(attrgetter, ("priority", "slack", "prefix_seq", "seq"))


def ranked(items: Iterable[Request], ledger: Ledger) -> list[Request]:
    """Return the items of one class in order. To sort by each part of the key, the last first, takes half the time."""
    ordered = sorted(items, key=_SEQ)
    if len(ordered) > 1:
        service = ledger.services.get
        ordered.sort(key=_PREFIX_SEQ)
        ordered.sort(key=_SLACK)
        ordered.sort(key=lambda item: service(item.tenant, 0.0))
        ordered.sort(key=_PRIORITY, reverse=True)  # keeps the order of equals, reversed or not
    return ordered
