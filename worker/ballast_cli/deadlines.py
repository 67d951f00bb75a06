"""Parses a deadline: a time span from now, or a point in time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from ballast_cli.errors import Usage
from ballast_queue.job import LAST_DEADLINE
from ballast_worker.forecast import duration

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_SPAN = re.compile(r"\+?((?:\d+(?:\.\d+)?[wdhms])+)")
_EXPECTED = "Use a time span such as 24h, 1h30m, or +30m, or a point in time such as 2030-01-31T18:00Z"


CLOCKS_DIFFER_SECONDS = 30.0
"""A larger difference between the clocks of this machine and of the queue is named."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline as a user wrote it."""

    text: str
    span: float | None
    """Seconds from the submission."""
    moment: float | None
    """Or Unix seconds."""

    def at(self, now: float) -> float:
        """Return the deadline in Unix seconds. `now` is the time of the queue, by which jobs expire."""
        at = now + self.span if self.span is not None else self.moment
        assert at is not None, "a deadline is a span or a moment"
        return at

    def by(self, now: float, own: float) -> float:
        """Return the deadline of a new job. `own` is the time of this machine.

        Raises:
            Usage: the time has passed.
        """
        if (at := self.at(now)) > now:
            return at
        raise self.passed(now, own)

    def passed(self, now: float, own: float) -> Usage:
        """Return the error of a new job whose deadline has passed."""
        clocks = ""
        if abs(now - own) > CLOCKS_DIFFER_SECONDS:
            clocks = f" by the clock of the queue. There it is {in_utc(now)}, on this machine {in_utc(own)}"
        return Usage(
            f"--deadline: {self.text!r} is {in_utc(self.at(now))}, which has passed{clocks}. {_EXPECTED} in the future."
        )


def parse_deadline(text: str, now: float) -> Deadline:
    """Parse `24h`, `+1h30m`, `2030-01-31`, or `2030-01-31T18:00`. Without an offset (`Z`, `+02:00`), times are local.

    Raises:
        Usage: the text has another form, or names a time that no calendar has.
    """
    cleaned = text.strip()
    span = moment = None
    if found := _SPAN.fullmatch(cleaned.lower()):
        parts = re.findall(r"(\d+(?:\.\d+)?)([wdhms])", found[1])
        at = now + (span := sum(float(count) * _UNITS[unit] for count, unit in parts))
    else:
        try:
            # Without an offset: local time, summer time included.
            at = moment = datetime.fromisoformat(cleaned).timestamp()
        except (ValueError, OverflowError):
            raise Usage(f"--deadline: found {text!r}. {_EXPECTED}.") from None
    try:
        in_utc(at)
    except (OSError, OverflowError, ValueError):
        raise Usage(f"--deadline: {text!r} is outside the years 1 to 9999. {_EXPECTED}.") from None
    if at >= LAST_DEADLINE:
        raise Usage(f"--deadline: {text!r} is not before {in_utc(LAST_DEADLINE)}. {_EXPECTED}.")
    return Deadline(text, span, moment)


def spoken(at: float, now: float) -> str:
    """Return a deadline in words."""
    return f"{in_utc(at)} (in {duration(max(0.0, at - now))})"


def in_utc(at: float) -> str:
    """Return a point in time, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
