"""Makes the subcommands that change the state of one job: `cancel`, `pause`, and `resume`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ballast_cli.connection import AsJson, CaFile, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import print_json, say
from ballast_queue.job import Job

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue


def transition(
    move: Callable[[Queue, str], Job], sentence: Callable[[Job], str], *, purpose: str
) -> Callable[..., None]:
    """Return a subcommand. `purpose` is its help, `sentence` describes the job after the change."""

    def verb(
        *,
        job_id: JobId,
        redis_url: RedisUrl = None,
        queue: QueueName = None,
        password_file: PasswordFile = None,
        ca_file: CaFile = None,
        as_json: AsJson = False,
    ) -> None:
        place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
        with open_queue(place) as connected:
            after = move(connected, job_id)
        if as_json:
            print_json({"version": 1, "queue": place.queue, "job": after.model_dump(mode="json")})
        else:
            say(f"{after.id} is {after.state}: {sentence(after)}.")

    verb.__doc__ = purpose
    return verb
