"""`ballast pause`: hold a job."""

from __future__ import annotations

from ballast_cli.connection import AsJson, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, say

EXAMPLES = examples("ballast pause job-1f3a")


def pause(
    *,
    job_id: JobId,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Pause a job: nothing more of it starts until `ballast resume`; items under way finish."""
    place = Place.of(redis_url, queue, password_file)
    with open_queue(place) as connected:
        after = connected.pause(job_id)
    if as_json:
        print_json({"version": 1, "queue": place.queue, "job": after.model_dump(mode="json")})
        return
    counts = after.counts
    say(
        f"{after.id} is {after.state}: {counts.waiting:,} items wait for `ballast resume`, {counts.leased:,} still run."
    )
