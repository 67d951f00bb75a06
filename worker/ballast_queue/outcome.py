"""Expected outcomes of queue operations. Their values are labels of metrics."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of a transition of an item."""

    DONE = "done"
    ALREADY_DONE = "already_done"
    """The same result arrived before. Nothing changed."""
    LEASE_LOST = "lease_lost"
    """The lease expired, or another worker holds the item. The caller's result is discarded."""
    CANCELLED = "cancelled"
    """The job was cancelled or has expired."""
    RETRIED = "retried"
    """The item waits again, until its backoff ends."""
    DEAD = "dead"
    """The attempts are spent. The item is a dead letter with a reason."""
    NOT_FOUND = "not_found"
    """The job or the item does not exist."""
