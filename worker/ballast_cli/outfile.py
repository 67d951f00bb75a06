"""Writes a file of results that appears when it is complete, and continues an interrupted one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ballast_cli.errors import Usage


class OutFile:
    """Collects lines in `NAME.part` and renames it to `NAME` at the end.

    If an interrupted call left a `NAME.part`, writing continues there. Its complete lines count as written, and an
    incomplete last line is dropped.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise Usage(f"--output: {path} is a directory. Name a file, such as {path / 'out.jsonl'}.")
        if path.exists() and not path.is_file():  # a rename would replace the device
            raise Usage(f"--output: {path} is no regular file. Omit the option to write to standard output.")
        self.path = path
        self.part = path.with_name(f"{path.name}.part")

    def write(self, lines: Iterable[dict[str, Any]], *, job_id: str) -> int:
        """Append the lines whose `id` is missing, rename the file, and return the number of its lines."""
        try:
            seen, whole = self._recover(job_id)
            with self.part.open("r+b" if self.part.exists() else "wb") as file:
                file.truncate(whole)
                file.seek(whole)
                for line in lines:
                    if line["id"] in seen:
                        continue
                    seen.add(line["id"])
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                os.fsync(file.fileno())
            self.part.replace(self.path)
        except OSError as error:
            raise Usage(f"--output: cannot write {self.path} ({error.strerror}). Choose another file.") from None
        return len(seen)

    def _recover(self, job_id: str) -> tuple[set[str], int]:
        """Return the ids in the part, and its length up to the last complete line.

        Raises:
            Usage: the part belongs to another job.
        """
        if not self.part.exists():
            return set(), 0
        seen, whole = set(), 0
        with self.part.open("rb") as file:
            for line in file:
                try:
                    one = json.loads(line)["id"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    one = None
                if not isinstance(one, str):
                    break
                if not one.startswith(f"batch_req_{job_id}_"):
                    raise Usage(
                        f"--output: {self.part} is the unfinished output of another job ({one!r}). Remove it, or "
                        "choose another file."
                    )
                seen.add(one)
                whole += len(line)
        return seen, whole
