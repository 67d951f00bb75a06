"""The manifest that `ballast fetch` writes to a complete directory.

It records the size, the time and the inode of each file, so that a later start finds a change without reading the file,
and a checksum of each file. Whoever can write to the directory can also write a manifest, so it shows damage and
accidents. Against writers that are not trusted, `--verify` compares the files with the checksums of the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ballast_cli.fetch.directory import Directory, is_safe
from ballast_cli.fetch.model_files import ModelFiles

MANIFEST = ".ballast-fetch.json"
"""No file of a model has this name: names of their files do not begin with a dot."""
_MOST_BYTES = 16 * 1024 * 1024

_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of a complete directory."""

    size: _Count
    sha256: Annotated[str, Field(min_length=1)]
    """Computed by Ballast."""
    mtime_ns: _Count
    inode: _Count

    @classmethod
    def of(cls, directory: Directory, name: str, sha256: str) -> Kept:
        """Return the state of an existing file."""
        found = directory.stat(name)
        return cls(found.st_size, sha256, found.st_mtime_ns, found.st_ino) if found else cls(-1, sha256, 0, 0)

    def is_unchanged(self, directory: Directory, name: str) -> bool:
        """Return whether the file still has this size, time and inode."""
        return self.mtime_ns != 0 and Kept.of(directory, name, self.sha256) == self


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds. One without a source is no complete directory."""

    source: str
    origin: str
    """The endpoint that served the files; empty: the usual one."""
    version: str
    files: Mapping[str, Kept]

    def is_of(self, model: ModelFiles) -> bool:
        """Return whether the files are those of this version of a model."""
        sizes = {name: kept.size for name, kept in self.files.items()}
        announced = {file.name: sizes.get(file.name, -1) if file.size is None else file.size for file in model.files}
        return (self.origin, self.version, sizes) == (model.origin, model.version, announced)

    def is_unchanged(self, directory: Directory) -> bool:
        """Return whether all files are as they were recorded. This reads no file."""
        return bool(self.source) and all(kept.is_unchanged(directory, name) for name, kept in self.files.items())


EMPTY = Manifest("", "", "", {})
_MANIFEST = TypeAdapter(Manifest)


def read_manifest(directory: Directory) -> Manifest:
    """Return the manifest of a directory, or an empty one if it is missing, or no manifest."""
    try:
        with directory.read(MANIFEST) as opened:
            text = opened.read(_MOST_BYTES + 1)
    except OSError:
        return EMPTY
    return parse_manifest(text)


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest in a text. Any other text is an empty manifest."""
    if len(text) > _MOST_BYTES:
        return EMPTY
    try:
        found = _MANIFEST.validate_json(text, strict=True)
    except ValidationError:
        return EMPTY
    return found if all(map(is_safe, found.files)) else EMPTY


def write_manifest(directory: Directory, manifest: Manifest) -> None:
    """Write the manifest: the directory is complete."""
    directory.write(MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())
