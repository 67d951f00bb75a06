"""A directory of model files in which no symbolic link is followed.

Other processes may write to the directory, such as other pods of the node. So every name is opened relative to the open
directory, with O_NOFOLLOW, and only regular files are used. A name may have one folder before it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from ballast_cli.errors import CliError, Usage

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

    @classmethod
    @contextmanager
    def find(cls, path: Path, *, is_shared: bool = False) -> Iterator[Self | None]:
        """Open a directory as `open` does, or yield None if that fails."""
        with ExitStack() as stack:
            directory = None
            with suppress(OSError):
                directory = stack.enter_context(cls.open(path, is_shared=is_shared))
            yield directory

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
            self.remove(name)
            descriptor = self._open(name, _CREATE, makes_folder=True)
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

    def link(self, name: str, other: Self) -> None:
        """Make an own file of another directory one of this directory, too, unless there is one of that name.

        Raises:
            OSError: the volume has no hard links, or forbids this one.
        """
        with other._folder(name) as (source, last), self._folder(name, makes_it=True) as (folder, _):
            os.link(last, last, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        found = self.stat(name)
        if found is None or found.st_uid != os.geteuid():  # its owner could change it after it was verified
            self.remove(name)

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
        """Hold a lock. The kernel releases it when the process ends.

        Raises:
            Usage: the volume has no locks.
        """
        with os.fdopen(self._open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+") as lock:
            try:
                _lock(lock, on_wait)
            except OSError as error:
                raise Usage(
                    f"Cannot lock {self.path} ({error.strerror}), and without a lock two pods may write the same file. "
                    "Use a volume with locks: on NFS, mount with version 4, or start the lock service of the server."
                ) from None
            yield

    def _open(self, name: str, flags: int, *, makes_folder: bool = False) -> int:
        with self._folder(name, makes_it=makes_folder) as (folder, last):
            return os.open(last, flags, _MODE, dir_fd=folder)

    @contextmanager
    def _folder(self, name: str, *, makes_it: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder that holds a name, and the last part of the name.

        Raises:
            OSError: the folder does not exist, or is a link or a file.
        """
        folder, _, last = name.rpartition("/")
        if not folder:
            yield self._descriptor, last
            return
        if makes_it:
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self._descriptor)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder, flags, dir_fd=self._descriptor)
        try:
            yield descriptor, last
        finally:
            os.close(descriptor)


def _lock(file: IO[bytes], on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
