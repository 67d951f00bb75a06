"""One typed stub per function of `ballast.lua`, which documents the functions and their replies.

A stub returns a `Call`, so that one round trip can carry several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ballast_queue.function_library import Argument, Call
from ballast_queue.keys import Keys

FIELDS = (
    *("id", "tenant", "state", "rank", "source", "key", "ending", "reason", "outlook", "because"),
    *("priority", "created", "deadline", "finished", "closed", "lines", "stored", "next", "delayed", "prefix_key"),
    *("asked_out", "unbounded", "appraised", "tokens_in", "tokens_out"),
    *("total", "waiting", "leased", "succeeded", "failed", "cancelled", "expired", "dead"),
)
"""A job's record as `read` returns it, in the order of FIELDS in ballast.lua."""
HEAD = (
    *("tenant", "priority", "created", "deadline", "waiting", "delayed", "leased", "prefix_key"),
    *("stored", "asked_out", "unbounded", "succeeded", "tokens_out"),
)
"""The fields of a record that the choice of a job needs, in the order of HEAD in ballast.lua."""
Source = Literal["submit", "inbox"]


class Line(NamedTuple):
    """One line to store in a job."""

    kind: Literal["a", "r", "b"]
    """Accepted, rejected, blank."""
    custom_id: str
    """Empty if the line has none."""
    text: bytes
    """The line, or the error as JSON."""
    entry: bytes = b""
    """The id of its inbox entry; empty for a submitted file."""
    asked_out: int | None = 0
    """Limit of the tokens of its answer; None: no limit."""


class Finished(NamedTuple):
    """One item with its result."""

    item: int
    """Its index in the job."""
    token: int
    result: bytes
    """As JSON."""
    tokens_in: int
    tokens_out: int


def _arguments(lines: Iterable[Line]) -> Iterator[Argument]:
    for line in lines:
        custom_id = json.dumps(line.custom_id, ensure_ascii=False) if line.custom_id else ""
        asked_out = "" if line.asked_out is None else line.asked_out
        yield from (line.kind, line.entry, line.custom_id, custom_id, line.text, asked_out)


