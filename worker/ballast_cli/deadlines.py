"""Parses a deadline: a time span from now, or a point in time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from ballast_cli.errors import Usage
from ballast_worker.forecast import duration

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_SPAN = re.compile(r"\+?((?:\d+(?:\.\d+)?[wdhms])+)")
_EXPECTED = "Use a time span such as 24h, 1h30m, or +30m, or a point in time such as 2030-01-31T18:00Z"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, and its text for the user."""

    at: float
    """Unix seconds."""
    spoken: str


def parse_deadline(text: str, now: datetime) -> Deadline:
    """Parse `24h`, `+1h30m`, `2030-01-31`, or `2030-01-31T18:00`. Without an offset (`Z`, `+02:00`), times are local.

    Raises:
        Usage: the text has another form, or the time has passed.
    """
    cleaned = text.strip()
    if span := _SPAN.fullmatch(cleaned.lower()):
        parts = re.findall(r"(\d+(?:\.\d+)?)([wdhms])", span[1])
        at = now.timestamp() + sum(float(count) * _UNITS[unit] for count, unit in parts)
    else:
        try:
            # Without an offset: local time, summer time included.
            at = datetime.fromisoformat(cleaned).timestamp()
        except (ValueError, OverflowError):
            raise Usage(f"--deadline: found {text!r}. {_EXPECTED}.") from None
    try:
        shown = _shown(at)
    except (OSError, OverflowError, ValueError):
        raise Usage(f"--deadline: {text!r} is outside the years 1 to 9999. {_EXPECTED}.") from None
    if at <= now.timestamp():
        raise Usage(f"--deadline: {text!r} is {shown}, which has passed. {_EXPECTED} in the future.")
    return Deadline(at, spoken(at, now.timestamp()))


def spoken(at: float, now: float) -> str:
    """Return a deadline in words."""
    return f"{_shown(at)} (in {duration(max(0.0, at - now))})"


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
