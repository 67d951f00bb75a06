"""The queues of a Redis whose resources are gone: they are kept for some time, and then removed.

The hash `ballast:queues` names the queues of each release of the operator, and since when each of them is unused. A
queue that no release ever used, such as one of `ballast submit` alone, is not in it and stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ballast_log import Log
from ballast_queue.connection import Connection
from ballast_queue.errors import QueueError, QueueFull, RefusedCall, UnreadableValue
from ballast_queue.keys import key_pattern
from ballast_queue.redis_store import Queue
from ballast_queue.unreadable import text_of

log = Log(__name__)

REGISTRY = b"ballast:queues"
ROUNDS, ROUND_SECONDS = 5, 0.1
"""Most rounds of due timers of one queue, and the time of each. They keep one queue from holding up the others."""


@dataclass(frozen=True, slots=True)
class UnusedQueues:
    """The queues that resources of one release used.

    Law: a queue is removed only if no release and no worker uses it, and after a call has found it unused at least
    `keep_seconds` ago by the clock of the server.
    """

    connection: Connection
    release: str
    keep_seconds: float
    namespaces: tuple[str, ...] = ()
    """The namespaces that the release watches; empty for all.

    A queue of another one, or of none, stays, because its users are unknown. If another release uses it now, this one
    forgets it, so that the other may remove it later.
    """
    shared: set[str] = field(default_factory=set)
    """The queues that another release uses too, which the log has named. Pass the same set at each call."""

    def update(self, used: AbstractSet[str]) -> list[str]:
        """Note which queues the resources use now. Run the timers of the others, and return the removed queues.

        A full Redis notes nothing, but unused queues end, which frees memory.

        Raises:
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses the user.
        """
        known = dict(self._entries())
        for name in sorted(used):
            if known.get((name, self.release)) != "":
                with contextlib.suppress(QueueFull):  # the next call notes it
                    self._note(name, "")
        shared = {
            name for (name, whose), since in known.items() if name in used and whose != self.release and not since
        }
        if shared - self.shared:
            log.warning("queues are shared with resources of another release", queues=sorted(shared))
        self.shared.clear()
        self.shared.update(shared)
        removed = []
        for (name, release), since in known.items():
            if release != self.release or name in used:
                continue
            others = [entry for (other, whose), entry in known.items() if other == name and whose != release]
            queue = Queue(self.connection, name)
            try:
                run_timers(queue)
                if not self._is_watched(name):
                    if "" in others:
                        self._forget(name)
                    continue
                if "" not in others:
                    _drop_settings(queue)
                if self._end(queue, since, is_shared=bool(others)):
                    removed.append(name)
            except (RefusedCall, UnreadableValue, QueueFull) as error:  # a user can write anything into its queue
                log.warning("an unused queue was skipped", queue=name, error=type(error).__name__)
        return removed

    def _end(self, queue: Queue, since: str, *, is_shared: bool) -> bool:
        """Remove an unused queue if its time is over. Return whether it was removed."""
        if _has_workers(queue):
            self._note(queue.name, "")
        elif not since:
            self._note(queue.name, repr(queue.now()))
        elif queue.now() - float(since) >= self.keep_seconds:
            if not is_shared:
                remove(queue)
            self._forget(queue.name)
            return not is_shared
        return False

    def _is_watched(self, name: str) -> bool:
        return not self.namespaces or name.partition("/")[0] in self.namespaces

    def _entries(self) -> list[tuple[tuple[str, str], str]]:
        found = []
        for entry, value in self.connection.hash_pairs(REGISTRY):
            name, _, release = text_of(entry).partition(" ")
            found.append(((name, release), text_of(value)))
        return found

    def _note(self, name: str, since: str) -> None:
        self.connection.set_hash_field(REGISTRY, _field(name, self.release), since)

    def _forget(self, name: str) -> None:
        self.connection.remove_hash_field(REGISTRY, _field(name, self.release))


def _field(name: str, release: str) -> str:
    return f"{name} {release}"  # neither has a blank


def _has_workers(queue: Queue) -> bool:
    """Return whether workers report. They cannot if the value of their statuses has another type."""
    try:
        return bool(queue.workers.statuses())
    except (RefusedCall, UnreadableValue):
        return False


def _drop_settings(queue: Queue) -> None:
    """Remove the settings of a resource. It is gone, and Redis may have been away when it was deleted.

    Settings of workers outside the operator have no time of creation. They stay, also while no worker runs.
    """
    with contextlib.suppress(RefusedCall, UnreadableValue):
        found = queue.settings.renew("")
        if found.created and not _has_workers(queue):
            queue.settings.drop(found.owner)


def run_timers(queue: Queue) -> None:
    """Run the due work of a queue without workers, as far as the user's rights admit."""
    with contextlib.suppress(QueueError):
        for _ in range(ROUNDS):
            if not queue.timers.run_due(ROUND_SECONDS):
                return


def remove(queue: Queue) -> None:
    """Delete every key whose name is one of a queue, whatever its value is. After a failure, repeat the call."""
    cursor, store = b"0", queue.store
    while True:
        cursor = store.call(store.functions.remove_keys(cursor, key_pattern(queue.name)))
        if cursor == b"0":
            return
