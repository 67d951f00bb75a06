"""Finds Redis and the queue: from options, the environment, or a running `ballast up` in this directory."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import urlsplit, urlunsplit

import typer

from ballast_cli.data_directory import is_held, write_private
from ballast_cli.errors import CliError, NotFound, NotNow, SubmitterOnly, Unreachable, Usage
from ballast_queue.address import parse_address
from ballast_queue.errors import (
    CommandForbidden,
    CommandMissing,
    InvalidAddress,
    InvalidSubmission,
    JobNotFound,
    JobStateConflict,
    QueueError,
    QueueForbidden,
    QueueUnavailable,
)

if TYPE_CHECKING:
    from ballast_queue.inbox_writer import InboxWriter
    from ballast_queue.redis_store import Queue

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"
DEFAULT_QUEUE = "local/ballast"
DATA_DIR = Path(".ballast")


def not_empty(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Refuse an empty value, such as that of an unset variable of a shell: it would mean the default."""
    if value == "":
        raise Usage(f"{parameter.opts[0]} is empty. Name a value, or omit the option.")
    return value


RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="BALLAST_REDIS_URL",
        help="URL of Redis or Valkey (redis://, rediss://, or unix://). By default, the one of a running `ballast up` "
        f"in this directory, otherwise {DEFAULT_REDIS_URL}.",
        show_default=False,
        callback=not_empty,
    ),
]
QueueName = Annotated[
    str | None,
    typer.Option(
        "--queue",
        envvar="BALLAST_QUEUE",
        help=f"Queue (namespace/name). By default, the one of a running `ballast up`, otherwise {DEFAULT_QUEUE}.",
        show_default=False,
        callback=not_empty,
    ),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-password-file",
        envvar="BALLAST_REDIS_PASSWORD_FILE",
        help="File with the Redis password. You can also set BALLAST_REDIS_PASSWORD.",
        show_default=False,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-ca-file",
        envvar="BALLAST_REDIS_CA_FILE",
        help="File with certificates (PEM) of authorities to trust at a rediss:// URL, besides those of the system.",
        show_default=False,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="ID of the job, as `ballast submit` prints it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Running:
    """The content of `.ballast/up.json`, which a running `ballast up` writes."""

    redis_url: str
    queue: str
    address: str
    """`http://host:port` or `https://host:port` of the worker."""
    pid: int
    worker_pid: int

    @classmethod
    def read(cls, data_dir: Path = DATA_DIR) -> Self | None:
        """Read the file. Return None if it is missing, or if no `ballast up` runs in the directory."""
        if not is_held(data_dir):
            return None
        try:
            data = json.loads((data_dir / "up.json").read_text(encoding="utf-8"))
            return cls(**data)
        except (OSError, ValueError, TypeError):
            return None

    def write(self, data_dir: Path) -> None:
        """Write the file."""
        write_private(data_dir / "up.json", json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Place:
    """A queue in a Redis."""

    url: str
    queue: str
    password: str | None = None
    ca: str | None = None
    options: str = ""
    """The options of this command that the next command needs to find the queue, each after a space."""
    note: str = ""
    """A sentence after a space if nothing named the queue: an empty answer may be that of the wrong queue."""

    @property
    def shown_url(self) -> str:
        """Return the URL without the user, the password, and the options."""
        parts = urlsplit(parse_address(self.url).url)  # raises if a password could be taken for a host or a path
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @classmethod
    def of(cls, redis_url: str | None, queue: str | None, password_file: Path | None, *, ca_file: Path | None) -> Self:
        """Return the first value of: option or environment, a running `ballast up`, default.

        Raises:
            Usage: the URL is malformed, or a file cannot be read.
        """
        running = None if redis_url and queue else Running.read()
        url = redis_url or (running.redis_url if running else DEFAULT_REDIS_URL)
        try:
            parse_address(url)
        except InvalidAddress as error:
            raise Usage(f"--redis-url: {error}.") from None
        at_home = running is not None and url == running.redis_url
        name = queue or (running.queue if running and at_home else None)
        password = os.environ.get("BALLAST_REDIS_PASSWORD") or None
        if password_file is not None:
            password = _text("--redis-password-file", password_file).strip()
        ca = None if ca_file is None else _text("--redis-ca-file", ca_file)
        note = "" if name else " This queue is the default: --queue NAMESPACE/NAME or BALLAST_QUEUE names another one."
        place = cls(url, name or DEFAULT_QUEUE, password, ca, note=note)
        given = (
            ("--redis-url", "BALLAST_REDIS_URL", redis_url, place.shown_url),
            ("--queue", "BALLAST_QUEUE", queue, queue),
            ("--redis-password-file", "BALLAST_REDIS_PASSWORD_FILE", password_file, password_file),
            ("--redis-ca-file", "BALLAST_REDIS_CA_FILE", ca_file, ca_file),
        )
        return replace(
            place,
            options="".join(
                f" {option} {shlex.quote(str(shown))}"
                for option, variable, value, shown in given
                if value is not None and str(value) != os.environ.get(variable)
            ),
        )


def _text(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Usage(f"{option}: cannot read {file} ({reason}). Name another file.") from None


@contextmanager
def open_queue(place: Place, *, loads_functions: bool = False) -> Iterator[Queue]:
    """Connect to the queue. Errors of the queue become errors of this package, each with its exit code.

    Raises:
        SubmitterOnly: the user of Redis may not call functions.
    """
    from ballast_queue.redis_store import Queue  # noqa: PLC0415  `ballast --help` works without redis

    with _translated(place):
        try:
            connected = Queue.connect(
                place.url, place.queue, password=place.password, ca=place.ca, loads_functions=loads_functions
            )
        except CommandMissing:
            raise
        except CommandForbidden as error:
            raise SubmitterOnly(
                f"{_sentence(error)} The address was {place.shown_url}. A user that may only submit can run "
                "`ballast submit`. Other commands need a worker's user."
            ) from error
        try:
            yield connected
        finally:
            connected.close()


@contextmanager
def open_inbox(place: Place) -> Iterator[InboxWriter]:
    """Connect to the inbox of the queue, as a submitter. Errors are those of `open_queue`."""
    from ballast_queue.inbox_writer import InboxWriter  # noqa: PLC0415  `ballast --help` works without redis

    with _translated(place):
        writer = InboxWriter.connect(place.url, place.queue, password=place.password, ca=place.ca)
        try:
            yield writer
        finally:
            writer.close()


@contextmanager
def _translated(place: Place) -> Iterator[None]:
    try:
        yield
    except JobNotFound as error:
        raise NotFound(_sentence(error)) from error
    except JobStateConflict as error:
        raise NotNow(_sentence(error)) from error
    except InvalidSubmission as error:
        raise Usage(f"{error}.") from error  # the message opens with the name of the field
    except QueueForbidden as error:
        raise Unreachable(f"{_sentence(error)} The address was {place.shown_url}.") from error
    except QueueUnavailable as error:
        raise Unreachable(_about(error, place)) from error
    except QueueError as error:
        raise CliError(_sentence(error)) from error


def _about(error: Exception, place: Place) -> str:
    return (
        f"{_sentence(error)} The address was {place.shown_url}. Start a Redis with `ballast up`, or name another one "
        "with --redis-url or BALLAST_REDIS_URL."
    )


def _sentence(error: Exception) -> str:
    said = (str(error), *getattr(error, "__notes__", ()))
    return " ".join(f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." for text in said)
