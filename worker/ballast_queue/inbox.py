"""Turn the entries of the inbox into jobs.

`XADD ballast:{<queue>}:inbox * item <line> job <id> tenant <name> priority <n> deadline <unix seconds>`. The first
entry of a job sets its tenant, priority and deadline. An entry with `end 1` closes the job. If it has `lines <number>`
and the job has fewer lines then, the job gets an error result that states so. An entry without `job` is a job of its
own. A wrong entry becomes an error result.

A queue that declares its tenants has one inbox for each: `ballast:{<queue>}:inbox:<tenant>`. The rules of the writer's
user in Redis name the inbox, so the inbox proves the tenant. A name in it becomes the job `<name>@<tenant>`, so that no
tenant takes the name of another's job. The queue then refuses entries of the inbox for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex

from ballast_log import Log
from ballast_openai.errors import InvalidBody, describe
from ballast_queue.batch_lines import CHUNK_LINES, MOST_LINE_END, read_line, reject, wrong
from ballast_queue.errors import InvalidJob, RefusedCall, UnknownTenant, UnreadableValue
from ballast_queue.function_library import Call
from ballast_queue.functions import Line
from ballast_queue.records import readable
from ballast_queue.settings import QueueSettings, check_name
from ballast_queue.settings_store import SettingsStore
from ballast_queue.store import Store
from ballast_queue.submissions import Opened, Terms, check_deadline, job_of_tenant, open_inbox_jobs
from ballast_queue.unreadable import text_of

log = Log(__name__)

INTAKE_SECONDS = 5.0
"""How long a worker that died while it read the inbox blocks the other workers."""
LAST_MILLISECONDS = 2**64 - 1
"""The largest time in the id of an entry. A writer that chose it leaves other writers few ids, or none."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
"""Without colons: the record of a job `x:items` would have the key of the items of job `x`."""
_FIELDS = frozenset({"item", "job", "tenant", "priority", "deadline", "end", "lines"})
_NUMBER = re.compile(r"[0-9]{1,15}")
_ENDS = {"1": True, "true": True, "0": False, "false": False, "": False}
_DEFAULT_TENANT = "default"
_OWN_JOB = re.compile(r"inbox-(.+-)?\d+-\d+")
"""The ids of jobs that entries become. No writer may choose such an id."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as its writer added it."""

    id: bytes
    item: bytes | None
    fields: dict[str, str]
    tenant: str | None = None
    """The tenant whose inbox has the entry; None: the inbox for all."""

    @property
    def own_job(self) -> str:
        """Id of the job that the entry becomes if it can join no other."""
        return "-".join(("inbox", *([] if self.tenant is None else [self.tenant]), self.id.decode()))

    @property
    def job(self) -> str:
        """Id of the job that the entry names, or of its own job if the name is not usable."""
        name = self.fields.get("job", "")
        if not _JOB_ID.fullmatch(name) or _OWN_JOB.fullmatch(name):
            return self.own_job
        return name if self.tenant is None else job_of_tenant(name, self.tenant)

    @property
    def rank(self) -> tuple[int, int, str]:
        """When it came: its id, and for equal ones the tenant."""
        milliseconds, sequence = map(int, self.id.split(b"-"))
        return milliseconds, sequence, self.tenant or ""

    @property
    def closes(self) -> bool:
        return _ENDS.get(self.fields.get("end", ""), False)

    @property
    def num_lines(self) -> int:
        """Lines that the job should have when this entry closes it; 0: any number."""
        text = self.fields.get("lines", "")
        return int(text) if self.closes and _NUMBER.fullmatch(text) else 0


_EntriesOfJob = tuple[str, list[Entry]]
"""The id of a job, and entries of one inbox for it."""


