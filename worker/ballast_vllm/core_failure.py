"""Why EngineCore or a rank ended, for the last line of `ballast-vllm`: vLLM states it only in the log of that process.

vLLM logs the exception after a fixed sentence, and each of its processes writes its log to the stream that a variable
names. A file with a logging configuration would also replace that of vLLM's HTTP server.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STREAM_VARIABLE = "VLLM_LOGGING_STREAM"
FILE_VARIABLE = "BALLAST_CORE_FAILURE_FILE"
SENTENCES = ("WorkerProc failed to start.", "EngineCore failed to start.", "EngineCore encountered a fatal error.")
"""What vLLM logs with the exception, in the block that caught it."""
NOT_STARTED = "vLLM did not start: {}"
MOST_SHOWN = 480
"""Characters of a reason. The last line of the output has others before it, and is bounded, too."""
_SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=\?)[^\s'\"=?]*=[^\s'\"]*")
"""The user and the query of a URL, such as a signature. More people can read the condition than the model."""


@contextmanager
def noted() -> Iterator[Callable[[], str | None]]:
    """Let the processes of vLLM that start in the block note why they end. Yield a function that returns the reason."""
    with tempfile.TemporaryDirectory(prefix="ballast-") as folder:
        path = Path(folder) / "reason"
        os.environ[FILE_VARIABLE] = str(path)
        os.environ.setdefault(STREAM_VARIABLE, f"ext://{__name__}.STREAM")
        yield lambda: path.read_text(encoding="utf-8") or None if path.exists() else None


class LogStream:
    """Standard output. It notes the exception that vLLM logs as EngineCore or a rank ends."""

    def write(self, text: str) -> int:
        """Write a line of the log."""
        error = sys.exc_info()[1]
        if error is not None and any(sentence in text for sentence in SENTENCES):
            with suppress(Exception):  # the line of the log states the reason, too
                _note(error)
        return sys.stdout.write(text)

    def flush(self) -> None:
        """Flush the output."""
        sys.stdout.flush()


STREAM = LogStream()


def _note(error: BaseException) -> None:
    """Note the reason. The first process that fails is the cause, and others only name it."""
    path = Path(os.environ[FILE_VARIABLE])
    message = _SECRETS.sub("…", " ".join(str(error).split()) or "no message")
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{type(error).__name__}: {message}"[:MOST_SHOWN])
        file.flush()
        os.link(file.name, path)  # a link fails if another process was first, and never shows a part of the text
