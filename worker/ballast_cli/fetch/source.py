"""The protocol of a source from which models are downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from ballast_cli.errors import CliError
from ballast_cli.fetch.model_files import File, ModelFiles


class Unavailable(CliError):
    """The source does not answer. A retry may help."""

    exit_code = 4


class Denied(CliError):
    """The source needs credentials, or other ones."""

    exit_code = 4


class Source(Protocol):
    """A location with the files of a model."""

    @property
    def origin(self) -> str:
        """Return the endpoint, or an empty text for the usual one. This asks nobody."""

    def resolve(self) -> ModelFiles:
        """Return the files that an engine needs.

        Raises:
            NotFound: the location does not exist.
            Denied: the source needs credentials.
            Unavailable: the source does not answer.
        """

    def read(self, file: File, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """Yield the bytes of a file that `resolve` returned, from `start` on, in pieces."""
