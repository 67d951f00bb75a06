"""`ballast jobs`: list the jobs of a queue."""

from __future__ import annotations

from typing import Annotated

import typer

from ballast_cli.connection import AsJson, CaFile, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, print_table, say
from ballast_openai.errors import counted
from ballast_queue.job import Job
from ballast_worker.forecast import duration

EXAMPLES = examples("ballast jobs", "ballast jobs --active --tenant research", "ballast jobs --json | jq '.jobs[].id'")
COLUMNS = ("ID", "TENANT", "PRIORITY", "STATE", "DONE", "FAILED", "TOKENS OUT", "AGE", "DEADLINE")
RIGHT = ("PRIORITY", "DONE", "FAILED", "TOKENS OUT", "AGE")


def jobs(
    *,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    tenant: Annotated[str | None, typer.Option(help="List the jobs of this tenant only.", show_default=False)] = None,
    active: Annotated[bool, typer.Option("--active", help="List only jobs that are not over.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the jobs of a queue, newest first."""
    place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
    with open_queue(place) as connected:
        found = connected.jobs.active(limit=None) if active else connected.jobs.all()
        unread, now = connected.inbox.unread(), connected.now()
    shown = sorted((one for one in found if tenant in {None, one.tenant}), key=lambda one: (-one.created, one.id))
    if as_json:
        print_json({"version": 1, "queue": place.queue, "jobs": [one.model_dump(mode="json") for one in shown]})
    elif not shown:
        of = f" of tenant {tenant}" if tenant is not None else ""
        say(f"No {'active ' if active else ''}jobs{of} in queue {place.queue}.{place.note}")
    else:
        print_table(COLUMNS, [row(one, now) for one in shown], right=RIGHT)
    for name, number in unread.items():
        if tenant in {None, name}:
            entries = counted(number, "entry", "entries")
            say(
                f"The inbox of {name} has {entries} that no worker reads, because the queue no longer declares this "
                "tenant. Declare it again in offline.tenants, or delete the key of the inbox, "
                f"ballast:{{{place.queue}}}:inbox:{name}."
            )


def row(one: Job, now: float) -> tuple[str, ...]:
    """Return a job as a row of the table."""
    return (
        one.id,
        one.tenant,
        str(one.priority),
        one.state.value,
        f"{one.counts.done:,}/{one.counts.total:,}",
        f"{one.counts.failed:,}",
        f"{one.tokens_out:,}",
        duration(max(0.0, now - one.created)),
        deadline(one, now),
    )


def deadline(one: Job, now: float) -> str:
    """Return the time until the deadline."""
    if one.deadline is None:
        return "-"
    if one.state.is_over:
        return "over"
    left = one.deadline - now
    if left <= 0:
        return f"{duration(-left)} ago"
    return f"in {duration(left)}" + (", AT RISK" if one.is_at_risk else "")
