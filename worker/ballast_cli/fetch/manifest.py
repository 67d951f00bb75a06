"""The manifest that `ballast fetch` writes to a complete directory.

It records the size, the time and the inode of each file, so that a later start finds a change without reading the file,
and a checksum of each file. Whoever can write to the directory can also write a manifest, so it shows damage and
accidents. Against writers that are not trusted, `--verify` compares the files with the checksums of the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ballast_cli.fetch.directory import Directory, is_safe
from ballast_cli.fetch.model_files import ModelFiles

MANIFEST = ".ballast-fetch.json"
"""No file of a model has this name: names of their files do not begin with a dot."""
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of a complete directory."""

    size: int
    sha256: str = ""
    """Computed by Ballast; empty in manifests of older versions."""
    mtime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, directory: Directory, name: str, sha256: str) -> Kept:
        """Return the state of an existing file."""
        found = directory.stat(name)
        return cls(found.st_size, sha256, found.st_mtime_ns, found.st_ino) if found else cls(-1)

    def is_unchanged(self, directory: Directory, name: str) -> bool:
        """Return whether the file still has this size, time and inode."""
        return self.mtime_ns != 0 and Kept.of(directory, name, self.sha256) == self


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds. One without a source is no complete directory."""

    source: str = ""
    origin: str = ""
    """The endpoint that served the files; empty: the usual one."""
    version: str = ""
    files: Mapping[str, Kept] = field(default_factory=dict)

    def is_of(self, model: ModelFiles) -> bool:
        """Return whether the files are those of this version of a model."""
        sizes = {name: kept.size for name, kept in self.files.items()}
        announced = {file.name: sizes.get(file.name, -1) if file.size is None else file.size for file in model.files}
        return (self.origin, self.version, sizes) == (model.origin, model.version, announced)

    def is_unchanged(self, directory: Directory) -> bool:
        """Return whether all files are as they were recorded. This reads no file."""
        return bool(self.source) and all(kept.is_unchanged(directory, name) for name, kept in self.files.items())


def read_manifest(directory: Directory) -> Manifest:
    """Return the manifest of a directory, or an empty one if it is missing, or no manifest."""
    try:
        with directory.read(MANIFEST) as opened:
            text = opened.read(_MOST_BYTES + 1)
    except OSError:
        return Manifest()
    return parse_manifest(text)


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest in a text. Any other text is an empty manifest."""
    if len(text) > _MOST_BYTES:
        return Manifest()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Manifest()
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        return Manifest()
    source, origin, version = (found.get(name, "") for name in ("source", "origin", "version"))
    if not (isinstance(source, str) and isinstance(origin, str) and isinstance(version, str)):
        return Manifest()
    files = {name: _kept(value) for name, value in found["files"].items()}
    if not all(map(is_safe, files)) or None in files.values():
        return Manifest()
    return Manifest(source, origin, version, {name: kept for name, kept in files.items() if kept})


def write_manifest(directory: Directory, manifest: Manifest) -> None:
    """Write the manifest: the directory is complete."""
    directory.write(MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def _kept(value: object) -> Kept | None:
    if not isinstance(value, dict):
        return None
    numbers = [value.get("size"), value.get("mtime_ns", 0), value.get("inode", 0)]
    sha256 = value.get("sha256", "")
    if not isinstance(sha256, str) or not all(type(number) is int and number >= 0 for number in numbers):
        return None
    size, mtime_ns, inode = numbers
    return Kept(size, sha256, mtime_ns, inode)