@dataclass(frozen=True, slots=True)
class InboxReader:
    """The inbox of a queue.

    An entry leaves the inbox in the same step that stores its line, so a crash loses none.
    """

    _store: Store
    _settings: SettingsStore

    def take_in(self, limit: int = 500) -> int:
        """Move up to `limit` entries into jobs. Return how many there were, or 0 if another worker reads the inbox.

        The entries of a job whose record cannot be read become rejected jobs of their own.

        Raises:
            QueueFull: Redis has no memory for the entries, which stay in the inbox.
            RefusedCall, UnreadableValue: some entries stay in the inbox, and the others were moved.
        """
        owner, settings = token_hex(8), self._settings.read()
        tenants = [tenant.name for tenant in settings.tenants]
        call = self._store.functions.begin_intake(
            owner,
            limit,
            seconds=INTAKE_SECONDS,
            max_bytes=settings.max_line_bytes + MOST_LINE_END,
            tenants=tenants,
        )
        replies = self._store.call(call)
        if not replies:
            return 0
        used_up: set[str | None] = set()
        try:
            jobs: dict[tuple[str | None, str], list[Entry]] = {}
            for entry in sorted((_entry(tenants, *reply) for reply in replies), key=lambda entry: entry.rank):
                if entry.rank[0] == LAST_MILLISECONDS:
                    used_up.add(entry.tenant)
                # The inbox for all proves no tenant. In a queue with tenants, no entry of it joins a job.
                job_id = entry.own_job if tenants and entry.tenant is None else entry.job
                jobs.setdefault((entry.tenant, job_id), []).append(entry)
            self._take_all([(job_id, entries) for (_, job_id), entries in jobs.items()], settings)
        finally:
            self._store.call(self._store.functions.end_intake(owner, used_up))
        return len(replies)

    @readable("the inboxes")
    def unread(self) -> dict[str, int]:
        """Return the tenants that the queue no longer declares, and the number of entries of their inboxes.

        No worker reads these entries. They stay, so that a tenant that was left out by mistake loses none.
        """
        store = self._store
        declared = [text_of(tenant) for tenant in store.connection.members(store.keys.declared, 0, -1)]
        former = sorted(set(declared) - set(self._settings.tenants()))
        lengths = store.call(store.functions.lengths(former)) if former else []
        pairs = zip(former, lengths[: len(former)], lengths[len(former) :], strict=True)
        return {tenant: waiting + shortened for tenant, waiting, shortened in pairs if waiting + shortened}

    def _take_all(self, jobs: Sequence[_EntriesOfJob], settings: QueueSettings) -> None:
        """Store the entries of jobs. The entries of a job that cannot be used become jobs of their own."""
        unusable, refused = self._take_usable(jobs, settings)
        if unusable:
            self._take_all([(entry.own_job, [entry]) for _, entries in unusable for entry in entries], settings)
        if refused is not None:
            raise refused

    def _take_usable(
        self, jobs: Sequence[_EntriesOfJob], settings: QueueSettings
    ) -> tuple[list[_EntriesOfJob], RefusedCall | UnreadableValue | None]:
        """Store the entries of jobs. Return the jobs that cannot be used, and why some entries stay.

        If a job cannot be read, each half of them is stored alone, until the job is.
        """
        try:
            return self._take(jobs, settings), None
        except (RefusedCall, UnreadableValue) as error:
            middle = len(jobs) // 2
            if middle:
                first, refused_first = self._take_usable(jobs[:middle], settings)
                second, refused_second = self._take_usable(jobs[middle:], settings)
                return first + second, refused_first or refused_second
            job_id, entries = jobs[0]
            self._store.unreadable.skip(f"job {job_id}")
            return ([], error) if job_id == entries[0].own_job else (list(jobs), None)

    def _take(self, jobs: Sequence[_EntriesOfJob], settings: QueueSettings) -> list[_EntriesOfJob]:
        """Store the lines of entries in jobs, in two round trips. Return the jobs that no inbox may add to.

        Raises:
            RefusedCall, UnreadableValue: a value of one of the jobs cannot be read. The call may be repeated.
        """
        opened = open_inbox_jobs(self._store, [(job_id, _terms(entries[0], settings)) for job_id, entries in jobs])
        submitted: list[_EntriesOfJob] = []
        calls: list[Call] = []
        for job, (job_id, entries) in zip(opened, jobs, strict=True):
            if job.source != "inbox" and job_id != entries[0].own_job:
                submitted.append((job_id, entries))
            else:
                calls += self._calls(job, entries, settings)
        self._store.connection.call_many(calls)
        return submitted

    def _calls(self, job: Opened, entries: Sequence[Entry], settings: QueueSettings) -> Iterator[Call]:
        """Yield the calls that store the lines of entries in a job."""
        lines: list[Line] = []
        prefix_key = 0
        for entry in entries:
            line, key = _line(entry, job.job_id, job.tenant, settings)
            lines.append(line)
            prefix_key = prefix_key or key
            closes = entry.closes or job.job_id == entry.own_job
            if closes or len(lines) == CHUNK_LINES or entry is entries[-1]:
                num_lines = 0 if job.job_id == entry.own_job else entry.num_lines
                yield self._store.functions.store(
                    job.job_id, lines, prefix_key=prefix_key, closes=closes, num_lines=num_lines, tenant=entry.tenant
                )
                lines, prefix_key = [], 0


