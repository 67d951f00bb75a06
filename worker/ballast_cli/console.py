"""Writes data to stdout, and progress and errors to stderr. Colors and bars appear on a terminal only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text


def stdout() -> Console:
    """Return the console for data. `FORCE_COLOR` makes no terminal of a pipe."""
    return Console(file=sys.stdout, highlight=False, force_terminal=sys.stdout.isatty())


def stderr() -> Console:
    """Return the console for progress. A pipe gets plain lines that are never wrapped."""
    messages = cast("IO[str]", _Messages(sys.stderr))
    return Console(file=messages, highlight=False, soft_wrap=True, force_terminal=sys.stderr.isatty())


def say(sentence: str) -> None:
    """Write a message of one or more lines, which is not data, to stderr. No text in it controls a terminal."""
    say_raw("\n".join(map(printable, sentence.split("\n"))) + "\n")


def say_raw(text: str) -> None:
    """Write a part of a line, or a control sequence, to stderr."""
    messages = _Messages(sys.stderr)
    messages.write(text)
    messages.flush()


class _Messages:
    """Stderr without its errors: a message that nothing reads, or that a disk cannot take, stops no command."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.write(json_text(value, encoding=sys.stdout.encoding, indent=2) + "\n")
    sys.stdout.flush()


def json_text(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """Return a value as JSON, with escapes for characters that would control a terminal.

    If the encoding lacks a character of it, all characters beyond ASCII are escaped.
    """
    text = _escaped(json.dumps(value, indent=indent, ensure_ascii=False))
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def _escaped(text: str) -> str:
    """Escape the characters of a JSON document that are not printable. It has line ends between values only."""
    if text.isprintable():
        return text
    # The work for each character is done in C: results have millions, and in French some are not printable.
    found = "".join({each for each in set(text) if not each.isprintable()} - {"\n"})
    return re.sub(f"[{found}]", lambda each: json.dumps(each[0])[1:-1], text) if found else text


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Write a table. In a pipe, or if it is wider than the terminal, it is aligned plain text. Nothing is cut off.

    The columns in `right` are aligned to the right.
    """
    console = stdout()
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    if console.is_terminal and sum(widths) + 2 * len(widths) <= console.width:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))  # a cell can hold the text of a tenant, which is no markup
        console.print(table)
        return
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def printable(text: str) -> str:
    """Replace characters that would control a terminal by `?`, and tabs by spaces."""
    return "".join(each if each.isprintable() else "?" for each in text.replace("\t", " "))


def examples(*lines: str) -> str:
    """Format the examples at the end of a command's help."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))
