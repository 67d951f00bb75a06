"""What the store asks of a place that has to be downloaded from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from ballast_cli.errors import CliError
from ballast_cli.fetch.snapshot import File, Snapshot


class Unavailable(CliError):
    """The source does not answer now; trying again may help."""

    exit_code = 4


class Denied(CliError):
    """The source wants credentials, or others."""

    exit_code = 4


class Source(Protocol):
    """A place with files of a model."""

    def resolve(self) -> Snapshot:
        """List what an engine needs.

        Raises:
            NotFound: there is no such place.
            Denied: it wants credentials.
            Unavailable: it does not answer.
        """

    def read(self, file: File, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """Give the bytes of a file of the snapshot that `resolve` gave, from `start` on, in pieces."""
