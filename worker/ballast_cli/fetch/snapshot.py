"""One version of a model's files: names, sizes and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ballast_cli.errors import CliError

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What an engine reads; directories, other weight formats and pictures stay where they are."""
NEVER = ("consolidated*",)
"""The same weights once more, in another layout."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file of a snapshot. `digest` is `sha256:..`, `git:..` (a blob's SHA-1) or `md5:..`; empty where unknown."""

    name: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source holds at one moment."""

    source: str
    """The URI that was asked for."""
    version: str
    """Names the content: a commit, or a digest over the listing."""
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def choose(files: Iterable[File], source: str) -> tuple[File, ...]:
    """Keep what an engine reads.

    Raises:
        CliError: a part that no engine can do without is not there.
    """
    listed = sorted(files, key=lambda file: file.name)
    chosen = tuple(
        file
        for file in listed
        if any(fnmatch(file.name, pattern) for pattern in WANTED)
        and not any(fnmatch(file.name, pattern) for pattern in NEVER)
        and "/" not in file.name
    )
    names = [file.name for file in chosen]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        missing = "config.json" if "config.json" not in names else "weights (*.safetensors)"
        seen = ", ".join(file.name for file in listed[:8]) + (" ..." if len(listed) > 8 else "")
        raise CliError(
            f"{source} has no {missing}; wanted config.json, *.safetensors and tokenizer.json, found "
            f"{seen or 'no file'}. Name the place that holds them, or convert the weights to safetensors."
        )
    return chosen


def version_of(files: Iterable[File]) -> str:
    """Name a listing by its content."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file.size}\0{file.digest}\0".encode())
    return digest.hexdigest()


def is_intact(file: File, path: Path) -> bool:
    """Tell whether a file on disk is what the source says, by its checksum where there is one."""
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
