"""A queue on the session's Valkey, and a desk for doing by hand what time or a crash does."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from queue_audit import differences

from ballast_queue.address import with_user
from ballast_queue.job import Claimed, Result
from ballast_queue.redis_store import Queue
from ballast_queue.rights import worker_rules
from ballast_queue.settings import QueueSettings

PATIENT_SECONDS = 60.0
"""Time for one reply to a test. The client's own five seconds may pass on a machine that others use."""


def make_line(custom_id: str = "a", **body: Any) -> bytes:
    """One valid line of a job."""
    given = {"model": "small", "prompt": f"Say {custom_id}"} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": given}).encode()


def make_result(claimed: Claimed, **given: Any) -> Result:
    """A success, unless told otherwise."""
    return Result(**({"custom_id": claimed.custom_id, "status_code": 200, "body": {"text": "hi"}} | given))


@dataclass(frozen=True)
class Desk:
    """Reaches behind the queue: makes leases, backoffs, deadlines and kept results end now."""

    queue: Queue
    raw: redis.Redis

    def _due(self, what: str, job_id: str, part: str | None, index: int | None) -> None:
        keys = self.queue.store.keys
        if part is not None:
            self.raw.zadd(keys.part(job_id, part), {str(index): 1}, xx=True)
        # Only a timer that the queue has set can be due.
        self.raw.zadd(keys.timers, {f"{what}:{job_id}": 1}, xx=True)

    def end_lease(self, job_id: str, index: int) -> None:
        self._due("lease", job_id, "leases", index)

    def end_backoff(self, job_id: str, index: int) -> None:
        self._due("wake", job_id, "delayed", index)

    def pass_deadline(self, job_id: str) -> None:
        self.raw.hset(self.queue.store.keys.job(job_id), "deadline", "1")
        self._due("deadline", job_id, None, None)

    def leave_timers(self, seconds: float) -> None:
        """Let no timer run for so long, as if Redis was away or its clock jumped."""
        totals, back = self.queue.store.keys.totals, round(-1000 * seconds)
        self.raw.hincrby(totals, "timers_at", back)
        if self.raw.hexists(totals, "spared_at"):
            self.raw.hincrby(totals, "spared_at", back)

    def end_grace(self, job_id: str) -> None:
        """End the time in which leases are spared after a gap."""
        self.raw.hset(self.queue.store.keys.totals, "spared_at", "1")
        self._due("lease", job_id, None, None)

    def cost(self, call: Callable[..., object], *arguments: object) -> int:
        """The microseconds that the server spends in functions during a call."""
        before = self.raw.info("commandstats")["cmdstat_fcall"]["usec"]
        call(*arguments)
        return self.raw.info("commandstats")["cmdstat_fcall"]["usec"] - before

    def differences(self) -> list[str]:
        """What the queue stores twice, and differs."""
        return differences(self.raw, self.queue.name)

    def outlive_results(self, job_id: str) -> None:
        self._due("forget", job_id, None, None)


@pytest.fixture
def user(valkey: Any) -> Iterator[Callable[..., tuple[str, str]]]:
    """Make ACL users that the end of the test removes: `user(*rules)` returns name and password."""
    made = []

    def make(*rules: str) -> tuple[str, str]:
        name, password = f"user-{secrets.token_hex(4)}", secrets.token_hex(8)
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", f">{password}", *rules)
        made.append(name)
        return name, password

    with redis.Redis.from_url(valkey.url, socket_timeout=PATIENT_SECONDS) as admin:
        yield make
        for name in made:
            admin.execute_command("ACL", "DELUSER", name)


@pytest.fixture
def line() -> Callable[..., bytes]:
    return make_line


@pytest.fixture
def result() -> Callable[..., Result]:
    return make_result


@pytest.fixture
def queue(valkey: Any, queue_name: str, user: Callable[..., tuple[str, str]]) -> Iterator[Queue]:
    """A fresh queue, as a user with the rights of a worker sees it; a test leaves it in balance."""
    name, password = user(*worker_rules(queue_name))
    found = Queue.connect(with_user(valkey.url, name), queue_name, password=password)
    yield found

    with redis.Redis.from_url(valkey.url, socket_timeout=PATIENT_SECONDS) as raw:
        assert differences(raw, queue_name) == []
    found.close()


@pytest.fixture
def impatient(queue: Queue) -> Queue:
    """Retries at once."""
    queue.settings.apply(QueueSettings(backoff_seconds=0))
    return queue


@pytest.fixture
def desk(queue: Queue, valkey: Any) -> Iterator[Desk]:
    with redis.Redis.from_url(valkey.url, socket_timeout=PATIENT_SECONDS) as raw:
        yield Desk(queue, raw)
