"""Files that change under a program."""

from __future__ import annotations

from pathlib import Path


def swap(path: Path, text: str) -> None:
    """Replace a file by a rename, as an editor or the kubelet does."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
