"""Which Redis, which queue: options, environment, or what a running `ballast up` in this directory wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import urlsplit, urlunsplit

import typer

from ballast_cli.errors import CliError, NotFound, NotNow, Unreachable, Usage
from ballast_queue.errors import (
    InvalidSubmission,
    JobNotFound,
    JobStateConflict,
    QueueError,
    QueueForbidden,
    QueueUnavailable,
)

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"
DEFAULT_QUEUE = "local/ballast"
DATA_DIR = Path(".ballast")

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="BALLAST_REDIS_URL",
        help="Redis or Valkey, redis://, rediss:// or unix://. By default that of a running `ballast up` in this "
        f"directory, else {DEFAULT_REDIS_URL}.",
        show_default=False,
    ),
]
QueueName = Annotated[
    str | None,
    typer.Option(
        "--queue",
        envvar="BALLAST_QUEUE",
        help=f"Queue, namespace/name. By default that of a running `ballast up`, else {DEFAULT_QUEUE}.",
        show_default=False,
    ),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-password-file",
        envvar="BALLAST_REDIS_PASSWORD_FILE",
        help="File with the Redis password; or set BALLAST_REDIS_PASSWORD.",
        show_default=False,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `ballast submit` printed it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Running:
    """What a running `ballast up` says about itself, in `.ballast/up.json`."""

    redis_url: str
    queue: str
    address: str
    """`http://host:port` of the worker."""
    pid: int
    worker_pid: int

    @classmethod
    def read(cls, data_dir: Path = DATA_DIR) -> Self | None:
        """Read the file; None where there is none or the process that wrote it is gone."""
        try:
            data = json.loads((data_dir / "up.json").read_text(encoding="utf-8"))
            running = cls(**data)
        except (OSError, ValueError, TypeError):
            return None
        return running if is_alive(running.pid) else None

    def write(self, data_dir: Path) -> None:
        """Write the file in one piece."""
        part = data_dir / "up.json.part"
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(data_dir / "up.json")


def is_alive(pid: int) -> bool:
    """Say whether a process of this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class Place:
    """A queue in a Redis."""

    url: str
    queue: str
    password: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        parts = urlsplit(self.url)
        if parts.password is None:
            return self.url
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))

    @classmethod
    def of(cls, redis_url: str | None, queue: str | None, password_file: Path | None) -> Self:
        """Put options, environment, a running `ballast up` and the defaults in their order."""
        running = None if redis_url and queue else Running.read()
        url = redis_url or (running.redis_url if running else DEFAULT_REDIS_URL)
        if urlsplit(url).scheme not in {"redis", "rediss", "unix"}:
            found = url.partition("://")[0] if "://" in url else url.rpartition("@")[2]  # the rest may hold a password
            raise Usage(
                f"--redis-url: found {found[:80]!r}, wanted redis://host:port, rediss://host:port or unix:///path."
            )
        at_home = running is not None and url == running.redis_url
        name = queue or (running.queue if running and at_home else DEFAULT_QUEUE)
        password = os.environ.get("BALLAST_REDIS_PASSWORD") or None
        if password_file is not None:
            try:
                password = password_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise Usage(f"--redis-password-file: {password_file} cannot be read ({error}).") from None
        return cls(url, name, password)


@contextmanager
def open_queue(place: Place) -> Iterator[Queue]:
    """Connect; what goes wrong inside becomes one of this package's errors, with its exit code."""
    from ballast_queue.redis_store import Queue  # noqa: PLC0415  `ballast --help` does without redis

    try:
        connected = Queue.connect(place.url, place.queue, password=place.password)
        try:
            yield connected
        finally:
            connected.close()
    except JobNotFound as error:
        raise NotFound(_sentence(error)) from error
    except JobStateConflict as error:
        raise NotNow(_sentence(error)) from error
    except InvalidSubmission as error:
        raise Usage(f"{error}.") from error  # it opens with the name of what is wrong
    except (QueueUnavailable, QueueForbidden) as error:
        raise Unreachable(
            f"{_sentence(error)} Asked: {place.shown_url}; `ballast up` starts one here, --redis-url or "
            "BALLAST_REDIS_URL names another."
        ) from error
    except QueueError as error:
        raise CliError(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    said = (str(error), *getattr(error, "__notes__", ()))
    return " ".join(f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." for text in said)
