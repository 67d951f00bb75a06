"""`ballast results`: write the results of a job in the format of OpenAI's batch output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast_cli.connection import CaFile, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, json_text, say
from ballast_cli.errors import CliError, Usage
from ballast_cli.outfile import OutFile
from ballast_cli.watch import waiting
from ballast_openai.errors import counted

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast results job-1f3a -o out.jsonl",
    "ballast results job-1f3a -o out.jsonl --follow   # waits for the end of the job; continues if run again",
    "ballast results job-1f3a | jq -r .custom_id",
)

_SHOWN_PLACES = 3


def results(
    *,
    job_id: JobId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. It appears when it is complete.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more results until the job is over.")
    ] = False,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
) -> None:
    """Write the results of a job.

    Each item that is over has one line of JSON. The lines are in the order of completion. After a redrive or a failover
    of Redis, standard output may repeat an item: its last line counts. A file has one line for each item.
    """
    if output is not None and not output.parent.is_dir():
        raise Usage(f"--output: no directory {output.parent}. Create it first.")
    file = OutFile(output) if output is not None else None
    with open_queue(Place.of(redis_url, queue, password_file, ca_file=ca_file)) as connected:
        before = connected.jobs.get(job_id)
        found = connected.results.read(before.id, follow=follow, attempt=waiting)
        lines = (result.as_openai(before.id) for result in found)
        if file is None:
            written = 0
            for written, line in enumerate(lines, 1):  # noqa: B007  it is the number of lines
                sys.stdout.write(json_text(line, encoding=sys.stdout.encoding) + "\n")
                sys.stdout.flush()
        else:
            written = file.write(lines, job_id=before.id)
            say(f"Wrote {counted(written, 'result')} to {output}.")
        _require_all(connected)
        after = waiting(lambda: connected.jobs.get(job_id))
    total = counted(after.counts.total, "item")
    if written >= after.counts.total:
        return
    if follow and after.state.is_over:
        raise CliError(
            f"{job_id} has {total} and is over, but Redis had only {written:,} results. Run the command again. If it "
            "finds no more, Redis lost the others: submit their lines as another job."
        )
    if file is not None:
        say(f"The job has {total}. Run the command again with --follow to wait for the rest.")


def _require_all(queue: Queue) -> None:
    """Raise `CliError` if results were left out because they cannot be read."""
    if places := sorted(queue.store.unreadable.places):
        more = ", ..." if len(places) > _SHOWN_PLACES else "."
        raise CliError(
            f"The output lacks {counted(len(places), 'result')} that cannot be read: "
            f"{', '.join(places[:_SHOWN_PLACES])}{more}"
        )
