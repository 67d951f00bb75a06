"""`ballast submit`: hand a file of requests to the queue."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO
from uuid import uuid4

import typer

from ballast_cli.connection import AsJson, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, say
from ballast_cli.deadlines import Deadline, parse_deadline
from ballast_cli.errors import CliError, Usage
from ballast_cli.feasibility import Feasibility, Work, assess
from ballast_cli.watch import progress, watch
from ballast_queue.body import COUNT_LIMIT
from ballast_queue.errors import QueueFull, QueueUnavailable

if TYPE_CHECKING:
    from ballast_queue.job import Submission
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast submit items.jsonl --watch",
    "ballast submit items.jsonl --tenant research --priority 5 --deadline 24h",
    "ballast submit items.jsonl --key nightly-2030-01-31   # again is harmless: same job",
    "zcat items.jsonl.gz | ballast submit - --deadline 2030-01-31T18:00Z",
)


@dataclass(slots=True)
class _Lines:
    """Passes lines on and adds up what they ask for."""

    source: Iterable[bytes]
    items: int = 0
    output_tokens: int = 0
    unbounded: int = 0
    """Items that state no output limit."""
    wants_tokens: bool = field(default=False)

    def __iter__(self) -> Iterator[bytes]:
        for line in self.source:
            if line.strip():
                self.items += 1
                if self.wants_tokens:
                    self._add(line)
            yield line

    def _add(self, line: bytes) -> None:
        try:
            body: Any = json.loads(line)["body"]
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # the validator says what is wrong with it
        if not isinstance(limit, int):
            self.unbounded += 1
        elif limit < COUNT_LIMIT:  # else it is refused
            self.output_tokens += limit


def submit(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL in the OpenAI batch format; - reads stdin.")],
    tenant: Annotated[str, typer.Option(help="Who is charged.")] = "default",
    priority: Annotated[int, typer.Option(help="Higher is more important; negative may be shed.")] = 0,
    deadline: Annotated[
        str | None, typer.Option(help="24h, +30m, 1h30m, or 2030-01-31T18:00Z (local time without a zone).")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key is the same job.")] = None,
    is_watched: Annotated[bool, typer.Option("--watch", "-w", help="Show progress until the job is over.")] = False,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job: one request on each line, `custom_id, method, url, body`. Prints the job's id."""
    due = parse_deadline(deadline, datetime.now().astimezone()) if deadline else None
    place = Place.of(redis_url, queue, password_file)
    with open_queue(place) as connected, _opened(file) as (source, total):
        connected.require_fit()
        ahead = _items_ahead(connected) if due else 0
        lines = _Lines(source, wants_tokens=due is not None)
        # With a key of its own every submission can be gone on with, whatever breaks it.
        own_key = key or f"cli-{uuid4().hex[:12]}"
        with _resumable(own_key), progress("Submitting", total) as advance:
            done = connected.submit(
                lines,
                tenant=tenant,
                priority=priority,
                deadline=due.at if due else None,
                key=own_key,
                on_progress=advance,
            )
        feasible = _feasible(connected, lines, due, ahead) if due else None
        _report(done, file=file, due=due, feasible=feasible, place=place, as_json=as_json)
        if not done.accepted and done.is_new:
            raise CliError(
                f"No line of {file} could be taken: `ballast results {done.job_id}` says for each line what was found "
                "and what was wanted."
            )
        if is_watched:
            watch(connected, done.job_id)


@contextmanager
def _resumable(key: str) -> Iterator[None]:
    """Say how to go on with a submission that breaks."""
    try:
        yield
    except (KeyboardInterrupt, QueueUnavailable, QueueFull):
        say(f"Interrupted: the same command with --key {key} goes on where it stopped.")
        raise


@contextmanager
def _opened(file: str) -> Iterator[tuple[Iterable[bytes], int | None]]:
    """Open the file and count its lines; standard input is read as it comes.

    Raises:
        Usage: there is no such file, it is a directory, or it is empty.
    """
    if file == "-":
        if sys.stdin.isatty():
            say("Reading lines from the terminal; Ctrl-D ends.")
        yield sys.stdin.buffer, None
        return
    path = Path(file)
    if path.is_dir():
        raise Usage(f"{file} is a directory, wanted a JSONL file with one request on each line.")
    try:
        opened: BinaryIO = path.open("rb")
    except OSError as error:
        raise Usage(f"{file} cannot be read ({error.strerror}): name a JSONL file, or - for standard input.") from None
    with opened:
        total, content = 0, False
        for line in opened:
            total += 1
            content = content or bool(line.strip())
        if not content:
            raise Usage(f"{file} is empty, wanted one request on each line: {{custom_id, method, url, body}}.")
        opened.seek(0)
        yield opened, total


def _items_ahead(queue: Queue) -> int:
    stats = queue.stats()
    return stats.depth + stats.items.leased


def _feasible(queue: Queue, lines: _Lines, due: Deadline, ahead: int) -> Feasibility:
    work = Work(lines.items, 0 if lines.unbounded else lines.output_tokens, ahead)
    return assess(work, queue.workers(), due.at - time.time())


def _report(
    done: Submission, *, file: str, due: Deadline | None, feasible: Feasibility | None, place: Place, as_json: bool
) -> None:
    if as_json:
        deadline = None
        if due and feasible:
            deadline = {"at": due.at, "feasible": feasible.verdict, "because": feasible.because}
        print_json(
            {
                "version": 1,
                "queue": place.queue,
                "job_id": done.job_id,
                "accepted": done.accepted,
                "rejected": done.rejected,
                "is_new": done.is_new,
                "deadline": deadline,
            }
        )
        return
    sys.stdout.write(f"{done.job_id}\n")
    sys.stdout.flush()
    if not done.is_new:
        say(f"The key was known: it names {done.job_id}, which has {done.accepted:,} items; none is stored twice.")
    else:
        rejected = f", {done.rejected:,} rejected (`ballast results {done.job_id}` says why)" if done.rejected else ""
        say(f"{done.accepted:,} items of {file} accepted{rejected}.")
    if due and feasible:
        answer = {
            "yes": "It can be met",
            "no": "It is AT RISK",
            "unknown": "Whether it can be met is unknown",
        }[feasible.verdict]
        say(f"Deadline {due.spoken}. {answer}: {feasible.because}.")
