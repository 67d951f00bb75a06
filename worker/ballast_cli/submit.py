"""`ballast submit`: submit a file of requests to the queue as a job."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple
from uuid import uuid4

import typer

from ballast_cli.connection import AsJson, CaFile, PasswordFile, Place, QueueName, RedisUrl, open_inbox, open_queue
from ballast_cli.console import examples, print_json, say
from ballast_cli.deadlines import Deadline, parse_deadline, spoken
from ballast_cli.errors import CliError, NotNow, SubmitterOnly, Usage
from ballast_cli.interrupts import interruptible
from ballast_cli.watch import progress, waiting, watch
from ballast_openai.errors import counted
from ballast_queue.errors import DeadlinePassed, InvalidSubmission, JobStateConflict, OtherLines, QueueError
from ballast_queue.job import Job, Outlook
from ballast_worker.forecast import Forecast

if TYPE_CHECKING:
    from ballast_queue.job import Submission
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast submit items.jsonl --watch",
    "ballast submit items.jsonl --tenant research --priority 5 --deadline 24h",
    "ballast submit items.jsonl --key nightly-2030-01-31   # a repetition returns the same job",
    "zcat items.jsonl.gz | ballast submit - --deadline 2030-01-31T18:00Z",
)


_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")
"""First bytes of gzip, zstd, bzip2, xz and zip files."""
_ANSWERS = {
    Outlook.YES: "It can be met",
    Outlook.AT_RISK: "It is AT RISK",
    Outlook.NO: "It will be MISSED at the present rates, even alone",
    Outlook.UNKNOWN: "Whether it can be met is unknown",
}


def submit(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL in the OpenAI batch format; - reads stdin.")],
    tenant: Annotated[str, typer.Option(help="Tenant that is charged.")] = "default",
    priority: Annotated[int, typer.Option(help="Priority. Higher is more important.")] = 0,
    deadline: Annotated[
        str | None, typer.Option(help="Deadline: 24h, +30m, 1h30m, or 2030-01-31T18:00Z (local time without a zone).")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Idempotency key. The same lines with the same key are one job, however often you submit them. Other "
            "lines with the same key are refused."
        ),
    ] = None,
    is_watched: Annotated[bool, typer.Option("--watch", "-w", help="Show progress until the job is over.")] = False,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id. Each line of the file is a request: `custom_id`, `method`, `url`, and `body`.

    A user of Redis that may only submit (`spec.queueAccess.submitters`) submits through the inbox of the queue, without
    --key, --watch and a forecast. Workers validate the lines then.
    """
    if key == "":
        raise Usage("--key is empty. Name a key, or omit the option.")
    due = None if deadline is None else parse_deadline(deadline, time.time())
    place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
    try:
        with (
            interruptible(),
            open_queue(place) as connected,
            _opened(file, connected.settings.read().max_line_bytes) as source,
        ):
            connected.require_fit()
            # A time before the epoch is no time of a job, and has passed as well as this one.
            due_at = None if due is None else max(1.0, due.at(connected.now()))
            # Every submission has a key, so that it can be resumed after any interruption.
            own_key = key or f"cli-{uuid4().hex[:12]}"
            with (
                _resumable(own_key),
                _one_file(own_key, file, place),
                _in_time(due, connected),
                progress("Submitting", source.num_lines) as advance,
            ):
                done = connected.submissions.submit(
                    source.lines,
                    tenant=tenant,
                    priority=priority,
                    deadline=due_at,
                    key=own_key,
                    on_progress=advance,
                    attempt=waiting,
                )
            with _named(done.job_id, f" with the key {shlex.quote(own_key)}: do not submit the lines without this key"):
                if not as_json:  # at once: whatever fails from here on, the job is stored
                    sys.stdout.write(f"{done.job_id}\n")
                    sys.stdout.flush()
                seen = _seen(connected, done.job_id, place, has_deadline=due is not None)
                _report(done, seen, priority, file=file, place=place, as_json=as_json)
            is_cut_short = not done.is_new and seen.job is not None and seen.job.state.is_cut_short
            if not done.accepted and not is_cut_short:  # such a job may have no line yet
                raise CliError(
                    f"No line of {file} is valid. `ballast results {done.job_id}{place.options}` lists the error of "
                    "each line."
                )
            if not as_json and done.is_new and not seen.is_served:
                say(
                    f"No worker serves queue {place.queue} now. `ballast job {done.job_id}{place.options}` shows when "
                    "the job starts."
                )
            if is_watched:
                watch(connected, done.job_id, options=place.options)
            elif is_cut_short and seen.job is not None:
                raise NotNow(
                    f"{done.job_id} is {seen.job.state}, and takes no lines. Use another key to submit the lines again."
                )
    except SubmitterOnly:
        if key is not None or is_watched:
            raise Usage(
                "--key and --watch: the user of Redis may only submit. Use a worker's user, or omit them."
            ) from None
        now = time.time()  # a submitter may not ask for the time of the queue
        due_at = None if due is None else due.by(now, now)
        job_id, num_lines = _submit_to_inbox(place, file, tenant, priority, due_at)
        with _named(job_id, ""):
            if as_json:
                print_json({"version": 1, "queue": place.queue, "job_id": job_id, "lines": num_lines})
                return
            sys.stdout.write(f"{job_id}\n")
            sys.stdout.flush()
        say(f"{counted(num_lines, 'line')} of {file} added to the inbox of {place.queue}. Workers validate them.")


