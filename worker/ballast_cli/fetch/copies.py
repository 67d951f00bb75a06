"""The copies of a model: which version a source named last, and files that two versions share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ballast_cli.fetch.credentials import without_userinfo
from ballast_cli.fetch.directory import Directory
from ballast_cli.fetch.location import Location
from ballast_cli.fetch.manifest import EMPTY, MANIFEST, Kept, Manifest, read_manifest
from ballast_cli.fetch.model_files import File, ModelFiles

_NAMED = ".ballast-fetch.named-"
"""Begins the name of a file that holds the version which a location named. Its time is when that was last."""
_MOST_BYTES = 100


def remember(path: Path, location: Location, version: str, *, is_shared: bool) -> None:
    """Record in a complete copy that its source named it now. A failure is no failure of the fetch."""
    with Directory.find(path, is_shared=is_shared) as directory, suppress(OSError):
        if directory is not None:
            directory.write(_note(location), version.encode())


def named_at(path: Path, location: Location, origin: str, *, is_shared: bool) -> int | None:
    """Return when the source last named the version in a directory, in nanoseconds; None if it has not.

    A commit names itself. Without a record, as of an older Ballast, the time of the copy counts for the name under
    which it was fetched.
    """
    with Directory.find(path, is_shared=is_shared) as directory:
        if directory is None:
            return None
        manifest = read_manifest(directory)
        if not _is_of(manifest, str(location), origin):
            return None
        note = _note(location)
        if manifest.version == _text(directory, note):
            found = directory.stat(note)
        elif manifest.version == location.revision or manifest.source == str(location):
            found = directory.stat(MANIFEST)
        else:
            return None
        return found.st_mtime_ns if found else None


def adopt(directory: Directory, model: ModelFiles, others: Iterable[Path]) -> None:
    """Link files that other versions in a cache seem to have as well, so that only the others are downloaded.

    The checksum of the source decides later whether a link holds the right file. Only copies of the same model from the
    same endpoint count. A file counts if its recorded SHA-256 is that of the source, or if the source names the blob of
    git, as a hub does for small files. With another checksum, weights of equal size would be read for nothing. A volume
    without hard links, or one that forbids them for files of another user, keeps two copies.
    """
    for path in others:
        with Directory.find(path, is_shared=True) as other:
            manifest = EMPTY if other is None else read_manifest(other)
            if other is None or not _is_of(manifest, model.source, model.origin):
                continue
            for file in model.files:
                if file.name in manifest.files and _seems_equal(file, manifest.files[file.name]):
                    with suppress(OSError):
                        directory.link(file.name, other)


def _seems_equal(file: File, kept: Kept) -> bool:
    kind, _, digest = file.digest.partition(":")
    return file.size == kept.size and (digest == kept.sha256 if kind == "sha256" else kind == "git")


def _is_of(manifest: Manifest, source: str, origin: str) -> bool:
    """Return whether a copy is of the model of a source, at any revision. An older Ballast kept the password, too."""
    return (_model(manifest.source), without_userinfo(manifest.origin)) == (_model(source), origin)


def _model(source: str) -> str:
    """Return a source without its revision."""
    return source.partition("@")[0] if source.startswith("hf://") else source


def _note(location: Location) -> str:
    return f"{_NAMED}{hashlib.sha256(str(location).encode()).hexdigest()[:24]}"


def _text(directory: Directory, name: str) -> str | None:
    with suppress(OSError), directory.read(name) as opened:
        return opened.read(_MOST_BYTES).decode(errors="replace")
    return None
