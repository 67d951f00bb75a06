"""`ballast redrive`: retry the dead letters of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from ballast_cli.connection import AsJson, CaFile, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, print_table, say
from ballast_cli.deadlines import in_utc
from ballast_openai.errors import counted
from ballast_queue.job import DeadLetter

EXAMPLES = examples(
    "ballast redrive job-1f3a --dry-run   # lists the dead letters and their reasons", "ballast redrive job-1f3a"
)
COLUMNS = ("ITEM", "ATTEMPTS", "WORKER", "AT", "CODE", "REASON")


def redrive(
    *,
    job_id: JobId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the dead letters, and change nothing.")] = False,
    takes_all: Annotated[
        bool,
        typer.Option(
            "--all", help="Also retry items that no attempt could serve, for example after a change of the worker."
        ),
    ] = False,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Retry the dead letters of a job.

    The items return to the queue with new attempts, and their error results are removed. An item whose request is
    invalid stays a dead letter, unless --all is set.
    """
    place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
    with open_queue(place) as connected:
        connected.jobs.get(job_id)
        if dry_run:
            _show(job_id, list(connected.results.dead_letters(job_id)), place, as_json=as_json)
            return
        done = connected.jobs.redrive(job_id, takes_all=takes_all)
    if as_json:
        print_json({"version": 1, "queue": place.queue, "redriven": done.returned, "left": done.left})
    elif not done.returned and not done.left:
        say(f"{job_id} has no dead letters.")
    else:
        say(f"Returned {counted(done.returned, 'item')} of {job_id} to the queue.")
        if done.left:
            say(
                f"Skipped {counted(done.left, 'dead letter')} that no attempt can serve. "
                f"`ballast redrive {job_id} --dry-run{place.options}` shows the reason of each. --all retries all."
            )


def _row(letter: DeadLetter) -> tuple[str, ...]:
    try:
        at = in_utc(letter.at)
    except (ValueError, OverflowError, OSError):  # Redis may hold any number
        at = "unknown"
    return letter.custom_id, str(letter.attempts), letter.worker, at, letter.code, letter.message


def _show(job_id: str, letters: list[DeadLetter], place: Place, *, as_json: bool) -> None:
    if as_json:
        shown = [letter.model_dump(mode="json") for letter in letters]
        print_json({"version": 1, "queue": place.queue, "dead_letters": shown})
    elif letters:
        print_table(COLUMNS, [_row(letter) for letter in letters], right=("ATTEMPTS",))
    else:
        say(f"{job_id} has no dead letters.")
