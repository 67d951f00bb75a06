"""Parses the location of a model: `hf://`, `s3://`, `pvc://`, `file://`, or a path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from ballast_cli.errors import Usage


class Scheme(StrEnum):
    """Kinds of locations."""

    HUB = "hf"
    BUCKET = "s3"
    CLAIM = "pvc"
    FILE = "file"


FORMS = "hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX, pvc://CLAIM[/PATH], file:///PATH, or a path"


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed URI."""

    scheme: Scheme
    root: str
    """`org/name`, the bucket, or the claim. Empty for files."""
    path: str = ""
    """Prefix in the bucket, path in the claim, or path of the directory."""
    revision: str = ""
    config: str = "config.json"
    """File that the files must contain."""

    def __str__(self) -> str:
        """Return the URI with the revision."""
        at = f"@{self.revision}" if self.revision else ""
        if self.scheme is Scheme.FILE:
            return self.path
        return f"{self.scheme}://{self.root}{'/' if self.path else ''}{self.path}{at}"

    @property
    def is_remote(self) -> bool:
        """Return whether the files must be downloaded."""
        return self.scheme in {Scheme.HUB, Scheme.BUCKET}


def parse(uri: str, revision: str = "") -> Location:
    """Parse a URI. The revision is `revision`, or follows `@` in the URI.

    Raises:
        Usage: the URI has another form, or names a revision that differs from `revision`.
    """
    if "://" not in uri:
        return Location(Scheme.FILE, "", os.path.expanduser(uri))  # noqa: PTH111  Path's fails on an unknown user
    scheme, _, rest = uri.partition("://")
    root, _, path = rest.partition("/")
    match scheme:
        case Scheme.FILE if root in {"", "localhost"}:
            return Location(Scheme.FILE, "", unquote(f"/{path}"))
        case Scheme.FILE:
            raise Usage(f"{uri} names the host {root}. Use file:///path with three slashes.")
        case Scheme.HUB:
            return _hub(uri, rest.strip("/"), revision)
        case Scheme.BUCKET if root:
            return Location(Scheme.BUCKET, root, path.strip("/"))
        case Scheme.CLAIM if root not in {"", ".", ".."} and ".." not in path.split("/"):
            return Location(Scheme.CLAIM, root, path.strip("/"))
    raise Usage(f"{uri} is not the location of a model. Use {FORMS}.")


def _hub(uri: str, name: str, revision: str) -> Location:
    repository, _, at = name.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise Usage(f"{uri}: found the repository {repository!r}. Use hf://ORG/NAME or hf://ORG/NAME@REVISION.")
    if at and revision and at != revision:
        raise Usage(f"{uri} names the revision {at}, but --revision is {revision}. Use one of them.")
    return Location(Scheme.HUB, repository, revision=at or revision or "main")
