"""The files of one version of a model: names, sizes, and checksums."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from typing import IO, Protocol

from ballast_cli.errors import CliError
from ballast_cli.fetch.directory import is_plain, is_safe

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Files that an engine reads. Other directories, other weight formats, pictures, and code are not downloaded."""
CODE = ("*.py",)
"""Code of a model. A source is trusted with weights, and not with code."""
MODULES = "modules.json"
MODULE_FILES = ("config.json", "*.safetensors")
"""Files of a sentence-transformers module. It has a directory, such as `1_Pooling`, which `modules.json` names."""
_MOST_MODULES = 1 << 20
"""Bytes of the largest `modules.json` that is read."""
MOST_FILES = 10_000
"""Files of the largest model. A source that announces more may be wrong, or fill the disk with empty files."""
NEVER = ("consolidated*",)
"""A second copy of the weights in another layout."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file. `digest` is `sha256:..`, `sha1:..`, `md5:..`, `crc32:..` or `git:..` (a git blob); empty: unknown."""

    name: str
    size: int | None
    """None: the source announces no size."""
    digest: str = ""


Read = Callable[[File], AbstractContextManager[Iterator[bytes]]]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model in a source at one moment."""

    source: str
    """URI of the source."""
    version: str
    """Identifies the content: a commit, or a digest of the listing."""
    files: tuple[File, ...]
    origin: str = ""
    """The endpoint that announced the files; empty: the usual one."""
    code: tuple[str, ...] = ()
    """Names of the files with code, which are left out."""

    @property
    def size(self) -> int:
        """Return the bytes of all files whose size is known."""
        return sum(file.size or 0 for file in self.files)

    @property
    def key(self) -> str:
        """Return a digest of where the files come from and what they are.

        Two sources that share a name have different keys, so that none of them writes to the other's directory.
        """
        files = [(file.name, file.size, file.digest) for file in self.files]
        return hashlib.sha256(json.dumps([self.origin, self.version, files]).encode()).hexdigest()


def select(files: Iterable[File], source: str, config: str, read: Read) -> tuple[File, ...]:
    """Return the files that an engine reads. `read` streams the content of a file of the source.

    Raises:
        CliError: the file `config` or the weights are missing, there are too many files, or `modules.json` names no
            modules.
    """
    listed = sorted(files, key=lambda file: file.name)
    plain = [file for file in listed if is_plain(file.name) and _matches(file, WANTED) and not _matches(file, NEVER)]
    names = [file.name for file in plain]
    if config not in names or not any(name.endswith(".safetensors") for name in names):
        missing = config if config not in names else "weights (*.safetensors)"
        seen = ", ".join(file.name for file in listed[:8]) + (" ..." if len(listed) > 8 else "")
        raise CliError(
            f"{source} has no {missing}. Found: {seen or 'no file'}. Name a location with {config} and "
            "*.safetensors, or convert the weights to safetensors."
        )
    if MODULES in names:
        with read(plain[names.index(MODULES)]) as pieces:
            folders = _folders(pieces, source)
        patterns = [f"{escape(folder)}/{pattern}" for folder in folders for pattern in MODULE_FILES]
        plain += [file for file in listed if is_safe(file.name) and _matches(file, patterns)]
    if len(plain) > MOST_FILES:
        raise CliError(
            f"{source} has {len(plain):,} files that an engine reads, and a model at most {MOST_FILES:,}. Name a "
            "location that contains one model."
        )
    return tuple(plain)


def code_of(files: Iterable[File]) -> tuple[str, ...]:
    """Return the names of the files with code beside the weights."""
    return tuple(sorted(file.name for file in files if is_plain(file.name) and _matches(file, CODE)))


def _folders(pieces: Iterable[bytes], source: str) -> list[str]:
    """Return the directories in a `modules.json`. The module without one is in the directory of the model.

    Raises:
        CliError: the file is too long, or no list of modules, or a directory is not one in that of the model.
    """
    text = b""
    for piece in pieces:
        text += piece
        if len(text) > _MOST_MODULES:
            raise CliError(f"{source}: {MODULES} has more than {_MOST_MODULES:,} bytes. Correct the file.")
    try:
        found = [module["path"].rstrip("/") for module in json.loads(text)]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise CliError(f"{source}: {MODULES} is no list of modules, each with a path. Correct the file.") from None
    for folder in filter(None, found):
        if not is_plain(folder):
            raise CliError(f"{source}: {MODULES} names {folder!r}, which is no name of a folder. Correct the file.")
    return [folder for folder in found if folder]


def _matches(file: File, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def version_of(files: Iterable[File]) -> str:
    """Return a digest that identifies the content of a listing."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file.size}\0{file.digest}\0".encode())
    return digest.hexdigest()


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    """CRC-32 as a hash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_HASHES: dict[str, Callable[[], _Hash]] = {
    "sha256": hashlib.sha256,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "git": lambda: hashlib.sha1(usedforsecurity=False),
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "crc32": _Crc32,
}


def verified(file: File, size: int, opened: IO[bytes]) -> str | None:
    """Return the SHA-256 of a file on disk, or None if its size or its checksum is not that of the source."""
    if file.size not in {None, size}:
        return None
    kind, _, wanted = file.digest.partition(":")
    own, theirs = hashlib.sha256(), _HASHES[kind]() if wanted else None
    if theirs is not None and kind == "git":
        theirs.update(b"blob %d\0" % size)
    while piece := opened.read(_PIECE):
        own.update(piece)
        if theirs is not None and kind != "sha256":
            theirs.update(piece)
    found = own.hexdigest() if kind == "sha256" or theirs is None else theirs.hexdigest()
    return own.hexdigest() if not wanted or found == wanted else None
