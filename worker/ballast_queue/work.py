"""What workers ask of the queue: which jobs wait, items under lease, and what became of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from ballast_queue.functions import Finished
from ballast_queue.job import Claimed, JobHead, Lease, Prefix, Result
from ballast_queue.outcome import Outcome
from ballast_queue.record import head_of
from ballast_queue.settings import QueueSettings
from ballast_queue.status import WorkerStatus
from ballast_queue.store import Store

MAX_ITEMS = 1000
"""Items of one job in one call; Lua unpacks no more than some thousands of arguments."""
HEADS_OF_GROUP = 8
"""Heads that one tenant shows in one band; the nearest deadlines, then in the order of submission."""
MOST_HEADS = 512
"""Of all groups together; with more groups each shows one."""


class Group(NamedTuple):
    """The jobs of one tenant in one band."""

    priority: int
    tenant: str

    @property
    def prefix(self) -> str:
        """How the ranks of its jobs begin."""
        return f"{1000 - self.priority:04d}|{self.tenant}|"


@dataclass(frozen=True, slots=True)
class Demand:
    """What offline tenants want of all workers of a queue, and what they have of them."""

    groups: tuple[Group, ...] = ()
    """With claimable items, higher bands first."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Items under lease by tenant."""

    @property
    def tenants(self) -> set[str]:
        """Those that have something to claim."""
        return {group.tenant for group in self.groups}


