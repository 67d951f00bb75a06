"""The tasks of the feeder's rounds: a task that fails is counted and logged, and ends no other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from math import inf

from ballast_log import Log
from ballast_queue.errors import QueueError, QueueFull, RefusedCall, UnreadableValue

log = Log(__name__)

FULL = "redis is full and a task waits: raise maxmemory, delete jobs, or wait until the results of old jobs expire"
REPEAT_SECONDS = 600.0
"""How soon the log has the same kind of error of a task again, so that it names the cause while the task fails."""


class FeederTasks:
    """Runs tasks, and keeps which of them failed."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """How often each task of a round failed."""
        self._logged: dict[tuple[str, type[Exception]], float] = {}
        """When the log last got an error of this kind of a task."""
        self._full: set[str] = set()
        """Tasks for which Redis had no memory, and that have not succeeded since. Inbox and claim must move an item."""

    def run(self, what: str, task: Callable[[], object]) -> bool:
        """Run one task of a round, and return whether it succeeded. If it fails, the other tasks still run.

        Raises:
            QueueError: Redis is unavailable, or refuses the worker.
        """
        try:
            task()
        except (RefusedCall, UnreadableValue, QueueFull) as error:  # a full Redis still takes results and leases
            self.fail(what, error)
        except QueueError:
            raise
        except Exception as error:  # noqa: BLE001 -- a defect in one task must not end the others
            self.fail(what, error)
        else:
            if what not in {"inbox", "claim"}:  # these succeed without an item, too
                self.note_memory(what)
            return True
        return False

    def fail(self, what: str, error: Exception) -> None:
        """Count a failed task. Log an error of each kind once in ten minutes, and each time that Redis becomes full."""
        self.failures[what] += 1
        if isinstance(error, QueueFull):
            if what not in self._full:
                log.warning(FULL, task=what, because=str(error))
            self._full.add(what)
        elif (now := time.monotonic()) >= self._logged.get((what, type(error)), -inf) + REPEAT_SECONDS:
            self._logged[what, type(error)] = now
            write = log.error if isinstance(error, QueueError) else log.exception  # with the trace of a defect
            write("feeder task failed, the others go on", task=what, because=repr(error))

    def note_memory(self, what: str) -> None:
        """Note that Redis had memory for a task."""
        self._full.discard(what)
