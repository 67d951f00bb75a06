"""Every key of a queue. `ballast.lua` starts with the schema of their values.

The queue's name is the hash tag of all keys, so that Redis Cluster keeps them in one slot and one function may use
them together.
"""

from __future__ import annotations

from functools import lru_cache

from ballast_openai.errors import describe
from ballast_queue.errors import InvalidJob

_QUEUE = ("totals", "jobs", "ready", "backlog", "timers", "settings", "keys", "inbox", "groups", "active", "held")
_JOB = ("", ":items", ":live", ":returned", ":delayed", ":leases", ":prefixes", ":dead", ":results", ":ids")


def _base(queue: str) -> str:
    return f"ballast:{{{queue}}}:"


def key_pattern(queue: str) -> str:
    """Return the pattern that matches the keys of one queue. A name of a queue has no special characters."""
    return f"{_base(queue)}*"


def queue_of_pattern(pattern: str) -> str | None:
    """Return the queue of a pattern from `key_pattern`, or None for another pattern."""
    queue = pattern.removeprefix("ballast:{").removesuffix("}:*")
    return queue if pattern == key_pattern(queue) else None


def require_utf8(what: str, text: str) -> None:
    """Raise `InvalidJob` if UTF-8 cannot express a text, such as an argument of a command that had other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        return
    raise InvalidJob(f"{what}: found {describe(text)}, expected text in UTF-8")


class Keys:
    """The keys of one queue."""

    def __init__(self, queue: str) -> None:
        self._base = _base(queue)
        self.of_queue = tuple(self._key(part) for part in _QUEUE)
        """The keys of the queue that every transition of a job gets."""
        self.totals, self.jobs, self.ready, self.backlog, self.timers, self.settings, _, self.inbox = self.of_queue[:8]
        self.groups, self.active, self.held = self.of_queue[8:]
        self.shortened = self._key("shortened")
        self.intake = self._key("intake")
        self.forecast = self._key("forecast")
        self.declared = self._key("declared")
        self.service = self._key("service")
        self.workers = self._key("workers")
        self.statuses = self._key("statuses")
        self.of_job = lru_cache(maxsize=4096)(self._of_job)

    def _key(self, part: str) -> bytes:
        return (self._base + part).encode()

    def _of_job(self, job_id: str) -> tuple[bytes, ...]:
        """Return the KEYS of a transition of a job, in the order of `bind` in ballast.lua."""
        require_utf8("job", job_id)
        # The functions of another version find each key by its position: a further key, also of the queue, comes last.
        return (*self.of_queue, *(self._key(f"job:{job_id}{part}") for part in _JOB), self.shortened)

    def inbox_of(self, tenant: str | None) -> bytes:
        """Return the key of the inbox of one tenant, which only a queue that declares it reads; None: that for all."""
        return self.inbox if tenant is None else self._key(f"inbox:{tenant}")

    def shortened_of(self, tenant: str | None) -> bytes:
        """Return the key of the shortened entries of a tenant's inbox; None: of the inbox for all."""
        return self.shortened if tenant is None else self._key(f"shortened:{tenant}")

    def job(self, job_id: str) -> bytes:
        """Return the key of a job's record."""
        return self.of_job(job_id)[len(_QUEUE)]

    def part(self, job_id: str, part: str) -> bytes:
        """Return the key of one part of a job: `results`, `dead`, `leases`, ..."""
        return self.of_job(job_id)[len(_QUEUE) + _JOB.index(f":{part}")]