class Working(Store):
    """The side of workers."""

    def configure(self, settings: QueueSettings) -> bool:
        """Put settings in force unless newer ones are; True where these hold now."""
        numbers = {
            "max_attempts": settings.max_attempts,
            "lease_seconds": settings.lease_seconds,
            "results_seconds": settings.results_seconds,
            "backoff_seconds": settings.backoff_seconds,
            "backoff_max_seconds": settings.backoff_max_seconds,
        }
        text = settings.model_dump_json()
        return bool(self._run(self._functions.configure(settings.created, settings.generation, text, numbers)))

    def demand(self) -> Demand:
        """Give who has something to claim, and who holds how much."""
        names, held = self._run(self._functions.demand())
        found = (name.split("|") for name in sorted(names.decode().splitlines()))
        return Demand(
            tuple(Group(1000 - int(band), tenant) for band, tenant, _ in found),
            {name.decode(): int(n) for name, n in zip(held[::2], held[1::2], strict=True)},
        )

    def heads(self, groups: Sequence[Group] | None = None) -> list[JobHead]:
        """Give the jobs of these groups (by default of all) that have claimable items; what the claim chooses from.

        Of a group's jobs only the first few are among them, so that the call stays small however many there are.
        """
        wanted = self.demand().groups if groups is None else groups
        if not wanted:
            return []
        each = max(1, min(HEADS_OF_GROUP, MOST_HEADS // len(wanted)))
        ranks = self._run(self._functions.look(each, [group.prefix for group in wanted]))
        if not ranks:
            return []
        job_ids = [rank.decode().split("|", 4)[4] for rank in ranks]
        found = map(head_of, job_ids, self._run(self._functions.heads(job_ids)))
        return [head for head in found if head.waiting > 0]

    def claim(self, job_id: str, n: int, worker: str) -> list[Claimed]:
        """Take up to `n` items of a job under lease; fewer, or none, where others were quicker."""
        reply = self._run(self._functions.claim(job_id, n, worker))
        if not reply:
            return []
        expires, tenant, priority = float(reply[0]), reply[1].decode(), int(reply[2])
        return [
            _claimed(job_id, reply[at : at + 5], expires=expires, tenant=tenant, priority=priority)
            for at in range(3, len(reply), 5)
        ]

    def heartbeat(self, worker: str, leases: Sequence[Lease]) -> list[Lease]:  # noqa: ARG002 - who calls stands in the lease
        """Extend leases; give those that are lost (expired and taken over, cancelled, past their job's deadline).

        A lost item's work is for nothing: abort it, and report nothing of it.
        """
        groups = _by_job([lease[0] for lease in leases])
        calls = [
            self._functions.heartbeat(job_id, [leases[position][1:] for position in group]) for job_id, group in groups
        ]
        replies = self._connection.call_many(calls)
        return [
            leases[group[position - 1]] for (_, group), lost in zip(groups, replies, strict=True) for position in lost
        ]

    def report_progress(self, computed: Mapping[Lease, int]) -> None:
        """Store how many tokens were computed of leased items, for the next attempt if a lease expires.

        A lease that is lost is ignored.
        """
        leases = list(computed)
        groups = _by_job([lease[0] for lease in leases])
        self._connection.call_many(
            [
                self._functions.progress(job_id, [(*leases[at][1:], computed[leases[at]]) for at in group])
                for job_id, group in groups
            ]
        )

    def finish(self, worker: str, claimed: Claimed, result: Result) -> Outcome:
        """Make a result visible: DONE once, ALREADY_DONE when it is repeated, LEASE_LOST when another has the item.

        A result with an error makes the item a dead letter; for what another attempt may mend there is `retry`.
        """
        return self.finish_many(worker, [(claimed, result)])[0]

    def finish_many(self, worker: str, finished: Sequence[tuple[Claimed, Result]]) -> list[Outcome]:
        """Finish several items in one round trip, atomically for each job; outcomes come in the order given."""
        groups = _by_job([claimed.job_id for claimed, _ in finished])
        calls = [
            self._functions.finish(job_id, worker, [_finished(*finished[position], worker) for position in group])
            for job_id, group in groups
        ]
        outcomes = [Outcome.NOT_FOUND] * len(finished)
        for (_, group), reply in zip(groups, self._connection.call_many(calls), strict=True):
            for position, outcome in zip(group, reply, strict=True):
                outcomes[position] = Outcome(outcome.decode())
        return outcomes

    def give_back(self, worker: str, claimed: Claimed, prefix: Prefix | None = None) -> Outcome:
        """Return an item unharmed: it waits again, spends no attempt, and the next worker gets `prefix`.

        Without one, a prefix that an earlier attempt left stays. CANCELLED: the job has ended, the item with it.
        """
        return self.give_back_many(worker, [(claimed, prefix)])[0]

    def give_back_many(self, worker: str, items: Sequence[tuple[Claimed, Prefix | None]]) -> list[Outcome]:  # noqa: ARG002 - who calls stands in the lease
        """Return several items in one round trip, as a draining worker does."""
        calls = [
            self._functions.give_back(
                claimed.job_id, claimed.index, claimed.token, "" if prefix is None else prefix.model_dump_json()
            )
            for claimed, prefix in items
        ]
        return [Outcome(reply.decode()) for reply in self._connection.call_many(calls)]

    def retry(
        self,
        worker: str,  # noqa: ARG002 - who calls stands in the lease
        claimed: Claimed,
        error_code: str,
        message: str,
        *,
        is_retryable: bool = True,
        status_code: int = 500,
    ) -> Outcome:
        """Spend the attempt: RETRIED (claimable after its backoff), or DEAD with `status_code` and the message."""
        call = self._functions.retry(
            claimed.job_id,
            claimed.index,
            claimed.token,
            code=error_code,
            message=message,
            again=is_retryable,
            status=status_code,
            jitter=random.random(),
        )
        return Outcome(self._run(call).decode())

    def publish(self, status: WorkerStatus, ttl_seconds: float) -> None:
        """Show a worker's status for so many seconds."""
        self._run(self._functions.publish_status(status.worker_id, ttl_seconds, status.model_dump_json()))

    def withdraw(self, worker: str) -> None:
        """Take a worker's status back at once, as a worker that stops does."""
        self._run(self._functions.publish_status(worker, 0, ""))


def _by_job(job_ids: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Group positions by job, a call's worth in each group."""
    groups: list[tuple[str, list[int]]] = []
    latest: dict[str, list[int]] = {}
    for position, job_id in enumerate(job_ids):
        group = latest.get(job_id)
        if group is None or len(group) == MAX_ITEMS:
            group = latest[job_id] = []
            groups.append((job_id, group))
        group.append(position)
    return groups


def _seed_of(job_id: str, index: int, body: Mapping[str, Any]) -> int:
    """Give the body's own seed, else one drawn from job and index: the same in every attempt, on every worker."""
    seed = body.get("seed")
    if isinstance(seed, int):
        return seed
    return int.from_bytes(blake2b(f"{job_id}\n{index}".encode(), digest_size=8).digest()) >> 1


def _claimed(job_id: str, item: Sequence[Any], *, expires: float, tenant: str, priority: int) -> Claimed:
    index, token, attempt, payload, prefix = item
    line = json.loads(payload.split(b"\n", 1)[1])
    return Claimed(
        job_id=job_id,
        index=int(index),
        custom_id=line["custom_id"],
        url=line["url"],
        body=line["body"],
        tenant=tenant,
        priority=priority,
        attempt=attempt,
        token=token,
        expires=expires,
        seed=_seed_of(job_id, int(index), line["body"]),
        prefix=Prefix.model_validate_json(prefix) if prefix else None,
    )


def _finished(claimed: Claimed, result: Result, worker: str) -> Finished:
    shown = result if result.worker else result.model_copy(update={"worker": worker})
    error = result.error or {}
    return Finished(
        item=claimed.index,
        token=claimed.token,
        result=shown.model_dump_json(),
        tokens_in=result.tokens_in,
        tokens_out=result.tokens_out,
        code=str(error.get("code") or "failed") if result.error is not None else "",
        message=str(error.get("message") or ""),
    )
