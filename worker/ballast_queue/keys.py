"""Every key of a queue. `ballast.lua` opens with what lies under each.

All keys of a queue carry its name as hash tag, so that Redis Cluster keeps them in one slot and one function may touch
them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_QUEUE = ("totals", "jobs", "ready", "backlog", "timers", "settings", "keys", "inbox", "groups", "active", "held")
_JOB = ("", ":items", ":live", ":returned", ":delayed", ":leases", ":prefixes", ":dead", ":results", ":ids")


class Keys:
    """Builds the keys of one queue."""

    def __init__(self, queue: str) -> None:
        self._base = f"ballast:{{{queue}}}:"
        self._queue = tuple(self._key(part) for part in _QUEUE)
        self.totals, self.jobs, self.ready, self.backlog, self.timers, self.settings, _, self.inbox = self._queue[:8]
        self.groups, self.active, self.held = self._queue[8:]
        self.intake = self._key("intake")
        self.appraisal = self._key("appraisal")
        self.service = self._key("service")
        self.workers = self._key("workers")
        self.statuses = self._key("statuses")
        self.of_job = lru_cache(maxsize=4096)(self._of_job)

    def _key(self, part: str) -> bytes:
        return (self._base + part).encode()

    def _of_job(self, job_id: str) -> tuple[bytes, ...]:
        """Give what a transition of a job gets in KEYS, in the order that `bind` in ballast.lua reads."""
        return (*self._queue, *(self._key(f"job:{job_id}{part}") for part in _JOB))

    def for_audit(self, job_ids: Iterable[str]) -> list[bytes]:
        """Give what `audit` gets in KEYS."""
        jobs = (key for job_id in job_ids for key in self.of_job(job_id)[len(_QUEUE) :])
        return [self.totals, self.jobs, self.ready, self.backlog, self.groups, self.active, self.held, *jobs]

    def job(self, job_id: str) -> bytes:
        """Key of a job's record."""
        return self.of_job(job_id)[len(_QUEUE)]

    def part(self, job_id: str, part: str) -> bytes:
        """Key of one part of a job: `results`, `dead`, `leases`, ..."""
        return self.of_job(job_id)[len(_QUEUE) + _JOB.index(f":{part}")]