def _submit_to_inbox(place: Place, file: str, tenant: str, priority: int, deadline: float | None) -> tuple[str, int]:
    """Submit as a user that may only add to an inbox. Return the id of the job, and the number of its lines."""
    from ballast_queue.inbox_writer import MOST_ENTRY_BYTES  # noqa: PLC0415  `ballast --help` needs no redis
    from ballast_queue.submissions import Terms  # noqa: PLC0415  `ballast --help` needs no redis

    try:
        with (
            interruptible(),
            open_inbox(place) as inbox,
            # Workers apply the limit of the queue, which a submitter may not read.
            _opened(file, MOST_ENTRY_BYTES) as source,
            progress("Submitting", source.num_lines) as advance,
        ):
            return inbox.submit(source.lines, Terms(tenant, priority, deadline), on_progress=advance)
    except KeyboardInterrupt as error:
        say(" ".join(["Interrupted.", *(f"{note[:1].upper()}{note[1:]}." for note in getattr(error, "__notes__", ()))]))
        raise


@contextmanager
def _resumable(key: str) -> Iterator[None]:
    """Print how to resume the submission if it is interrupted or fails."""
    try:
        yield
    except (InvalidSubmission, JobStateConflict):  # a repetition fails in the same way, or adds nothing
        raise
    except (KeyboardInterrupt, QueueError):
        say(f"Interrupted. Run the same command with --key {shlex.quote(key)} to resume.")
        raise


@contextmanager
def _named(job_id: str, more: str) -> Iterator[None]:
    """Name a stored job if its ID cannot be written, or the command is interrupted first."""
    try:
        yield
    except (KeyboardInterrupt, OSError):
        say(f"{job_id} is stored{more}.")
        raise


@contextmanager
def _in_time(due: Deadline | None, queue: Queue) -> Iterator[None]:
    """Explain a deadline that has passed. It refuses a new job only: the store knows whether the key names a job."""
    try:
        yield
    except DeadlinePassed:
        if due is None:
            raise
        raise due.passed(queue.now(), time.time()) from None


@contextmanager
def _one_file(key: str, file: str, place: Place) -> Iterator[None]:
    """Name the job if the key belongs to other lines."""
    try:
        yield
    except OtherLines as error:
        name = "standard input" if file == "-" else file
        found = "other ones" if error.num_found == error.num_kept else f"{error.num_found:,}"
        raise Usage(
            f"--key {key} names {error.job_id}, which has {counted(error.num_kept, 'line')}, but {name} has {found}. "
            "The job stays as it is. Use another key for other lines. "
            f"`ballast job {error.job_id}{place.options}` shows the job."
        ) from None


class _Source(NamedTuple):
    lines: Iterable[bytes]
    num_lines: int | None = None
    """None for standard input and a pipe, which can be read once."""


@contextmanager
def _opened(file: str, most: int) -> Iterator[_Source]:
    """Open the file and count its lines. Lines of standard input and of a pipe are not counted.

    No line is read into memory beyond `most` bytes.

    Raises:
        Usage: there is no such file, it is a directory, it is empty, or it is no JSONL.
    """
    from ballast_queue.batch_lines import bounded_lines  # noqa: PLC0415  `ballast --help` needs no redis

    if file == "-":
        if sys.stdin is None:
            raise Usage("Standard input is closed. Name a JSONL file, or pass lines on standard input.")
        if sys.stdin.isatty():
            say("Reading lines from the terminal. Press Ctrl-D to end.")
        yield _Source(_jsonl(bounded_lines(sys.stdin.buffer, most), "standard input"))
        return
    path = Path(file)
    if "://" in file and not path.exists():
        raise Usage(
            f"{file} is a URL, and this command reads files. Copy it first, or pass its lines on standard input: "
            "`aws s3 cp s3://bucket/items.jsonl - | ballast submit -`."
        )
    if path.is_dir():
        raise Usage(f"{file} is a directory, expected a JSONL file with one request on each line.")
    try:
        opened: BinaryIO = path.open("rb")
    except OSError as error:
        raise Usage(f"{file} cannot be read ({error.strerror}). Name a JSONL file, or - for standard input.") from None
    with opened:
        if not opened.seekable():  # a pipe such as <(zcat items.jsonl.gz) can be read once
            yield _Source(_jsonl(bounded_lines(opened, most), file))
            return
        num_lines, is_empty = 0, True
        for line in bounded_lines(opened, most):
            num_lines += 1
            is_empty = is_empty and not line.strip()
        if is_empty:
            raise Usage(f"{file} is empty, expected one request on each line: {{custom_id, method, url, body}}.")
        opened.seek(0)
        yield _Source(_jsonl(bounded_lines(opened, most), file), num_lines)


