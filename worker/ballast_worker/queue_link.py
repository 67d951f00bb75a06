"""The connection of a worker to its queue: one at a time, and tried again while Redis is away or unsafe.

The worker tries a new address or password while the old connection works. Leases stay valid.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from ballast_log import Log
from ballast_queue.errors import QueueError, QueueUnavailable, ServerUnfit
from ballast_queue.redis_store import Queue

log = Log(__name__)

FIRST_BACKOFF, LAST_BACKOFF = 0.05, 2.0
FIRST_RENEWAL, LAST_RENEWAL = 1.0, 60.0
"""How soon a new address or password is tried again while the old connection works. A try may block for seconds."""


@dataclass(slots=True)
class Backoff:
    """The time between two tries. It doubles from `first` to `last` seconds with each failure."""

    first: float
    last: float
    _next: float | None = None

    def fail(self) -> float:
        """Return the seconds until the next try."""
        now = self.first if self._next is None else self._next
        self._next = min(2 * now, self.last)
        return now

    def reset(self) -> None:
        """Begin again with `first`."""
        self._next = None


class QueueLink:
    """The connection. It belongs to the feeder's thread, except `renew_soon`."""

    is_up = False
    """Whether Redis answers and its configuration is safe for jobs."""
    is_new = True
    """Whether this worker has written no settings to the server. The feeder sets it to False when it has."""
    queue: Queue | None = None
    retry_at = 0.0
    """When to try again. It counts while the queue is not up."""

    def __init__(self, connect: Callable[[], Queue]) -> None:
        """`connect` uses the address and password of its time."""
        self._connect = connect
        self._is_stale = False
        """Whether address or password changed since the connection was made."""
        self._last_warning = ""
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
        self._renewals = Backoff(FIRST_RENEWAL, LAST_RENEWAL)
        self._renew_at = 0.0

    def renew_soon(self) -> None:
        """Connect again with the current address and password. Any thread may call it."""
        self._renewals.reset()
        self._is_stale = True
        self._renew_at = self.retry_at = 0.0

    def attach(self) -> Queue:
        """Return the queue, connected. Check the server first if it was unavailable.

        Raises:
            QueueError: Redis is unavailable, refuses the worker, or is unsafe for jobs. Call `lose` then.
        """
        if self.queue is None:
            self._is_stale = False  # before the call: a change during the call is handled after it
            self.queue = self._connect()
        elif self._is_stale and time.monotonic() >= self._renew_at:
            self._renew(self.queue)
        if not self.is_up:
            for warning in self.queue.require_fit():
                if self.is_new:
                    log.warning("redis configuration", warning=warning)
        return self.queue

    def _renew(self, old: Queue) -> None:
        """Replace the connection. Keep the old one while the new address or password does not work yet."""
        self._is_stale = False
        fresh: Queue | None = None
        try:
            fresh = self._connect()
            fresh.require_fit()
        except QueueError as error:
            if fresh is not None:
                fresh.close()
            if not self._is_stale:  # else it changed once more during the call, and is due at once
                self._is_stale, self._renew_at = True, time.monotonic() + self._renewals.fail()
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                log.warning("new redis address or password does not work, using the old connection", because=str(error))
            return
        self.queue = fresh
        old.close()
        self._last_warning = ""
        self.is_new = True
        log.info("using the new redis address or password")

    def keep(self, queue: Queue) -> None:
        """Note that a round succeeded."""
        if not self.is_up:
            self.is_up = True
            self._last_warning = ""
            self._backoff.reset()
            log.info("queue is up", queue=queue.name)

    def lose(self, error: QueueError, num_held: int) -> None:
        """Note that Redis is unavailable or unsafe, and try again later. `num_held`: items under lease."""
        if self.is_up or str(error) != self._last_warning:
            self._last_warning = str(error)
            if isinstance(error, ServerUnfit):
                log.error("redis configuration is unsafe, offline work is paused", because=str(error))
            else:
                log.warning("redis is unavailable, offline work is paused", because=str(error), held=num_held)
        self.close()
        self.queue = None  # the next connection uses the address and password at that time
        if not isinstance(error, QueueUnavailable):
            self.is_new = True
        self.retry_at = time.monotonic() + self._backoff.fail() * random.uniform(0.8, 1.2)

    def close(self) -> None:
        """Close the connection."""
        self.is_up = False
        if self.queue is not None:
            self.queue.close()
