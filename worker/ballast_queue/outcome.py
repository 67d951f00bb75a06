"""Expected outcomes of queue operations: values, not exceptions, and the labels of the metrics."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """What became of a transition."""

    DONE = "done"
    ALREADY_DONE = "already_done"
    """The same finish arrived before; nothing changed."""
    LEASE_LOST = "lease_lost"
    """The lease expired or was taken over: what the caller produced is not visible."""
    CANCELLED = "cancelled"
    """The job was cancelled, paused for ever or expired in the meantime."""
    RETRIED = "retried"
    """Back in the queue, not before its backoff."""
    DEAD = "dead"
    """Attempts are spent: a dead letter with its reason."""
    NOT_FOUND = "not_found"
