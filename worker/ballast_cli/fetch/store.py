"""Downloads the files of a model to a directory. One process at a time downloads, resumes, and verifies.

A directory is complete when it contains a manifest. If a process dies before that, the next one continues with the
files and parts that it left. Of another version, it keeps only content that a checksum proves. No more is written than
the source announces and the limits admit.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import IO

from ballast_cli.console import say
from ballast_cli.errors import CliError, Usage
from ballast_cli.fetch.copies import adopt
from ballast_cli.fetch.directory import Directory, is_safe
from ballast_cli.fetch.manifest import MANIFEST, Kept, Manifest, read_manifest, write_manifest
from ballast_cli.fetch.model_files import File, ModelFiles, verified
from ballast_cli.fetch.source import Source, Unavailable
from ballast_cli.fetch.threads import map_in_threads

_LOCK = ".ballast-fetch.lock"
_PARTIAL = ".ballast-fetch.partial"
"""Holds the key of the model while its download is not complete."""
_PART = ".part"
_MOST_FAILURES = 5
"""Times in a row that a broken stream is resumed without a byte that is kept."""
NODE_PERCENT = 15.0
"""With less free than this, a kubelet with default settings removes images, and then evicts pods."""
NODE_FILE = Path("/etc/hosts")
"""The kubelet mounts it into each container, from the disk that has the volumes of the type emptyDir."""
_TRIFLE_PERCENT = 0.1
"""A fetch that adds no more to the disk than this may use the part that is kept free."""
_KEEP_FREE = "--keep-free-percent; for pods, BALLAST_KEEP_FREE_PERCENT in template.env"
_CHECK_BYTES = 64 * 1024 * 1024
"""The free disk is measured again after each of these, because others write to it as well."""
_PAUSE_SECONDS = 1.0
"""Pause after the first of them. It doubles with each."""

Advance = Callable[[int], None]


class TooLarge(CliError):
    """The source sends more than it announced, or more than the limits admit."""


class Corrupt(CliError):
    """A downloaded file differs from the checksum of the source."""


def is_complete(path: Path, model: ModelFiles, *, is_shared: bool = False) -> bool:
    """Return whether a directory has these files, unchanged since they were verified. This reads no file."""
    with Directory.find(path, is_shared=is_shared) as directory:
        if directory is None:
            return False
        manifest = read_manifest(directory)
        return manifest.is_of(model) and manifest.is_unchanged(directory)


def is_intact(path: Path, *, is_verified: bool, is_shared: bool) -> bool:
    """Return whether all files that `ballast fetch` recorded in a directory are there, and unchanged.

    If a file has another time or inode than recorded, or with `is_verified`, its checksum decides.
    """
    with Directory.find(path, is_shared=is_shared) as directory:
        if directory is None:
            return False
        manifest = read_manifest(directory)
        if manifest.is_unchanged(directory) and not is_verified:
            return True
        files = [File(name, kept.size, f"sha256:{kept.sha256}") for name, kept in manifest.files.items()]
        return bool(manifest.source) and all(_verified(directory, file) for file in files)


def download(
    source: Source,
    model: ModelFiles,
    path: Path,
    *,
    advance: Advance,
    max_bytes: int | None = None,
    keep_free_percent: float | None = None,
    is_verified: bool = False,
    is_shared: bool = False,
    others: Sequence[Path] = (),
) -> bool:
    """Download the missing and the changed files to a directory. Return False if it was complete already.

    `keep_free_percent` of the disk stay free: by default `NODE_PERCENT` on a node of Kubernetes, and nothing elsewhere.
    `is_verified` compares the checksums of files that look unchanged, too. `is_shared` is for a directory in a cache
    that others can write to: the directory itself must not be a symbolic link. Files of `others`, which are copies of
    other versions, are not downloaded again.

    Raises:
        Corrupt: a file differed from its checksum twice.
        TooLarge: the source announces or sends too much.
        CliError: the disk is full or not writable, or the source failed.
    """
    _check_announced(model, max_bytes)
    advice = "Free some space, or use a larger volume."
    if is_shared:
        advice += f" {path.parent} keeps each version that was fetched: delete those that no pod uses."
    with _disk_errors(path, advice), ExitStack() as stack:
        path.mkdir(parents=True, exist_ok=True)
        directory = stack.enter_context(Directory.open(path, is_shared=is_shared))
        busy = f"Another process is downloading to {path}. Waiting for it."
        stack.enter_context(directory.lock(_LOCK, lambda: say(busy)))
        before = read_manifest(directory)
        is_same = before.is_of(model)
        if is_same and before.is_unchanged(directory) and not is_verified:
            return False
        is_resumed = _key(directory) == model.key
        adopt(directory, model, others)
        kept = _intact(directory, model, before.files if is_same else {}, is_resumed=is_resumed)
        missing = [file for file in model.files if file.name not in kept]
        outdated = {file.name for file in missing} | (before.files.keys() - {file.name for file in model.files})
        outdated |= {f"{name}{_PART}" for name in kept}
        present = sum(each.size for each in kept.values())
        parts = sum(directory.size(f"{file.name}{_PART}") for file in missing)
        needed = sum(file.size or 0 for file in missing) - parts
        files = filter(None, map(directory.stat, outdated))
        released = sum(found.st_size for found in files if found.st_nlink == 1)
        growth = needed - released if all(file.size is not None for file in missing) else None
        disk = _Disk(directory.path, _kept_free(directory.path, keep_free_percent, growth), advice)
        limit = present + parts + disk.check(needed, released=released)
        counter = _Counter(present, advance, disk, limit=limit if max_bytes is None else min(limit, max_bytes))
        if not is_resumed:
            outdated |= {f"{file.name}{_PART}" for file in missing if not file.digest}
        for name in outdated:
            directory.remove(name)
        directory.remove(MANIFEST)
        directory.write(_PARTIAL, model.key.encode())
        loaded = map_in_threads(
            lambda file: _load(source, model, file, directory, counter), missing, on_failure=counter.stopped.set
        )
        kept |= {file.name: each for file, each in zip(missing, loaded, strict=True)}
        write_manifest(directory, Manifest(model.source, model.origin, model.version, kept))
        directory.remove(_PARTIAL)
        return bool(missing)


def _check_announced(model: ModelFiles, max_bytes: int | None) -> None:
    for file in model.files:
        if not is_safe(file.name):
            raise CliError(f"{model.source} has a file named {file.name!r}, which is not a plain name.")
    if max_bytes is not None and model.size > max_bytes:
        raise TooLarge(f"{model.source} has {_size(model.size)}, but --max-gigabytes admits {_size(max_bytes)}.")


def _key(directory: Directory) -> str:
    """Return the key of the model whose download was interrupted, or an empty text."""
    try:
        with directory.read(_PARTIAL) as opened:
            return opened.read(100).decode(errors="replace")
    except OSError:
        return ""


def _intact(directory: Directory, model: ModelFiles, known: Mapping[str, Kept], *, is_resumed: bool) -> dict[str, Kept]:
    """Return the files whose checksum is right, and files without one that the interrupted download left."""
    files = [_with_own(file, known) for file in model.files]
    checked = [file for file in files if file.digest or is_resumed]
    checks = map_in_threads(lambda file: _verified(directory, file), checked)
    return {
        file.name: Kept.of(directory, file.name, sha256) for file, sha256 in zip(checked, checks, strict=True) if sha256
    }


def _with_own(file: File, known: Mapping[str, Kept]) -> File:
    """Return the file with Ballast's own checksum if the source has none."""
    own = known[file.name].sha256 if file.name in known else ""
    return file if file.digest or not own else replace(file, digest=f"sha256:{own}")


