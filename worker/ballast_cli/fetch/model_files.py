"""The files of one version of a model: names, sizes, and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ballast_cli.errors import CliError

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Files that an engine reads. Directories, other weight formats, and pictures are not downloaded."""
NEVER = ("consolidated*",)
"""A second copy of the weights in another layout."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file. `digest` is `sha256:..`, `git:..` (the SHA-1 of a git blob), or `md5:..`, and empty if unknown."""

    name: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model in a source at one moment."""

    source: str
    """URI of the source."""
    version: str
    """Identifies the content: a commit, or a digest of the listing."""
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


def select(files: Iterable[File], source: str) -> tuple[File, ...]:
    """Return the files that an engine reads.

    Raises:
        CliError: config.json or the weights are missing.
    """
    listed = sorted(files, key=lambda file: file.name)
    selected = tuple(
        file
        for file in listed
        if any(fnmatch(file.name, pattern) for pattern in WANTED)
        and not any(fnmatch(file.name, pattern) for pattern in NEVER)
        and "/" not in file.name
    )
    names = [file.name for file in selected]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        missing = "config.json" if "config.json" not in names else "weights (*.safetensors)"
        seen = ", ".join(file.name for file in listed[:8]) + (" ..." if len(listed) > 8 else "")
        raise CliError(
            f"{source} has no {missing}. Found: {seen or 'no file'}. Name a location with config.json, *.safetensors, "
            "and tokenizer.json, or convert the weights to safetensors."
        )
    return selected


def version_of(files: Iterable[File]) -> str:
    """Return a digest that identifies the content of a listing."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file.size}\0{file.digest}\0".encode())
    return digest.hexdigest()


def is_intact(file: File, path: Path) -> bool:
    """Return whether a file on disk has the size and, if known, the checksum of the source."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    kind, _, wanted = file.digest.partition(":")
    if not wanted:
        return True
    digest = {"sha256": hashlib.sha256, "git": hashlib.sha1, "md5": hashlib.md5}[kind](usedforsecurity=False)
    if kind == "git":
        digest.update(f"blob {file.size}\0".encode())
    with path.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest() == wanted