def _entry(tenants: Sequence[str], entry_id: bytes, pairs: Sequence[bytes], position: int = 0) -> Entry:
    item, fields = None, {}
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        if name == b"item":
            item = value
        else:
            fields[name.decode(errors="replace")] = value.decode(errors="replace")
    return Entry(entry_id, item, fields, tenants[position - 1] if position else None)


def _read_priority(fields: dict[str, str]) -> int:
    text = fields.get("priority", "0")
    try:
        return int(text)
    except ValueError:
        raise InvalidJob(f"priority: found {describe(text)}, expected an integer") from None


def _read_deadline(fields: dict[str, str]) -> float | None:
    text = fields.get("deadline")
    if text is None:
        return None
    try:
        deadline = float(text)
    except ValueError:
        raise InvalidJob(f"deadline: found {describe(text)}, expected Unix seconds") from None
    return check_deadline(deadline)


def _terms(entry: Entry, settings: QueueSettings) -> Terms:
    """Return the terms of the job that `entry` opens. A wrong value counts as its default (see `_problems`)."""
    tenant, priority, deadline = entry.tenant or entry.fields.get("tenant", _DEFAULT_TENANT), 0, None
    try:
        check_name("tenant", tenant)
    except InvalidJob:
        tenant = _DEFAULT_TENANT
    if settings.tenants and entry.tenant is None:
        return Terms(_DEFAULT_TENANT)
    try:
        priority = settings.priority_of(tenant, _read_priority(entry.fields))
        deadline = _read_deadline(entry.fields)
    except InvalidJob:
        pass
    return Terms(tenant, priority, deadline)


def _problems(entry: Entry, job_id: str, tenant: str, settings: QueueSettings) -> Iterator[InvalidBody]:
    fields = entry.fields
    if settings.tenants and entry.tenant is None:
        message = (
            "tenant: found the inbox for all, expected the inbox of a tenant, since this queue declares its tenants"
        )
        yield InvalidBody("tenant", message, "unknown_tenant")
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        found = f"an unknown field ({describe(unknown[0])})"
        yield wrong("entry", found, ", ".join(sorted(_FIELDS)), code="invalid_entry")
    if "job" in fields and job_id == entry.own_job:
        wanted = (
            "an id of at most 128 letters, digits and . _ / - that no submitted job and no job with unreadable values "
            "has, and no id of an inbox entry"
        )
        yield wrong("job", describe(fields["job"]), wanted, code="invalid_job")
    if fields.get("end", "") not in _ENDS:
        yield wrong("end", describe(fields["end"]), "1 in the last entry of a job", code="invalid_entry")
    if not _NUMBER.fullmatch(fields.get("lines", "0")):
        yield wrong("lines", describe(fields["lines"]), "the number of items of the job", code="invalid_entry")
    try:
        check_name("tenant", fields.get("tenant", tenant))
        settings.priority_of(fields.get("tenant", tenant), _read_priority(fields))
        _read_deadline(fields)
    except UnknownTenant as error:
        yield InvalidBody("tenant", str(error), "unknown_tenant")
    except InvalidJob as error:
        yield InvalidBody(None, str(error), "invalid_entry")
    if fields.get("tenant", tenant) != tenant:
        yield wrong("tenant", describe(fields["tenant"]), "the tenant of the job's first entry", code="wrong_tenant")


def _line(entry: Entry, job_id: str, tenant: str, settings: QueueSettings) -> tuple[Line, int]:
    """Return the line of an entry and its prefix key (0: it is rejected)."""
    try:
        line, key = _validated(entry, job_id, tenant, settings)
    except Exception:  # a defect must not keep the entry, and all behind it, in the inbox
        log.exception("inbox entry cannot be read, it is rejected", entry=entry.id.decode())
        message = "entry: found values on which the worker failed, expected a line that `ballast submit` accepts"
        line, key = reject("", InvalidBody(None, message, "unreadable_entry")), 0
    return line._replace(entry=entry.id), key


def _validated(entry: Entry, job_id: str, tenant: str, settings: QueueSettings) -> tuple[Line, int]:
    line, body = read_line(entry.item or b"", settings)
    if line.kind == "b" and not entry.closes:
        line = reject("", wrong("item", "nothing", "a line in OpenAI's batch format", code="invalid_entry"))
    for problem in _problems(entry, job_id, tenant, settings):
        line, body = reject(line.custom_id, problem), None
        break
    return line, body.prefix_key if body is not None else 0