def _verified(directory: Directory, file: File) -> str | None:
    """Return the SHA-256 of an intact file, or None."""
    found = directory.stat(file.name)
    if found is None:
        return None
    try:
        with directory.read(file.name) as opened:
            return verified(file, found.st_size, opened)
    except FileNotFoundError:
        return None


def link(name: Path, target: Path) -> None:
    """Link a name to a directory atomically. An empty directory of that name is removed first.

    Raises:
        Usage: a file or a directory with content has the name.
    """
    with _disk_errors(name):
        name.parent.mkdir(parents=True, exist_ok=True)
        if name.is_dir() and not name.is_symlink():
            try:
                name.rmdir()
            except OSError:
                raise Usage(
                    f"{name} is a mount, or a directory that is not empty. Name a path that does not exist, for "
                    f"example {name / target.name}. The path becomes a link to {target}."
                ) from None
        elif name.exists() and not name.is_symlink():
            raise Usage(f"{name} is a file. Name a path that does not exist. The path becomes a link to {target}.")
        fresh = name.with_name(f".{name.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(name)


@dataclass(frozen=True, slots=True)
class _Disk:
    """The disk of a directory, of which a part stays free."""

    path: Path
    kept_free: int
    advice: str

    def check(self, needed: int = 0, *, released: int = 0) -> int:
        """Return the bytes that may be written, with those that are `released` first.

        Raises:
            CliError: there are less than needed.
        """
        free = shutil.disk_usage(self.path).free + released
        if needed > free - self.kept_free:
            stays = f", of which {_size(self.kept_free)} must stay free ({_KEEP_FREE})" if self.kept_free else ""
            needs = f", but the model needs {_size(needed)} more" if needed > 0 else ""
            raise CliError(
                f"{self.path} has {_size(free)} free{stays}{needs}. {self.advice} Downloaded parts are kept."
            )
        return free - self.kept_free


class _Counter:
    """Counts the received bytes of all threads, and stops them at the limit."""

    def __init__(self, start: int, advance: Advance, disk: _Disk, *, limit: int) -> None:
        self.stopped = Event()
        self._count = start
        self._disk = disk
        self._unchecked = 0
        self._limit = limit
        self._advance = advance
        self._lock = Lock()

    def add(self, count: int) -> None:
        self.wait(0)
        with self._lock:
            if count > 0 and self._count + count > self._limit:
                raise TooLarge(
                    f"The source sends more than {_size(self._limit)}, which --max-gigabytes or the free disk admits."
                )
            self._count += count
            self._unchecked += max(0, count)
            if self._disk.kept_free and self._unchecked >= _CHECK_BYTES:
                self._unchecked = 0
                self._disk.check()
            self._advance(self._count)

    def wait(self, seconds: float) -> None:
        """Wait. Raise `CliError` if another thread has failed, or fails meanwhile."""
        if self.stopped.wait(seconds):
            raise CliError("Stopped.")


def _kept_free(path: Path, percent: float | None, growth: int | None) -> int:
    """Return the bytes of the disk that stay free. `growth` is None if the size of a file is unknown."""
    percent = percent if percent is not None else NODE_PERCENT if _is_of_node(path) else 0
    if not percent:
        return 0
    total = shutil.disk_usage(path).total
    return 0 if growth is not None and growth <= total * _TRIFLE_PERCENT / 100 else int(total * percent / 100)


def _is_of_node(path: Path) -> bool:
    """Return whether this is a pod, and the path is on the disk of its node. A volume claim has a disk of its own."""
    with suppress(OSError):
        return "KUBERNETES_SERVICE_HOST" in os.environ and path.stat().st_dev == NODE_FILE.stat().st_dev
    return False


def _load(source: Source, model: ModelFiles, file: File, directory: Directory, counter: _Counter) -> Kept:
    part = f"{file.name}{_PART}"
    if file.size is None or directory.size(part) > file.size:
        directory.remove(part)  # nothing shows how much of it is right
    counter.add(directory.size(part))
    for _ in range(2):
        _stream(source, model, file, directory, counter)
        sha256 = _verified(directory, replace(file, name=part))
        if sha256 is not None:
            with directory.read(part) as opened:
                os.fsync(opened.fileno())
            directory.replace(part, file.name)
            return Kept.of(directory, file.name, sha256)
        counter.add(-directory.size(part))
        directory.remove(part)
    raise Corrupt(
        f"{file.name} of {model.source} differed twice from the checksum of the source ({file.digest}). The file is "
        "damaged in the source or by a proxy. Check both."
    )


def _stream(source: Source, model: ModelFiles, file: File, directory: Directory, counter: _Counter) -> None:
    """Append to the part until it has its size. Resume a broken stream, or start again if no size is announced."""
    part, failures = f"{file.name}{_PART}", 0
    while True:
        start = directory.size(part)
        if file.size is not None and start >= file.size and directory.stat(part):
            return
        try:
            with directory.append(part) as opened, source.read(file, start) as pieces:
                _append(pieces, opened, model, file, counter)
            if file.size is None:
                return
            why = Unavailable(
                f"{model.source}: {file.name} ends after {directory.size(part):,} of {file.size:,} bytes."
            )
        except TooLarge:
            directory.remove(part)
            raise
        except Unavailable as error:
            why = error
        is_progress = file.size is not None and directory.size(part) > start
        failures = 0 if is_progress else failures + 1
        if file.size is None:
            counter.add(-directory.size(part))
            directory.remove(part)
        if failures >= _MOST_FAILURES:
            raise why
        if failures:
            counter.wait(_PAUSE_SECONDS * 2 ** (failures - 1))


def _append(pieces: Iterator[bytes], opened: IO[bytes], model: ModelFiles, file: File, counter: _Counter) -> None:
    """Append pieces, and no byte beyond the announced size."""
    received = opened.tell()
    for piece in pieces:
        received += len(piece)
        if file.size is not None and received > file.size:
            raise TooLarge(
                f"{file.name} of {model.source} is longer than the {file.size:,} bytes that the source announced. The "
                "download was stopped, and the file was removed. Check the source."
            )
        counter.add(len(piece))
        opened.write(piece)


@contextmanager
def _disk_errors(directory: Path, advice: str = "Free some space.") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CliError(f"The disk of {directory} is full. {advice} Then run the command again.") from None
        if error.errno == errno.EDQUOT:
            raise CliError(f"The quota of {directory} is used up. {advice} Then run the command again.") from None
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise Usage(
                f"Cannot write to {directory} ({error.strerror}). Name a directory that you can write to."
            ) from None
        if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENXIO}:
            raise Usage(
                f"{directory} is, or contains, a symbolic link or a directory where a file or directory of the model "
                "belongs. Remove it, or name another directory."
            ) from None
        raise


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
