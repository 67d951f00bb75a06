"""How entries of the inbox become jobs, whoever wrote them.

`XADD ballast:{<queue>}:inbox * item <line> job <id> tenant <name> priority <n> deadline <unix seconds>`. The first
entry of a job decides tenant, priority and deadline; an entry with `end 1` closes the job. An entry without `job` is a
job of its own. What is wrong with an entry becomes its error result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex

from ballast_openai.errors import InvalidBody, describe
from ballast_queue.errors import InvalidJob, UnknownTenant
from ballast_queue.functions import Line
from ballast_queue.intake import CHUNK_LINES, prefix_key, read_line, reject
from ballast_queue.settings import QueueSettings
from ballast_queue.submission import Submitting, check_deadline, check_tenant

INTAKE_SECONDS = 5.0
"""How long a worker that died while it took the inbox in keeps the others from it."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
"""No colon: `x:items` would be a job whose record lies where the items of job `x` do."""
_FIELDS = frozenset({"item", "job", "tenant", "priority", "deadline", "end"})
_ENDS = {"1": True, "true": True, "0": False, "false": False, "": False}
_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, as its writer left it."""

    id: bytes
    item: bytes | None
    fields: dict[str, str]

    @property
    def own_job(self) -> str:
        """Id of the job that it becomes where it can join none."""
        return f"inbox-{self.id.decode()}"

    @property
    def closes(self) -> bool:
        return _ENDS.get(self.fields.get("end", ""), False)


class TakingIn(Submitting):
    """The side of the worker that takes the inbox in."""

    def take_in(self, limit: int = 500) -> int:
        """Move up to `limit` entries into jobs; give how many there were. Crash-safe: an entry leaves as it is stored.

        0 may also mean that another worker is at it.
        """
        owner = token_hex(8)
        replies = self._run(self._functions.begin_intake(owner, limit, INTAKE_SECONDS))
        if not replies:
            return 0
        try:
            settings = self.settings()
            jobs: dict[str, list[Entry]] = {}
            for entry in (_entry(*reply) for reply in replies):
                name = entry.fields.get("job", "")
                jobs.setdefault(name if _JOB_ID.fullmatch(name) else entry.own_job, []).append(entry)
            for job_id, entries in jobs.items():
                self._take(job_id, entries, settings)
        finally:
            self._run(self._functions.end_intake(owner))
        return len(replies)

    def _take(self, job_id: str, entries: Sequence[Entry], settings: QueueSettings) -> None:
        tenant, priority, deadline = _terms(entries[0], settings)
        job = self._open(job_id, tenant, priority, deadline, key="", source="inbox")
        if job.source != "inbox":
            # Its writer may not add to a job that came another way, perhaps from another tenant.
            for entry in entries:
                self._take(entry.own_job, [entry], settings)
            return
        lines: list[Line] = []
        group = 0
        for entry in entries:
            line, entry_group = _line(entry, job_id, job.tenant, settings)
            lines.append(line)
            group = group or entry_group
            closes = entry.closes or job_id == entry.own_job
            if closes or len(lines) == CHUNK_LINES or entry is entries[-1]:
                self._run(self._functions.store(job_id, "inbox", -1, lines, group=group, closes=closes))
                lines, group = [], 0


def _entry(entry_id: bytes, pairs: Sequence[bytes]) -> Entry:
    item, fields = None, {}
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        if name == b"item":
            item = value
        else:
            fields[name.decode(errors="replace")] = value.decode(errors="replace")
    return Entry(entry_id, item, fields)


def _read_priority(fields: dict[str, str]) -> int:
    text = fields.get("priority", "0")
    try:
        return int(text)
    except ValueError:
        raise InvalidJob(f"priority: found {describe(text)}, wanted an integer") from None


def _read_deadline(fields: dict[str, str]) -> float | None:
    text = fields.get("deadline")
    if text is None:
        return None
    try:
        deadline = float(text)
    except ValueError:
        raise InvalidJob(f"deadline: found {describe(text)}, wanted Unix seconds") from None
    return check_deadline(deadline)


def _terms(entry: Entry, settings: QueueSettings) -> tuple[str, int, float | None]:
    """Tenant, priority and deadline of the job that `entry` opens; a default where one is wrong (see `_problems`)."""
    tenant, priority, deadline = entry.fields.get("tenant", _DEFAULT_TENANT), 0, None
    try:
        check_tenant(tenant)
    except InvalidJob:
        tenant = _DEFAULT_TENANT
    try:
        priority = settings.priority_of(tenant, _read_priority(entry.fields))
        deadline = _read_deadline(entry.fields)
    except InvalidJob:
        pass
    return tenant, priority, deadline


def _problems(entry: Entry, job_id: str, tenant: str, settings: QueueSettings) -> Iterator[InvalidBody]:
    fields = entry.fields
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        yield InvalidBody(
            None,
            f"entry: found an unknown field ({describe(unknown[0])}), wanted {', '.join(sorted(_FIELDS))}",
            "invalid_entry",
        )
    if "job" in fields and fields["job"] != job_id:
        yield InvalidBody(
            "job",
            f"job: found {describe(fields['job'])}, wanted an id of at most 128 letters, digits and . _ / - that is "
            "not in use by a job submitted another way",
            "invalid_job",
        )
    if fields.get("end", "") not in _ENDS:
        yield InvalidBody(
            "end", f"end: found {describe(fields['end'])}, wanted 1 in the last entry of a job", "invalid_entry"
        )
    try:
        check_tenant(fields.get("tenant", tenant))
        settings.priority_of(fields.get("tenant", tenant), _read_priority(fields))
        _read_deadline(fields)
    except UnknownTenant as error:
        yield InvalidBody("tenant", str(error), "unknown_tenant")
    except InvalidJob as error:
        yield InvalidBody(None, str(error), "invalid_entry")
    if fields.get("tenant", tenant) != tenant:
        yield InvalidBody(
            "tenant",
            f"tenant: found {describe(fields['tenant'])}, wanted that of the job's first entry",
            "wrong_tenant",
        )


def _line(entry: Entry, job_id: str, tenant: str, settings: QueueSettings) -> tuple[Line, int]:
    """Validate an entry; give its line and prefix group."""
    line, body = read_line(entry.item or b"", settings)
    if line.kind == "b" and not entry.closes:
        problem = InvalidBody("item", "item: found nothing, wanted a line in OpenAI's batch format", "invalid_entry")
        line = reject("", problem)
    for problem in _problems(entry, job_id, tenant, settings):
        line, body = reject(line.custom_id, problem), None
        break
    return line._replace(entry=entry.id), prefix_key(body) if body is not None else 0
