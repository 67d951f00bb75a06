"""Whether a queue balances: counters, indexes and results against the items themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ballast_queue.job import ItemState, JobState, Result
from ballast_queue.record import SUMMED
from ballast_queue.store import Store

_RUNS = {JobState.VALIDATING, JobState.IN_PROGRESS}


class Auditing(Store):
    """The side of tests and of whoever suspects something."""

    def check_integrity(self) -> list[str]:
        """Compare everything that is kept twice; give what differs, as sentences.

        Reads the whole queue, item by item; call it while nobody changes the queue.
        """
        records = self._records(self._job_ids())
        ready = {rank.decode().split("|", 4)[4] for rank in self._connection.members(self._keys.ready, 0, -1)}
        backlog = {job_id.decode() for job_id in self._connection.members(self._keys.backlog, 0, -1)}
        found = [sentence for record in records for sentence in self._check_job(record, ready, backlog)]
        known = {record["id"] for record in records}
        found += [f"{job_id} is ready and is no job" for job_id in ready - known]
        found += [f"{job_id} has a backlog and is no job" for job_id in backlog - known]
        totals = {name.decode(): int(value) for name, value in self._connection.hash_pairs(self._keys.totals)}
        for name in (*SUMMED, "dead"):
            total = sum(int(record[name]) for record in records)
            if totals.get(name, 0) != total:
                found.append(f"totals.{name} is {totals.get(name, 0)}, its jobs sum up to {total}")
        states = Counter(record["state"] for record in records)
        for state in JobState:
            if totals.get(f"jobs:{state}", 0) != states[state]:
                found.append(f"totals counts {totals.get(f'jobs:{state}', 0)} jobs {state}, there are {states[state]}")
        return found

    def _check_job(self, record: dict[str, str], ready: set[str], backlog: set[str]) -> Iterator[str]:
        job_id, state = record["id"], JobState(record["state"])
        count = {name: int(record[name]) for name in (*SUMMED, "dead", "delayed", "next", "stored", "closed")}

        def differs(what: str, kept: object, real: object) -> Iterator[str]:
            if kept != real:
                yield f"{job_id}: {what}: found {kept}, wanted {real}"

        keys = self._keys
        indexes = {
            part: {int(member) for member in self._connection.members(keys.part(job_id, part), 0, -1)}
            for part in ("returned", "delayed", "leases")
        }
        fresh = set(range(count["next"], count["stored"]))
        dead = {int(index) for index, _ in self._connection.hash_pairs(keys.part(job_id, "dead"))}
        real = {"waiting": fresh | indexes["returned"] | indexes["delayed"], "leased": indexes["leases"], "dead": dead}
        for name, members in real.items():
            yield from differs(name, count[name], len(members))
        yield from differs("delayed", count["delayed"], len(indexes["delayed"]))
        prefixes = {int(index) for index, _ in self._connection.hash_pairs(keys.part(job_id, "prefixes"))}
        yield from differs("prefixes of items that are over", prefixes - real["waiting"] - real["leased"], set())
        leased = {
            int(index)
            for index, live in self._connection.hash_pairs(keys.part(job_id, "live"))
            if not live.startswith(b"0:")
        }
        yield from differs("items with a token", leased, indexes["leases"])
        alive, done = set(), Counter[str]()
        for index, item in self._connection.hash_pairs(keys.part(job_id, "items")):
            if item.startswith(b"="):
                done[ItemState.SUCCEEDED] += 1
            elif item == b"!":
                done["let go"] += 1
            else:
                alive.add(int(index))
        yield from differs("items with a line", alive, real["waiting"] | real["leased"] | dead)
        yield from differs("succeeded", count["succeeded"], done[ItemState.SUCCEEDED])
        yield from differs("cancelled and expired", count["cancelled"] + count["expired"], done["let go"])
        yield from differs("total", count["total"], sum(count[name] for name in SUMMED[1:]))
        yield from differs("failed", count["failed"], count["total"] - count["stored"] + len(dead))
        results = Counter(result.custom_id for result in self._results(job_id))
        yield from differs("results", results.total(), sum(count[name] for name in SUMMED[3:]))
        yield from differs("custom ids with several results", [name for name, n in results.items() if n > 1], [])
        yield from differs("is ready", job_id in ready, state in _RUNS and count["waiting"] > count["delayed"])
        yield from differs("has a backlog", job_id in backlog, state in _RUNS and count["waiting"] > 0)
        is_done = count["closed"] == 1 and count["waiting"] + count["leased"] == 0
        yield from differs("is over", state.is_over, is_done)

    def _results(self, job_id: str) -> Iterator[Result]:
        seen = b"0"
        while page := self._connection.entries(self._keys.part(job_id, "results"), seen, 1000):
            for entry_id, fields in page:
                seen = entry_id
                yield Result.model_validate_json(fields[b"r"])
