"""`ballast job`: show one job."""

from __future__ import annotations

import sys

from ballast_cli.connection import AsJson, CaFile, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, printable
from ballast_cli.deadlines import in_utc
from ballast_cli.jobs import deadline
from ballast_queue.job import Job
from ballast_worker.forecast import duration

EXAMPLES = examples("ballast job job-1f3a", "ballast job job-1f3a --json | jq .job.counts")


def job(
    *,
    job_id: JobId,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the state, items, and tokens of one job."""
    place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
    with open_queue(place) as connected:
        found, now = connected.jobs.get(job_id), connected.now()
    if as_json:
        print_json({"version": 1, "queue": place.queue, "job": found.model_dump(mode="json")})
        return
    for label, value in _fields(found, now):
        sys.stdout.write(f"{label:<12}{printable(value)}\n")


def _fields(one: Job, now: float) -> list[tuple[str, str]]:
    counts = one.counts
    by_state = ("waiting", "leased", "succeeded", "failed", "cancelled", "expired")
    fields = [
        ("id", one.id),
        ("tenant", one.tenant),
        ("priority", str(one.priority)),
        ("state", one.state.value),
        ("items", f"{counts.done:,} of {counts.total:,} done"),
        ("", ", ".join(f"{getattr(counts, state):,} {state}" for state in by_state if getattr(counts, state))),
        ("tokens", f"{one.tokens_in:,} in, {one.tokens_out:,} out"),
        ("created", in_utc(one.created)),
    ]
    if one.deadline is not None:
        fields.append(("deadline", f"{in_utc(one.deadline)} ({deadline(one, now)})"))
    if one.appraised is not None and not one.state.is_over:
        fields.append(("", f"{duration(max(0.0, now - one.appraised))} ago: {one.because}"))
    if one.key:
        fields.append(("key", one.key))
    if one.finished is not None:
        fields.append(("finished", in_utc(one.finished)))
    if one.reason:
        fields.append(("reason", one.reason))
    return [(label, value) for label, value in fields if value]
