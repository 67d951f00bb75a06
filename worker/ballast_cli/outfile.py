"""Writes a file of results that appears when it is complete, and continues an interrupted one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ballast_cli.console import json_text
from ballast_cli.errors import CliError, NotNow, Usage


class OutFile:
    """Collects lines in `NAME.part` and renames it to `NAME` at the end.

    If an interrupted call left a `NAME.part`, writing continues there. Its complete lines count as written, and an
    incomplete last line is dropped. A redriven item can have two lines, an error and then its new result. The file
    keeps the last line of each item, and no error of an item that has no result now. Two calls never write the same
    `NAME.part`.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise Usage(f"--output: {path} is a directory. Name a file, such as {path / 'out.jsonl'}.")
        if path.exists() and not path.is_file():  # a rename would replace the device
            raise Usage(f"--output: {path} is no regular file. Omit the option to write to standard output.")
        # The rename at the end would replace a link, and not the file that it names.
        self.path = Path(os.path.realpath(path)) if path.is_symlink() else path
        self.part = self.path.with_name(f"{self.path.name}.part")

    def write(self, lines: Iterable[dict[str, Any]], *, job_id: str) -> int:
        """Append the lines that are missing, rename the file, and return the number of its lines.

        `lines` are all that the file shall have, also those that an earlier call has written.

        Raises:
            NotNow: another call writes the part.
            Usage: the part belongs to another job, or the file cannot be written.
        """
        try:
            with self._held() as file:
                last, replaced, whole = self._recover(job_id)
                file.truncate(whole)
                stale = set(last)
                for line in lines:
                    stale.discard(line["id"])
                    text, start = json_text(line).encode() + b"\n", last.get(line["id"])
                    if start is not None:
                        file.seek(start)
                        if file.read(len(text)) == text:
                            continue
                        replaced.add(start)
                    last[line["id"]] = file.seek(0, os.SEEK_END)
                    file.write(text)
                    file.flush()
                replaced.update(last.pop(one) for one in stale if self._is_error(last[one], file))
                if replaced:
                    self._drop(replaced, file)
                os.fsync(file.fileno())
                self.part.replace(self.path)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise CliError(
                    f"--output: cannot write {self.path} ({error.strerror}). Free space, and run the command again: it "
                    "continues."
                ) from None
            raise Usage(
                f"--output: cannot write {self.path} ({error.strerror or error}). Choose another file."
            ) from None
        return len(last)

    @contextmanager
    def _held(self) -> Iterator[IO[bytes]]:
        """Open the part, and lock it as long as the context is active. The kernel unlocks it if the process ends."""
        while True:
            with os.fdopen(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise NotNow(
                        f"--output: another download writes {self.part}. Wait until it ends, or choose another file."
                    ) from None
                except OSError as error:
                    if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:  # file systems without locks
                        raise
                if self._is_part(file):
                    yield file
                    return

    def _is_part(self, file: IO[bytes]) -> bool:
        """Return False if another call has renamed the part since this one opened it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.part.stat())
        except FileNotFoundError:
            return False

    @staticmethod
    def _is_error(start: int, file: IO[bytes]) -> bool:
        """Return whether the line has no result. Only such an item can run again; others may be unreadable just now."""
        file.seek(start)
        return json.loads(file.readline()).get("error") is not None

    def _drop(self, replaced: set[int], file: IO[bytes]) -> None:
        """Remove the lines that start at these offsets. It moves lines forward only, so no line is lost on the way."""
        start = 0
        file.seek(0)
        with self.part.open("rb") as lines:
            for line in lines:
                if start not in replaced:
                    file.write(line)
                start += len(line)
        file.truncate()

    def _recover(self, job_id: str) -> tuple[dict[str, int], set[int], int]:
        """Return what the part holds: the offset of each id's last line, those of lines before it, and the length.

        The length is that up to the first line that is not complete. A call that ended early can leave such a line also
        between others, and all after it are written again.

        Raises:
            Usage: the part belongs to another job, or is no output of this command.
        """
        last: dict[str, int] = {}
        replaced: set[int] = set()
        whole = 0
        begin = json_text({"id": f"batch_req_{job_id}_"}).encode()[:-2]
        with self.part.open("rb") as file:
            if not begin.startswith(file.read(len(begin))):
                raise Usage(
                    f"--output: {self.part} is not the unfinished output of {job_id}. Remove it, or choose another "
                    "file."
                )
            file.seek(0)
            for line in file:
                try:
                    found = json.loads(line) if line.endswith(b"\n") else {}
                    one, custom_id = found["id"], found["custom_id"]
                except (ValueError, LookupError, TypeError, RecursionError):
                    break
                if one != f"batch_req_{job_id}_{custom_id}":
                    raise Usage(
                        f"--output: {self.part} is the unfinished output of another job ({one!r}). Remove it, or "
                        "choose another file."
                    )
                if one in last:
                    replaced.add(last[one])
                last[one] = whole
                whole += len(line)
        return last, replaced, whole
