"""Bring a snapshot to a directory: one process at a time, resumed where it broke off, verified, then named whole.

A directory is whole once `.ballast-fetch.json` stands in it; a process that dies before leaves parts behind that the
next one goes on with.
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
from ballast_cli.fetch.snapshot import File, Snapshot, is_intact
from ballast_cli.fetch.source import Source, Unavailable

MANIFEST = ".ballast-fetch.json"
_LOCK = ".ballast-fetch.lock"
_PART = ".part"
_AT_A_TIME = 4
_TRIES = 5
"""Times in a row that a broken stream is taken up again without a byte gained."""

Told = Callable[[str], None]
Advance = Callable[[int], None]


class Corrupt(CliError):
    """What arrived is not what the source says it holds."""


def manifest_of(directory: Path) -> dict[str, object]:
    """Read what a directory holds; empty where it is not whole."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_whole(directory: Path, snapshot: Snapshot) -> bool:
    """Tell whether a directory holds this snapshot: by its manifest and the sizes of its files."""
    if manifest_of(directory).get("version") != snapshot.version:
        return False
    paths = ((directory / file.name, file.size) for file in snapshot.files)
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def bring(source: Source, snapshot: Snapshot, directory: Path, *, tell: Told, advance: Advance) -> bool:
    """Have the snapshot whole in a directory; False where it was there already.

    Raises:
        Corrupt: a file differs from its checksum, twice.
        CliError: the disk is full or not writable, or the source fails.
    """
    with _clear_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory, tell):
            if is_whole(directory, snapshot):
                return False
            _make_way(directory, snapshot)
            missing = [file for file in snapshot.files if not is_intact(file, directory / file.name)]
            _check_room(directory, missing)
            counter = _Counter(snapshot.size - sum(file.size for file in missing), advance)
            with ThreadPoolExecutor(_AT_A_TIME) as threads:
                waiting = [threads.submit(_load, source, snapshot, file, directory, counter) for file in missing]
                try:
                    for done in waiting:
                        done.result()
                except BaseException:
                    counter.is_stopped = True
                    threads.shutdown(cancel_futures=True)
                    raise
            _write_manifest(directory, snapshot)
            return True


def link(name: Path, target: Path) -> None:
    """Point a name at a directory, in one step; an empty directory of that name gives way.

    Raises:
        Usage: something else stands there.
    """
    with _clear_errors(name):
        name.parent.mkdir(parents=True, exist_ok=True)
        if name.is_dir() and not name.is_symlink():
            try:
                name.rmdir()
            except OSError:
                raise Usage(
                    f"{name} is a directory with something in it, or a mount: name a path that is free (below it, for "
                    f"example {name / target.name}), it becomes a link to {target}."
                ) from None
        elif name.exists() and not name.is_symlink():
            raise Usage(f"{name} is a file: name a path that is free, it becomes a link to {target}.")
        fresh = name.with_name(f".{name.name}.{os.getpid()}")
        fresh.symlink_to(target)
        fresh.replace(name)


class _Counter:
    """Bytes at hand, over all threads."""

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
def _alone(directory: Path, tell: Told) -> Iterator[None]:
    """Hold the directory's lock; the kernel frees it with the process."""
    with (directory / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"Another process fetches to {directory}; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_way(directory: Path, snapshot: Snapshot) -> None:
    """Take back the word that the directory is whole, and what only the former snapshot had."""
    before = manifest_of(directory).get("files")
    (directory / MANIFEST).unlink(missing_ok=True)
    wanted = {file.name for file in snapshot.files}
    for name in before if isinstance(before, dict) else ():
        if name not in wanted and "/" not in name:
            (directory / name).unlink(missing_ok=True)


def _check_room(directory: Path, missing: list[File]) -> None:
    parts = (directory / f"{file.name}{_PART}" for file in missing)
    needed = sum(file.size for file in missing) - sum(part.stat().st_size for part in parts if part.exists())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CliError(
            f"{directory} has {_size(free)} free, the model needs {_size(needed)} more: free some, or fetch to a "
            "larger volume. What is there already is kept."
        )


def _load(source: Source, snapshot: Snapshot, file: File, directory: Path, counter: _Counter) -> None:
    part, path = directory / f"{file.name}{_PART}", directory / file.name
    path.unlink(missing_ok=True)
    if part.exists():
        counter.add(part.stat().st_size)
    for is_last in (False, True):
        _stream(source, snapshot, file, part, counter)
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
        f"{file.name} of {snapshot.source} is not what the source says ({file.size:,} bytes, {file.digest}), twice: "
        "the copy there is damaged, or something on the way changes it."
    )


def _stream(source: Source, snapshot: Snapshot, file: File, part: Path, counter: _Counter) -> None:
    """Append to the part until it has its size; take a broken stream up again."""
    failures = 0
    while (start := part.stat().st_size if part.exists() else 0) < file.size or not part.exists():
        try:
            with part.open("ab") as opened, source.read(file, start) as pieces:
                for piece in pieces:
                    opened.write(piece)
                    counter.add(len(piece))
            why = Unavailable(f"{snapshot.source}: {file.name} ends after {start:,} of {file.size:,} bytes.")
        except Unavailable as error:
            why = error
        failures = 0 if part.exists() and part.stat().st_size > start else failures + 1
        if failures >= _TRIES:
            raise why


def _write_manifest(directory: Path, snapshot: Snapshot) -> None:
    files = {file.name: {"size": file.size, "digest": file.digest} for file in snapshot.files}
    fresh = directory / f"{MANIFEST}{_PART}"
    fresh.write_text(
        json.dumps({"source": snapshot.source, "version": snapshot.version, "files": files}, indent=1) + "\n",
        encoding="utf-8",
    )
    fresh.replace(directory / MANIFEST)


@contextmanager
def _clear_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CliError(
                f"The disk of {directory} is full: free some or name a larger one; a new run goes on."
            ) from None
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise Usage(f"{directory} cannot be written to ({error.strerror}): name a directory of yours.") from None
        raise


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