class Functions:
    """The calls of one queue."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def _of_job(self, function: str, job_id: str, *arguments: Argument) -> Call:
        return function, self._keys.of_job(job_id), (job_id, *arguments)

    def _inboxes(self, tenants: Iterable[str | None]) -> tuple[list[bytes], list[bytes]]:
        """Return the inboxes of tenants (None: the inbox for all), and `shortened` of each."""
        names = list(tenants)
        return [*map(self._keys.inbox_of, names)], [*map(self._keys.shortened_of, names)]

    def open(
        self, job_id: str, *, tenant: str, priority: int, deadline: float | None, key: str, source: Source
    ) -> Call:
        refuses_passed = 1 if source == "submit" else 0
        return self._of_job("open", job_id, tenant, priority, deadline or 0, key, source, refuses_passed, 1)

    def store(
        self,
        job_id: str,
        lines: Sequence[Line],
        *,
        prefix_key: int,
        closes: bool,
        num_lines: int = 0,
        tenant: str | None = None,
    ) -> Call:
        """Store lines from an inbox: that of `tenant`, or the inbox for all if it is None."""
        (inbox,), (shortened,) = self._inboxes([tenant])
        of_tenant = {self._keys.inbox: inbox, self._keys.shortened: shortened}
        keys = [of_tenant.get(key, key) for key in self._keys.of_job(job_id)]
        return "store", keys, (job_id, "inbox", -1 - num_lines, int(closes), prefix_key, *_arguments(lines))

    def append(
        self, job_id: str, before: int, lines: Sequence[Line], *, digest: str, prefix_key: int, closes: bool
    ) -> Call:
        """Store lines of a submission that has stored `before` lines. `digest` is that of all these lines together."""
        arguments = (job_id, "submit", before, int(closes), prefix_key, *_arguments(lines))
        return "append", self._keys.of_job(job_id), (digest, *arguments)

    def begin_intake(self, owner: str, limit: int, *, seconds: float, max_bytes: int, tenants: Sequence[str]) -> Call:
        (inbox, *of_tenants), shortened = self._inboxes([None, *tenants])
        keys = (inbox, self._keys.intake, *of_tenants, *shortened)
        return "begin_intake", keys, (owner, limit, seconds, max_bytes, 1)

    def end_intake(self, owner: str, used_up: Iterable[str | None] = ()) -> Call:
        """`used_up` names the tenants whose inbox had the last id of all; None: the inbox for all."""
        inboxes, shortened = self._inboxes(used_up)
        return "end_intake", (self._keys.intake, *inboxes, *shortened), (owner, 1)

    def demand(self) -> Call:
        return "demand", (self._keys.groups, self._keys.held), ()

    def first_ranks(self, each: int, starts: Sequence[str]) -> Call:
        """The function `look`. `starts` has the prefix of a group, or the rank in it behind which to read."""
        return "look", (self._keys.ready,), (each, *starts)

    def read(self, job_ids: Sequence[str]) -> Call:
        return "read", [self._keys.job(job_id) for job_id in job_ids], ()

    def heads(self, job_ids: Sequence[str]) -> Call:
        return "heads", [self._keys.job(job_id) for job_id in job_ids], ()

    def results(self, job_id: str, after: bytes, limit: int, earlier: bytes = b"0") -> Call:
        return "results", (self._keys.part(job_id, "results"),), (after, limit, earlier)

    def claim(self, job_id: str, n: int, worker: str, skipped: Iterable[int] = ()) -> Call:
        """`skipped`: numbers of models, without the items that are set aside for them. 0: without all such items."""
        return self._of_job("claim", job_id, n, worker, *skipped)

    def heartbeat(self, job_id: str, leases: Sequence[tuple[int, int]]) -> Call:
        """`leases` has the index and the token of each lease."""
        return self._of_job("heartbeat", job_id, *(number for lease in leases for number in lease))

    def progress(self, job_id: str, progress: Sequence[tuple[int, int, int]]) -> Call:
        """`progress`: index and token of each lease, and the tokens computed."""
        return self._of_job("progress", job_id, *(number for lease in progress for number in lease))

    def finish(self, job_id: str, worker: str, finished: Sequence[Finished]) -> Call:
        return self._of_job("finish", job_id, worker, *(value for item in finished for value in (*item, "", "")))

    def give_back(self, job_id: str, index: int, token: int, prefix: str, *, unserved_model: int = 0) -> Call:
        """`unserved_model`: the number of the model that the item names, if the worker serves another one."""
        return self._of_job("give_back", job_id, index, token, prefix, int(unserved_model > 0), unserved_model)

    def retry(
        self, job_id: str, index: int, token: int, *, code: str, message: str, again: bool, status: int, jitter: float
    ) -> Call:
        return self._of_job("retry", job_id, index, token, code, message, int(again), status, jitter)

    def due(self, limit: int) -> Call:
        return "due", (self._keys.timers,), (limit,)

    def begin_timers(self) -> Call:
        """The second function under the name `postpone`, which notes the time. An older library does nothing then."""
        return "postpone", (self._keys.timers, self._keys.totals, self._keys.settings), ()

    def postpone(self, timers: Sequence[bytes]) -> Call:
        return "postpone", (self._keys.timers,), timers

    def expire_leases(self, job_id: str, limit: int) -> Call:
        return self._of_job("expire_leases", job_id, limit)

    def wake(self, job_id: str, limit: int) -> Call:
        return self._of_job("wake", job_id, limit)

    def begin_end(self, job_id: str, ending: Literal["cancelled", "expired"]) -> Call:
        return self._of_job("begin_end", job_id, ending)

    def sweep(self, job_id: str, limit: int) -> Call:
        return self._of_job("sweep", job_id, limit)

    def forget(self, job_id: str) -> Call:
        return self._of_job("forget", job_id)

    def delete(self, job_id: str) -> Call:
        """The function `forget` for a user, who deletes a job that is over before the end of its retention."""
        return self._of_job("forget", job_id, 1)

    def hold(self, job_id: str, how: Literal["paused", "resumed"]) -> Call:
        return self._of_job("hold", job_id, how)

    def redrive(self, job_id: str, limit: int, cursor: bytes, *, takes_all: bool) -> Call:
        return self._of_job("redrive", job_id, limit, cursor, int(takes_all))

    def appraise(self, job_id: str, outlook: str, because: str) -> Call:
        return self._of_job("appraise", job_id, outlook, because)

    def take_turn(self, seconds: float) -> Call:
        return "take_turn", (self._keys.forecast,), (seconds,)

    def stats(self, tenants: Sequence[str]) -> Call:
        (inbox, *of_tenants), shortened = self._inboxes([None, *tenants])
        return "stats", (self._keys.totals, inbox, self._keys.backlog, *of_tenants, *shortened), ()

    def set_settings(
        self, owner: str, rank: int, created: float, generation: int, *, text: str, numbers: dict[str, float]
    ) -> Call:
        pairs = [value for pair in numbers.items() for value in pair]
        return "set_settings", (self._keys.settings,), (owner, rank, created, generation, text, *pairs)

    def declare(self, tenants: Sequence[str]) -> Call:
        return "declare", (self._keys.declared,), tenants

    def lengths(self, tenants: Sequence[str]) -> Call:
        """Of the inboxes of these tenants, then of `shortened` of each."""
        inboxes, shortened = self._inboxes(tenants)
        return "lengths", (*inboxes, *shortened), ()

    def renew_settings(self, owner: str) -> Call:
        return "renew_settings", (self._keys.settings,), (owner, 1)

    def drop_settings(self, owner: str) -> Call:
        return "drop_settings", (self._keys.settings,), (owner,)

    def charge(self, costs: Sequence[tuple[str, float]]) -> Call:
        return "charge", (self._keys.service,), [value for pair in costs for value in pair]

    def lift(self, level: float, tenants: Sequence[str]) -> Call:
        return "lift", (self._keys.service,), (level, *tenants)

    def forget_service(self, known: Sequence[tuple[str, str]]) -> Call:
        return "forget_service", (self._keys.service,), [value for pair in known for value in pair]

    def publish_status(self, worker: str, seconds: float, text: str) -> Call:
        """`seconds` 0 removes the status."""
        return "publish_status", (self._keys.workers, self._keys.statuses), (worker, seconds, text)

    def statuses(self) -> Call:
        return "statuses", (self._keys.workers, self._keys.statuses), ()

    def remove_keys(self, cursor: bytes, pattern: str) -> Call:
        return "remove_keys", (self._keys.totals,), (cursor, pattern)

    def now(self) -> Call:
        """With a key, so that in a cluster the server of the queue answers."""
        return "now", (self._keys.totals,), ()