def _jsonl(lines: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Return the lines; raise `Usage` if the first one that is not blank shows that no line is a request."""
    num_blank, first, content = _next_line(lines)
    if first.startswith(_COMPRESSED):
        raise Usage(f"{name} is compressed. Unpack it first, for example: `zcat items.jsonl.gz | ballast submit -`.")
    if first.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in first[:4]:
        raise Usage(f"{name} is no UTF-8 text. Name a JSONL file, or save UTF-16 as UTF-8.")
    if content == b"{":
        raise Usage(
            f"{name} is JSON over several lines, expected JSONL with one request on each line. "
            "`jq -c . items.json | ballast submit -` converts it."
        )
    head = [repeat(b"\n", num_blank), [first] if first else []]
    if content.startswith(b"["):
        num_more, second, _ = _next_line(lines)
        if not second or not _is_json(content):
            raise Usage(
                f"{name} is a JSON array, expected JSONL with one request on each line. "
                "`jq -c '.[]' items.json | ballast submit -` converts it."
            )
        head += [repeat(b"\n", num_more), [second]]
    return chain(*head, lines)


def _next_line(lines: Iterator[bytes]) -> tuple[int, bytes, bytes]:
    """Return how many blank lines come next, the line after them, and its content; b"" at the end."""
    from ballast_queue.batch_lines import content_of  # noqa: PLC0415  `ballast --help` needs no redis

    num_blank = 0
    for line in lines:
        if content := content_of(line):
            return num_blank, line, content
        num_blank += 1
    return num_blank, b"", b""


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Seen(NamedTuple):
    """The queue after the submission."""

    job: Job | None
    """None: unknown."""
    outlook: tuple[Outlook, str] | None
    now: float
    """The time of the queue."""
    is_served: bool = True


def _seen(queue: Queue, job_id: str, place: Place, *, has_deadline: bool) -> _Seen:
    """Read the job, its outlook, and whether a worker serves the queue. If this fails, they are unknown."""
    job = outlook = None
    now = time.time()
    try:
        now = queue.now()
        job = queue.jobs.get(job_id)
        if has_deadline and job.deadline is not None and not job.state.is_over:
            outlook = _outlook(queue, job)
        return _Seen(job, outlook, now, bool(queue.workers.statuses()))
    except QueueError:
        say(
            f"{job_id} is stored: do not submit it again. Redis failed afterwards. `ballast job {job_id}"
            f"{place.options}` shows the job."
        )
        unknown = (Outlook.UNKNOWN, "Redis failed after the submission") if has_deadline else None
        return _Seen(job, outlook or unknown, now)


def _outlook(queue: Queue, job: Job) -> tuple[Outlook, str]:
    """Forecast whether the job meets its deadline, and record the outlook in the job."""
    weights = {tenant.name: tenant.weight for tenant in queue.settings.read().tenants}
    forecast = Forecast(queue.jobs.active(), queue.workers.statuses(), queue.now(), weights)
    outlook, because = forecast.of(job)
    queue.jobs.record_outlooks([(job.id, outlook, because)])
    return outlook, because


def _report(done: Submission, seen: _Seen, priority: int, *, file: str, place: Place, as_json: bool) -> None:
    job, outlook = seen.job, seen.outlook
    deadline = job.deadline if job is not None else None
    if as_json:
        print_json(
            {
                "version": 1,
                "queue": place.queue,
                "job_id": done.job_id,
                "accepted": done.accepted,
                "rejected": done.rejected,
                "is_new": done.is_new,
                "was_closed": done.was_closed,
                "state": job.state if job is not None else None,
                "deadline": {"at": deadline, "feasible": outlook[0], "because": outlook[1]} if outlook else None,
            }
        )
        return
    if done.was_closed:
        state = f" with {counted(job.counts.total, 'item')}, {job.state}" if job is not None else ""
        say(f"A job with this key exists: {done.job_id}{state}. Nothing was added, and its priority and deadline stay.")
    else:
        continued = "" if done.is_new else f" in all, with those that {done.job_id} had before"
        rejected = f", {done.rejected:,} rejected (`ballast results {done.job_id}{place.options}` lists the errors)"
        say(f"{counted(done.accepted, 'item')} of {file} accepted{continued}{rejected if done.rejected else ''}.")
        if not done.is_new and job is not None:
            until = "no deadline" if deadline is None else f"its deadline, {spoken(deadline, seen.now)}"
            say(f"The job keeps its priority, {job.priority}, and {until}: a repetition does not change them.")
        if done.is_new and job is not None and job.priority < priority:
            say(f"The job has the priority {job.priority}, the maximum of tenant {job.tenant} (maxPriority).")
    if outlook and deadline is not None:
        say(f"Deadline {spoken(deadline, seen.now)}. {_ANSWERS[outlook[0]]}: {outlook[1]}.")
        if outlook[0] in {Outlook.AT_RISK, Outlook.NO}:
            say(f"Results until then are kept. `ballast cancel {done.job_id}{place.options}` cancels the job.")
