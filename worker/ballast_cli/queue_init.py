"""`ballast queue`: prepare a Redis for queues."""

from __future__ import annotations

import typer

from ballast_cli.connection import DEFAULT_QUEUE, CaFile, PasswordFile, Place, RedisUrl, open_queue
from ballast_cli.console import examples, say
from ballast_cli.errors import NotNow

EXAMPLES = examples("ballast queue init --redis-url rediss://admin@redis.example:6379 --redis-password-file password")
queue = typer.Typer(name="queue", help="Prepare a Redis or Valkey for queues.", no_args_is_help=True, epilog=EXAMPLES)


@queue.callback()
def _queue() -> None:
    """Make `init` a subcommand: without a callback, Typer merges a single command into its group."""


@queue.command(epilog=EXAMPLES)
def init(*, redis_url: RedisUrl = None, password_file: PasswordFile = None, ca_file: CaFile = None) -> None:
    """Load the functions of Ballast, once for all queues of a Redis.

    The user needs the right to load functions. Workers and submitters need no such right. If their user may do so, the
    operator loads the functions into the Redis of its release, but not into that of `spec.redis`, and `ballast up` into
    the Redis that it uses. Run the command again after an upgrade of Ballast.
    """
    place = Place.of(redis_url, DEFAULT_QUEUE, password_file, ca_file=ca_file)
    with open_queue(place, loads_functions=True) as connected:
        if connected.store.connection.has_newer_library():
            raise NotNow(
                "Redis has the functions of a newer version of Ballast. They serve this version too, and were not "
                "changed. Use the newer version of this command."
            )
        if connected.store.connection.is_outdated:
            raise NotNow(
                "Redis has the functions of an older version of Ballast, and no memory for those of this one: raise "
                "maxmemory, and run the command again."
            )
    say(f"Redis at {place.shown_url} has the functions of Ballast.")
