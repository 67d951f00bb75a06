"""Downloads the files of a model to a directory. One process at a time downloads, resumes, and verifies.

A directory is complete when it contains `.ballast-fetch.json`. If a process dies before that, the next one continues
with the parts that it left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ballast_cli.errors import CliError, Usage
from ballast_cli.fetch.model_files import File, ModelFiles, is_intact
from ballast_cli.fetch.source import Source, Unavailable

MANIFEST = ".ballast-fetch.json"
_LOCK = ".ballast-fetch.lock"
_PART = ".part"
_NUM_THREADS = 4
_MOST_FAILURES = 5
"""Times in a row that a broken stream is resumed without receiving a byte."""

Notify = Callable[[str], None]
Advance = Callable[[int], None]


class Corrupt(CliError):
    """A downloaded file differs from the checksum of the source."""


def manifest_of(directory: Path) -> dict[str, object]:
    """Return the manifest of a directory, or an empty one if the directory is not complete."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_complete(directory: Path, model: ModelFiles) -> bool:
    """Return whether a directory has these files, by its manifest and the sizes of the files."""
    if manifest_of(directory).get("version") != model.version:
        return False
    paths = ((directory / file.name, file.size) for file in model.files)
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def download(source: Source, model: ModelFiles, directory: Path, *, notify: Notify, advance: Advance) -> bool:
    """Download the missing files to a directory. Return False if it was complete already.

    Raises:
        Corrupt: a file differed from its checksum twice.
        CliError: the disk is full or not writable, or the source failed.
    """
    with _disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, notify):
            if is_complete(directory, model):
                return False
            _remove_old_files(directory, model)
            missing = [file for file in model.files if not is_intact(file, directory / file.name)]
            _check_disk_space(directory, missing)
            counter = _Counter(model.size - sum(file.size for file in missing), advance)
            with ThreadPoolExecutor(_NUM_THREADS) as threads:
                waiting = [threads.submit(_load, source, model, file, directory, counter) for file in missing]
                try:
                    for done in waiting:
                        done.result()
                except BaseException:
                    counter.is_stopped = True
                    threads.shutdown(cancel_futures=True)
                    raise
            _write_manifest(directory, model)
            return True


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
        fresh.symlink_to(target)
        fresh.replace(name)


class _Counter:
    """Counts the received bytes of all threads."""

    def __init__(self, start: int, advance: Advance) -> None:
        self.is_stopped = False
        self._count = start
        self._advance = advance
        self._lock = Lock()

    def add(self, count: int) -> None:
        if self.is_stopped:
            raise CliError("Stopped.")
        with self._lock:
            self._count += count
            self._advance(self._count)


@contextmanager
def _locked(directory: Path, notify: Notify) -> Iterator[None]:
    """Hold the lock of the directory. The kernel releases it when the process ends."""
    with (directory / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"Another process is downloading to {directory}. Waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_old_files(directory: Path, model: ModelFiles) -> None:
    """Remove the manifest, and the files that only the previous version has."""
    before = manifest_of(directory).get("files")
    (directory / MANIFEST).unlink(missing_ok=True)
    wanted = {file.name for file in model.files}
    for name in before if isinstance(before, dict) else ():
        if name not in wanted and "/" not in name:
            (directory / name).unlink(missing_ok=True)


def _check_disk_space(directory: Path, missing: list[File]) -> None:
    parts = (directory / f"{file.name}{_PART}" for file in missing)
    needed = sum(file.size for file in missing) - sum(part.stat().st_size for part in parts if part.exists())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CliError(
            f"{directory} has {_size(free)} free, but the model needs {_size(needed)} more. Free some space, or use a "
            "larger volume. Downloaded parts are kept."
        )


def _load(source: Source, model: ModelFiles, file: File, directory: Path, counter: _Counter) -> None:
    part, path = directory / f"{file.name}{_PART}", directory / file.name
    path.unlink(missing_ok=True)
    if part.exists():
        counter.add(part.stat().st_size)
    for is_last in (False, True):
        _stream(source, model, file, part, counter)
        if is_intact(file, part):
            with part.open("rb") as opened:
                os.fsync(opened.fileno())
            part.replace(path)
            return
        counter.add(-part.stat().st_size)
        part.unlink()
        if is_last:
            break
    raise Corrupt(
        f"{file.name} of {model.source} differed twice from the checksum of the source ({file.size:,} bytes, "
        f"{file.digest}). The file is damaged in the source or by a proxy. Check both."
    )


def _stream(source: Source, model: ModelFiles, file: File, part: Path, counter: _Counter) -> None:
    """Append to the part until it has its size. Resume a broken stream."""
    failures = 0
    while (start := part.stat().st_size if part.exists() else 0) < file.size or not part.exists():
        try:
            with part.open("ab") as opened, source.read(file, start) as pieces:
                for piece in pieces:
                    opened.write(piece)
                    counter.add(len(piece))
            why = Unavailable(f"{model.source}: {file.name} ends after {start:,} of {file.size:,} bytes.")
        except Unavailable as error:
            why = error
        failures = 0 if part.exists() and part.stat().st_size > start else failures + 1
        if failures >= _MOST_FAILURES:
            raise why


def _write_manifest(directory: Path, model: ModelFiles) -> None:
    files = {file.name: {"size": file.size, "digest": file.digest} for file in model.files}
    fresh = directory / f"{MANIFEST}{_PART}"
    fresh.write_text(
        json.dumps({"source": model.source, "version": model.version, "files": files}, indent=1) + "\n",
        encoding="utf-8",
    )
    fresh.replace(directory / MANIFEST)


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CliError(
                f"The disk of {directory} is full. Free some space, or use a larger volume. Then run the command again "
                "to resume."
            ) from None
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise Usage(
                f"Cannot write to {directory} ({error.strerror}). Name a directory that you can write to."
            ) from None
        raise


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
