"""Check the counters, indexes and results of a queue against its items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from ballast_queue.functions import FIELDS
from ballast_queue.job import JobState
from ballast_queue.jobs import Jobs
from ballast_queue.records import SUMMED
from ballast_queue.store import Store

_RUNS = {JobState.VALIDATING, JobState.IN_PROGRESS}


def find_differences(store: Store) -> list[str]:
    """Return the differences as sentences. One call reads the whole queue."""
    reply: list[Any] = []
    while not reply:  # empty if a job was added or deleted between the two calls
        job_ids = Jobs(store).ids()
        reply = store.call(store.functions.audit(job_ids))
    totals, ready, backlog, groups, active, held = reply[:6]
    jobs = [_Audited(job) for job in reply[6:]]
    found = list(chain.from_iterable(job.problems() for job in jobs))
    ranks = {rank.decode() for rank in ready}
    leased = Counter[str]()
    for job in jobs:
        leased[job.text["tenant"]] += job.count["leased"]
    wanted: tuple[tuple[str, object, object], ...] = (
        ("held", _numbers(held), {tenant: n for tenant, n in leased.items() if n}),
        ("ready", ranks, {job.text["rank"] for job in jobs if job.is_ready}),
        ("groups", {name.decode() for name in groups}, {f"{band}|{name}|" for band, name in map(_group, ranks)}),
        ("backlog", {job_id.decode() for job_id in backlog}, {job.id for job in jobs if job.has_backlog}),
        ("active", {job_id.decode() for job_id in active}, {job.id for job in jobs if not job.state.is_over}),
    )
    found += [f"{name}: found {kept}, expected {real}" for name, kept, real in wanted if kept != real]
    sums = {name: sum(job.count[name] for job in jobs) for name in (*SUMMED, "dead")}
    sums |= {f"jobs:{state}": sum(job.state is state for job in jobs) for state in JobState}
    sums["at_risk"] = sum(job.is_at_risk for job in jobs)
    counted = _numbers(totals)
    found += [
        f"totals.{name} is {counted.get(name, 0)}, its jobs sum up to {total}"
        for name, total in sums.items()
        if counted.get(name, 0) != total
    ]
    return found


def _numbers(pairs: list[bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in zip(pairs[::2], pairs[1::2], strict=True)}


def _group(rank: str) -> list[str]:
    return rank.split("|", 2)[:2]


class _Audited:
    """One job in the reply of `audit`."""

    def __init__(self, reply: list[Any]) -> None:
        values, returned, delayed, leases, live, prefixes, dead, kept, self._succeeded, self._let_go, results = reply
        self.text = {name: (value or b"").decode() for name, value in zip(FIELDS, values, strict=True)}
        self.id, self.state = self.text["id"], JobState(self.text["state"])
        self.count = {
            name: int(self.text[name] or 0) for name in (*SUMMED, "dead", "delayed", "next", "stored", "closed")
        }
        self._parts = {
            name: {int(index) for index in indexes}
            for name, indexes in (
                *(("returned", returned), ("delayed", delayed), ("leases", leases), ("live", live)),
                *(("prefixes", prefixes), ("dead", dead), ("kept", kept)),
            )
        }
        self._results = Counter(custom_id.decode() for custom_id in results)

    @property
    def is_ready(self) -> bool:
        return self.state in _RUNS and self.count["waiting"] > self.count["delayed"]

    @property
    def has_backlog(self) -> bool:
        return self.state in _RUNS and self.count["waiting"] > 0

    @property
    def is_at_risk(self) -> bool:
        is_ending = bool(self.text["ending"]) or self.state.is_over
        return not is_ending and self.text["outlook"] in {"at_risk", "no"}

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
                yield f"{self.id}: {what}: found {kept}, expected {real}"
