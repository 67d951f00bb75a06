"""`ballast resume`: let a paused job go on."""

from __future__ import annotations

from ballast_cli.connection import AsJson, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, say

EXAMPLES = examples("ballast resume job-1f3a")


def resume(
    *,
    job_id: JobId,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a paused job go on."""
    place = Place.of(redis_url, queue, password_file)
    with open_queue(place) as connected:
        after = connected.resume(job_id)
    if as_json:
        print_json({"version": 1, "queue": place.queue, "job": after.model_dump(mode="json")})
        return
    counts = after.counts
    say(f"{after.id} is {after.state}: {counts.waiting:,} of {counts.total:,} items wait for a slot.")
