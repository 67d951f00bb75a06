"""Compare the values that a queue stores twice. `ballast.lua` starts with the schema.

As a script, it prints the differences. Arguments: queue, URL, password and authorities of Redis.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from ballast_queue.connection import Connection
from ballast_queue.job import UNSERVED, JobState
from ballast_queue.keys import Keys
from ballast_queue.records import SUMMED

_SET_ASIDE = 2**32
_RUNS = {JobState.VALIDATING, JobState.IN_PROGRESS}


def differences(client: Any, queue: str) -> list[str]:
    """Return the differences as sentences. A client of redis-py with all rights reads the queue in one transaction."""
    keys = Keys(queue)
    job_ids: list[bytes] = []
    while (found := _read(client, keys, job_ids))[0] != job_ids:  # the first try finds the jobs
        job_ids = found[0]
    totals, ready, backlog, groups, active, held = found[1:7]
    jobs = [_Job(found[at : at + 9]) for at in range(7, len(found), 9)]
    ranks = {rank.decode() for rank in ready}
    leased = Counter[str]()
    for job in jobs:
        leased[job.text["tenant"]] += job.count["leased"]
    compared: tuple[tuple[str, object, object], ...] = (
        ("held", _numbers(held), {tenant: n for tenant, n in leased.items() if n}),
        ("ready", ranks, {job.text["rank"] for job in jobs if job.is_ready}),
        ("groups", {name.decode() for name in groups}, {f"{band}|{name}|" for band, name in map(_group, ranks)}),
        ("backlog", {job_id.decode() for job_id in backlog}, {job.text["id"] for job in jobs if job.has_backlog}),
        ("active", {job_id.decode() for job_id in active}, {job.text["id"] for job in jobs if not job.state.is_over}),
    )
    problems = list(chain.from_iterable(job.problems() for job in jobs))
    problems += [f"{name}: found {kept}, expected {real}" for name, kept, real in compared if kept != real]
    sums = {name: sum(job.count[name] for job in jobs) for name in (*SUMMED, "dead")}
    sums |= {f"jobs:{state}": sum(job.state is state for job in jobs) for state in JobState}
    sums["at_risk"] = sum(job.is_at_risk for job in jobs)
    sums["unclaimable"] = sum(job.unclaimable for job in jobs)
    sums["unclaimable_at_risk"] = sum(job.is_at_risk for job in jobs if not job.is_claimable)
    counted = _numbers(totals)
    problems += [
        f"totals.{name} is {counted.get(name, 0)}, its jobs sum up to {total}"
        for name, total in sums.items()
        if counted.get(name, 0) != total
    ]
    return problems


def _read(client: Any, keys: Keys, job_ids: list[bytes]) -> list[Any]:
    """Return the ids of all jobs, six values of the queue, and nine values of each of the given jobs."""
    pipeline = client.pipeline(transaction=True)
    pipeline.zrange(keys.jobs, 0, -1)
    pipeline.hgetall(keys.totals)
    pipeline.zrange(keys.ready, 0, -1)
    pipeline.zrange(keys.backlog, 0, -1)
    pipeline.smembers(keys.groups)
    pipeline.zrange(keys.active, 0, -1)
    pipeline.hgetall(keys.held)
    for job_id in map(bytes.decode, job_ids):
        pipeline.hgetall(keys.job(job_id))
        pipeline.hgetall(keys.part(job_id, "items"))
        pipeline.hgetall(keys.part(job_id, "live"))
        pipeline.zrange(keys.part(job_id, "returned"), 0, -1, withscores=True)
        for part in ("delayed", "leases"):
            pipeline.zrange(keys.part(job_id, part), 0, -1)
        pipeline.hkeys(keys.part(job_id, "prefixes"))
        pipeline.hkeys(keys.part(job_id, "dead"))
        pipeline.xrange(keys.part(job_id, "results"))
    replies: list[Any] = pipeline.execute()
    return replies


def _numbers(pairs: dict[bytes, bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in pairs.items()}


def _group(rank: str) -> list[str]:
    return rank.split("|", 2)[:2]


class _Job:
    """One job, from the nine values of `_read`."""

    def __init__(self, values: list[Any]) -> None:
        record, items, live, returned, delayed, leases, prefixes, dead, results = values
        self.text = {name.decode(): value.decode() for name, value in record.items()}
        self.state = JobState(self.text["state"])
        self.count = {
            name: int(self.text.get(name, 0))
            for name in (*SUMMED, "dead", "delayed", "next", "stored", "closed", "set_aside")
        }
        self._parts = {
            name: {int(index) for index in indexes}
            for name, indexes in (
                *(("returned", dict(returned)), ("delayed", delayed), ("leases", leases)),
                ("live", [index for index, text in live.items() if not text.startswith(b"0:")]),
                *(("prefixes", prefixes), ("dead", dead)),
                ("kept", [index for index, text in items.items() if text != b"!" and not text.startswith(b"=")]),
            )
        }
        self._set_aside = sum(score >= _SET_ASIDE for _, score in returned)
        self._misplaced = [int(index) for index, score in returned if score % _SET_ASIDE != int(index)]
        self._succeeded = sum(text.startswith(b"=") for text in items.values())
        self._let_go = sum(text == b"!" for text in items.values())
        self._results = Counter(json.loads(fields[b"r"])["custom_id"] for _, fields in results)

    @property
    def is_ready(self) -> bool:
        return self.state in _RUNS and self.count["waiting"] > self.count["delayed"]

    @property
    def is_claimable(self) -> bool:
        return self.state in _RUNS and self.text.get("reason") != UNSERVED

    @property
    def unclaimable(self) -> int:
        if self.state not in _RUNS:
            return self.count["waiting"]
        reason = self.text.get("reason")
        return self.count["waiting" if reason == UNSERVED else "set_aside"] if reason else 0

    @property
    def has_backlog(self) -> bool:
        return self.state in _RUNS and self.count["waiting"] > 0

    @property
    def is_at_risk(self) -> bool:
        is_ending = bool(self.text.get("ending")) or self.state.is_over
        return not is_ending and self.text.get("outlook") in {"at_risk", "no"}

    def problems(self) -> Iterator[str]:
        """Yield the differences as sentences."""
        count, parts = self.count, self._parts
        fresh = set(range(count["next"], count["stored"]))
        waiting = fresh | parts["returned"] | parts["delayed"]
        compared: tuple[tuple[str, object, object], ...] = (
            ("waiting", count["waiting"], len(waiting)),
            ("leased", count["leased"], len(parts["leases"])),
            ("dead", count["dead"], len(parts["dead"])),
            ("delayed", count["delayed"], len(parts["delayed"])),
            ("set aside", count["set_aside"], 0 if self.text.get("ending") else self._set_aside),
            ("items with the place of another", self._misplaced, []),
            ("prefixes of items that are over", parts["prefixes"] - waiting - parts["leases"], set()),
            ("items with a token", parts["live"], parts["leases"]),
            ("items with a line", parts["kept"], waiting | parts["leases"] | parts["dead"]),
            ("succeeded", count["succeeded"], self._succeeded),
            ("cancelled and expired", count["cancelled"] + count["expired"], self._let_go),
            ("total", count["total"], sum(count[name] for name in SUMMED[1:])),
            ("failed", count["failed"], count["total"] - count["stored"] + len(parts["dead"])),
            ("results", self._results.total(), sum(count[name] for name in SUMMED[3:])),
            ("custom ids with several results", [name for name, n in self._results.items() if n > 1], []),
            ("is over", self.state.is_over, count["closed"] == 1 and count["waiting"] + count["leased"] == 0),
        )
        for what, kept, real in compared:
            if kept != real:
                yield f"{self.text['id']}: {what}: found {kept}, expected {real}"


if __name__ == "__main__":
    name, url, secret, ca = sys.argv[1:]
    connection = Connection.open(url, password=secret, socket_timeout=60, ca=ca or None)
    sys.stdout.write(json.dumps(differences(connection.client, name)) + "\n")
