"""Claim items under lease, extend the leases, and end them with a result or without."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any

from pydantic import ValidationError

from ballast_queue.errors import RefusedCall, ResultTooLarge
from ballast_queue.functions import Finished
from ballast_queue.job import Claimed, Lease, Prefix, Result
from ballast_queue.outcome import Outcome
from ballast_queue.records import readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

MAX_ITEMS = 1000
"""Items of one job in one call. Lua can unpack only some thousands of arguments."""
PAGE_BYTES = 8 * 1024 * 1024
"""Results in one round trip. Only the first may exceed it. Redis disconnects a client whose call takes much more."""
MOST_RESULT_BYTES = 64 * 1024 * 1024
"""The longest result that is stored."""
NUM_HEAD = 3
"""Values before the items in the reply of `claim`."""
MOST_MESSAGE, MOST_CODE = 2000, 200
"""Characters of an error that are stored. Its message may quote the whole request."""


@dataclass(frozen=True, slots=True)
class Leases:
    """The leases of a queue.

    An item has one holder at a time, and only the token of its current lease can change it.
    """

    _store: Store

    def claim(self, job_id: str, n: int, worker: str) -> list[Claimed]:
        """Lease up to `n` items of a job. Other workers may leave fewer items, or none."""
        return self.claim_served(job_id, n, worker, ()) or []

    @readable("a claimed item")
    def claim_served(self, job_id: str, n: int, worker: str, skipped: Collection[int]) -> list[Claimed] | None:
        """Lease items as `claim` does, without items that came back unserved and name a model in `skipped`.

        `skipped` has numbers of models (`Claimed.model_number`). 0 skips all items that came back unserved. Return None
        if no other items wait.
        """
        reply = self._store.call(self._store.functions.claim(job_id, n, worker, skipped))
        if not reply:
            return []
        if len(reply) == NUM_HEAD:
            return None
        tenant, priority = text_of(reply[1]), int(reply[2])
        claimed: list[Claimed] = []
        for at in range(NUM_HEAD, len(reply), 5):
            item = reply[at : at + 5]
            read = partial(_claimed, job_id, item, tenant=tenant, priority=priority)
            found = self._store.unreadable.try_read(f"item {int(item[0])} of job {job_id}", read)
            if found is None:
                self._drop(job_id, int(item[0]), item[1])
            else:
                claimed.append(found)
        return claimed

    def _drop(self, job_id: str, index: int, token: int) -> None:
        """Fail an item for good whose stored line cannot be read."""
        call = self._store.functions.retry(
            job_id,
            index,
            token,
            code="unreadable_item",
            message="The line that is stored for this item cannot be read. Submit the item again.",
            again=False,
            status=500,
            jitter=0.0,
        )
        with contextlib.suppress(RefusedCall):  # another value of the job is broken, too; other jobs still run
            self._store.call(call)

    def heartbeat(self, leases: Sequence[Lease]) -> list[Lease]:
        """Extend leases and return the lost ones: expired and taken over, cancelled, or past their job's deadline.

        Abort the work on a lost item and report nothing: its result would be discarded.
        """
        groups = by_job([lease[0] for lease in leases])
        calls = [
            self._store.functions.heartbeat(job_id, [leases[position][1:] for position in group])
            for job_id, group in groups
        ]
        replies = self._store.connection.call_many(calls)
        return [
            leases[group[position - 1]] for (_, group), lost in zip(groups, replies, strict=True) for position in lost
        ]

    def report_progress(self, computed: Mapping[Lease, int]) -> None:
        """Store how many tokens were computed of leased items, for the next attempt if a lease expires.

        Lost leases are ignored.
        """
        leases = list(computed)
        calls = [
            self._store.functions.progress(job_id, [(*leases[at][1:], computed[leases[at]]) for at in group])
            for job_id, group in by_job([lease[0] for lease in leases])
        ]
        self._store.connection.call_many(calls)

    def finish(self, worker: str, claimed: Claimed, result: Result) -> Outcome:
        """Store a result. Return DONE once, ALREADY_DONE if repeated, LEASE_LOST if another worker holds the item.

        Use `retry` for an item that failed.
        """
        return self.finish_many(worker, [(claimed, result)])[0]

    def finish_many(self, worker: str, finished: Sequence[tuple[Claimed, Result]]) -> list[Outcome]:
        """Finish several items, atomically for each job in each round trip. Return their outcomes in the same order."""
        return list(chain.from_iterable(self.finish_in_pages(worker, finished)))

    def finish_in_pages(self, worker: str, finished: Iterable[tuple[Claimed, Result]]) -> Iterator[list[Outcome]]:
        """Finish items in round trips of about `PAGE_BYTES`. Yield the outcomes of each, in the same order.

        Raises:
            ResultTooLarge: this result and some before it are not stored. Those of earlier pages are.
        """
        page: list[tuple[str, Finished]] = []
        size = 0
        for claimed, result in finished:
            item = _finished(claimed, result, worker)
            if page and size + len(item.result) > PAGE_BYTES:
                yield self._finish(worker, page)
                page, size = [], 0
            page.append((claimed.job_id, item))
            size += len(item.result)
        if page:
            yield self._finish(worker, page)

    def _finish(self, worker: str, page: Sequence[tuple[str, Finished]]) -> list[Outcome]:
        groups = by_job([job_id for job_id, _ in page])
        functions = self._store.functions
        calls = [functions.finish(job_id, worker, [page[at][1] for at in group]) for job_id, group in groups]
        outcomes = [Outcome.NOT_FOUND] * len(page)
        for (_, group), reply in zip(groups, self._store.connection.call_many(calls), strict=True):
            for position, outcome in zip(group, reply, strict=True):
                outcomes[position] = Outcome(outcome.decode())
        return outcomes

    def give_back(self, claimed: Claimed, prefix: Prefix | None = None) -> Outcome:
        """Return an item to the queue without spending its attempt. The next worker gets `prefix`.

        Without `prefix`, the prefix of an earlier attempt stays. CANCELLED: the job has ended, and so has the item.
        """
        return self.give_back_many([(claimed, prefix)])[0]

    def give_back_many(
        self, items: Sequence[tuple[Claimed, Prefix | None]], unserved: Collection[Lease] = ()
    ) -> list[Outcome]:
        """Return several items in one round trip, as a draining worker does.

        `unserved` has the leases of items that name another model than the worker serves. They are set aside, and add
        no replica until one of them runs. If no others are left, their job ends as an abandoned one does.
        """
        calls = [
            self._store.functions.give_back(
                *claimed.lease,
                "" if prefix is None else prefix.model_dump_json(),
                unserved_model=claimed.model_number if claimed.lease in unserved else 0,
            )
            for claimed, prefix in items
        ]
        return [Outcome(reply.decode()) for reply in self._store.connection.call_many(calls)]

    def retry(
        self,
        claimed: Claimed,
        error_code: str,
        message: str,
        *,
        is_retryable: bool = True,
        status_code: int = 500,
    ) -> Outcome:
        """Spend the attempt. Return RETRIED (it waits for its backoff) or DEAD (its result has `status_code`).

        A long message is cut: the result and the dead letter of an item both store it.
        """
        call = self._store.functions.retry(
            claimed.job_id,
            claimed.index,
            claimed.token,
            code=_cut(error_code, MOST_CODE),
            message=_cut(message, MOST_MESSAGE),
            again=is_retryable,
            status=status_code,
            jitter=random.random(),
        )
        return Outcome(self._store.call(call).decode())


def by_job(job_ids: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Group positions by job, with at most `MAX_ITEMS` in each group."""
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
    """Return the body's seed, or a hash of job and index: the same in every attempt on every worker."""
    seed = body.get("seed")
    if isinstance(seed, int) and seed != -1:  # as in vLLM, -1 is no seed
        return seed
    return int.from_bytes(blake2b(f"{job_id}\n{index}".encode(), digest_size=8).digest()) >> 1


