"""Standing still between two layers: how a step is interrupted, and what it needs to go on.

One thread computes; any other may raise the interrupt. Compiled code reads it from memory before each layer, so asking
costs the step nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from ctypes import c_int32
from dataclasses import dataclass
from typing import TypeVar

from ballast_engine.batch import Ints

Result = TypeVar("Result")

_NEVER = 2**31 - 1


class Interrupt:
    """Asks whoever computes a step to stand still before its next layer. Cleared when it is made."""

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer = c_int32(_NEVER)
        """The first layer that is not computed; what the kernels read."""

    def raise_at(self, layer: int = 0) -> None:
        """Stop before that layer, or where the step stands if it is beyond."""
        self.layer.value = layer

    def clear(self) -> None:
        """Let a step go on to its end."""
        self.layer.value = _NEVER

    def is_raised_at(self, layer: int) -> bool:
        """Tell whether this layer is not to be computed now."""
        return layer >= self.layer.value


Computation = Generator[None, Interrupt | None, Result]
"""A computation that yields where it was interrupted, takes the interrupt to heed from then on, and ends in its result.

What it needs to go on stays in its frame: another one may run to its end in between.
"""


@dataclass(frozen=True, slots=True)
class Suspended:
    """A step that stands still. Going on uses it up; let go, it is forgotten."""

    course: Computation[Ints]


def follow(course: Computation[Ints], interrupt: Interrupt | None = None) -> Ints | Suspended:
    """Go on to the end, or to where the course is interrupted (again). One that has not begun knows its interrupt."""
    try:
        course.send(interrupt)
    except StopIteration as end:
        drawn: Ints = end.value
        return drawn
    return Suspended(course)


def whole(course: Computation[Result]) -> Result:
    """Follow a course that nobody interrupts."""
    try:
        next(course)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise RuntimeError("a computation without an interrupt stood still")
