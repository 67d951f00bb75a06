"""Sides of a comparison that take turns, with clocks that follow the speed of the machine.

The speed of a machine changes within minutes, by half and more. So each side has a process of its own, and they take
turns of some seconds. Before each turn of all, plain vLLM computes a fixed number of requests. The longer these take,
the slower the clocks of the sides run, so the load stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from statistics import median
from typing import Any

from replay import Clock
from replay.side_process import SideProcess, pause

TURN = 2.0
"""Seconds that a side runs before the next one runs."""


class Pace:
    """How fast the machine is now, compared with the time of the first measurements."""

    def __init__(self, measure: Callable[[], float]) -> None:
        """Measure first. `measure` computes a fixed amount of work, and returns its seconds."""
        self._measure = measure
        self._seconds = [measure() for _ in range(3)]
        self.found: list[float] = []

    def measure(self) -> float:
        """Return the seconds at first over the seconds now, of the same work; the median of three."""
        self._seconds.append(self._measure())
        self.found.append(median(self._seconds[:4]) / median(self._seconds[-3:]))
        return self.found[-1]

    def spread(self) -> str:
        """Return a sentence on what was measured."""
        return f"The pace of the machine was {min(self.found):.2f} to {max(self.found):.2f}."


def wait_for_turn(clock: Clock) -> Callable[[object], None]:
    """Return what a side calls at the end of each of its turns."""

    def wait(_: object) -> None:
        clock.set_pace(pause({})["pace"])

    return wait


def in_turns(sides: Mapping[str, SideProcess], pace: Pace, *, report: bool = False) -> dict[str, dict[str, Any]]:
    """Let the sides take turns until the runs that they began end. Return the results."""
    found: dict[str, dict[str, Any]] = {}
    numbers = count(1)
    while len(found) < len(sides):
        paced, turn = pace.measure(), next(numbers)
        for name in [name for name in sides if name not in found]:
            result, is_end = sides[name].advance({"pace": paced})
            if is_end:
                found[name] = result
        if report and turn % 10 == 0:
            print(f"{TURN * turn:.0f} s of each side. Pace of the machine: {paced:.2f}", flush=True)
    return found