def _claimed(job_id: str, item: Sequence[Any], *, tenant: str, priority: int) -> Claimed:
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
        seed=_seed_of(job_id, int(index), line["body"]),
        prefix=_prefix(prefix),
    )


def _prefix(text: bytes) -> Prefix | None:
    """Return what an earlier attempt generated. Without it, an attempt begins again."""
    try:
        return Prefix.model_validate_json(text) if text else None
    except ValidationError:
        return None


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def json_of(result: Result) -> bytes:
    """Return a result as it is stored.

    Raises:
        PydanticSerializationError: its body is no JSON. A `body_text` is stored as it is, without a check.
        ResultTooLarge: it has more than `MOST_RESULT_BYTES`.
    """
    if result.body_text:
        text = b'%b,"body":%b}' % (result.model_dump_json(exclude={"body"}).encode()[:-1], result.body_text)
    else:
        text = result.model_dump_json().encode()
    if len(text) > MOST_RESULT_BYTES:
        raise ResultTooLarge(len(text), MOST_RESULT_BYTES)
    return text


def _finished(claimed: Claimed, result: Result, worker: str) -> Finished:
    shown = result if result.worker else result.model_copy(update={"worker": worker})
    return Finished(
        item=claimed.index,
        token=claimed.token,
        result=json_of(shown),
        tokens_in=result.tokens_in,
        tokens_out=result.tokens_out,
    )
