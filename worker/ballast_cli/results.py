"""`ballast results`: the results of a job, as lines of OpenAI's batch output file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ballast_cli.connection import JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, say
from ballast_cli.errors import Usage
from ballast_cli.outfile import OutFile

EXAMPLES = examples(
    "ballast results job-1f3a -o out.jsonl",
    "ballast results job-1f3a -o out.jsonl --follow   # waits for the end; Ctrl-C and again goes on",
    "ballast results job-1f3a | jq -r .custom_id",
)


def results(
    *,
    job_id: JobId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; it appears when it is complete.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
) -> None:
    """Write the results of a job: one JSON line for each item that is over, in the order they ended."""
    if output is not None and not output.parent.is_dir():
        raise Usage(f"--output: there is no directory {output.parent}: make it first.")
    file = OutFile(output) if output is not None else None
    with open_queue(Place.of(redis_url, queue, password_file)) as connected:
        before = connected.jobs.get(job_id)
        lines = (result.as_openai(before.id) for result in connected.results.read(before.id, follow=follow))
        if file is None:
            for line in lines:
                sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
                sys.stdout.flush()
            return
        written = file.write(lines, job_id=before.id)
        after = connected.jobs.get(job_id)
    say(f"{written:,} results in {output}.")
    if written < after.counts.total:
        say(f"The job has {after.counts.total:,} items: the same command with --follow waits for the rest.")
