"""Log events with fields through the standard library: `log.info("ready", port=8000)`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

Format = Literal["text", "json"]


class Log:
    """A named source of events. It formats an event only if the level is on."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log an event for developers."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event for the people who run Ballast."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that needs attention."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure."""
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log a failure with the traceback of the current exception. Use it for defects, not for bad input."""
        self._emit(logging.ERROR, event, fields, trace=True)

    def _emit(self, level: int, event: str, fields: dict[str, object], *, trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=trace, stacklevel=3)


class KeyValueFormatter(logging.Formatter):
    """Format records as `12:00:00.123 INFO    ballast_worker.app ready port=8000`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as a line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = getattr(record, "fields", {})
        pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items())
        line = f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {record.name} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Format records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as a line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and is_plain else json.dumps(text)


def configure_packages(level: str, style: Format) -> None:
    """Write the logs of Ballast to stderr, in a process whose other logs belong to another program."""
    handler = _handler(style)
    for name in ("ballast_policy", "ballast_queue", "ballast_vllm", "ballast_worker"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())


def configure(level: str, style: Format) -> None:
    """Write all logs of the process to stderr in one format."""
    root = logging.getLogger()
    root.handlers[:] = [_handler(style)]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _handler(style: Format) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else KeyValueFormatter())
    return handler
