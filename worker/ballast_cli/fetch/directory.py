"""A directory of model files in which no symbolic link is followed.

Other processes may write to the directory, such as other pods of the node. So every name is opened relative to the open
directory, with O_NOFOLLOW, and only regular files are used. A name may have one folder before it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from ballast_cli.errors import CliError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o644
_MOST_BYTES = 255
"""Longest name of a file on common file systems."""


def is_plain(name: str) -> bool:
    """Return whether a name is that of a visible file in one directory, and safe to show in a terminal."""
    is_short = 0 < len(name.encode(errors="replace")) <= _MOST_BYTES
    return is_short and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\")


def is_safe(name: str) -> bool:
    """Return whether a name is plain, or a plain name in a folder with a plain name."""
    return name.count("/") <= 1 and all(map(is_plain, name.split("/")))


class Directory:
    """An open directory."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, is_shared: bool = False) -> Iterator[Self]:
        """Open a directory. With `is_shared`, others can write to its parent, and it must not be a symbolic link.

        Raises:
            OSError: the directory does not exist, or is a link or no directory.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_shared else 0)
        descriptor = os.open(path, flags)
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the state of a regular file, or None if there is no such file."""
        try:
            with self._folder(name) as (folder, last):
                found = os.stat(last, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def size(self, name: str) -> int:
        """Return the size of a regular file, or 0 if there is no such file."""
        found = self.stat(name)
        return found.st_size if found else 0

    @contextmanager
    def read(self, name: str) -> Iterator[IO[bytes]]:
        """Open a regular file.

        Raises:
            OSError: there is no such file, or it is a link.
        """
        with os.fdopen(self._open(name, _READ), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise FileNotFoundError(name)
            yield opened

    @contextmanager
    def append(self, name: str) -> Iterator[IO[bytes]]:
        """Open a regular file to append to it. Replace anything else of that name, and a file with a second name."""
        before = self.stat(name)
        if before is None or before.st_nlink != 1:
            if "/" in name:
                with suppress(FileExistsError):
                    os.mkdir(name.partition("/")[0], dir_fd=self._descriptor)
            self.remove(name)
            descriptor = self._open(name, _CREATE)
        else:
            descriptor = self._open(name, _APPEND)
        with os.fdopen(descriptor, "ab") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise CliError(f"{self.path / name} changed while it was opened. Another process writes to it.")
            yield opened

    def remove(self, name: str) -> None:
        """Remove a file or a link, and not the target of the link."""
        with suppress(FileNotFoundError, NotADirectoryError), self._folder(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def replace(self, name: str, target: str) -> None:
        """Rename a file within its folder, also over another one."""
        with self._folder(name) as (folder, last):
            os.replace(last, target.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        part = f"{name}.part"
        self.remove(part)
        with os.fdopen(self._open(part, _CREATE), "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        self.replace(part, name)

    @contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold a lock. The kernel releases it when the process ends."""
        with os.fdopen(self._open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _open(self, name: str, flags: int) -> int:
        with self._folder(name) as (folder, last):
            return os.open(last, flags, _MODE, dir_fd=folder)

    @contextmanager
    def _folder(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder that holds a name, and the last part of the name.

        Raises:
            OSError: the folder does not exist, or is a link or a file.
        """
        folder, _, last = name.rpartition("/")
        if not folder:
            yield self._descriptor, last
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder, flags, dir_fd=self._descriptor)
        try:
            yield descriptor, last
        finally:
            os.close(descriptor)
