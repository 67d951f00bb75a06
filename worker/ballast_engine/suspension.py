"""Suspend a step between two layers, and resume it.

One thread computes; any other thread may raise the interrupt. Compiled code reads it from memory before each layer, so
the check costs nothing.
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
    """A request to suspend a step before its next layer. A new interrupt is not raised."""

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer = c_int32(_NEVER)
        """The first layer that is not computed. The kernels read it."""

    def raise_at(self, layer: int = 0) -> None:
        """Suspend the step before this layer, or at its next layer if it is beyond."""
        self.layer.value = layer

    def clear(self) -> None:
        """Clear the request to suspend, so that a step runs to its end."""
        self.layer.value = _NEVER

    def is_raised_at(self, layer: int) -> bool:
        """Return whether the step is suspended before this layer."""
        return layer >= self.layer.value


Computation = Generator[None, Interrupt | None, Result]
"""A computation that yields when it is interrupted, receives the next interrupt, and returns its result.

Its state is in its frame, so another computation may run to its end in between.
"""


@dataclass(frozen=True, slots=True)
class Suspended:
    """A suspended step. It can be resumed once, or dropped."""

    computation: Computation[Ints]


def advance(computation: Computation[Ints], interrupt: Interrupt | None = None) -> Ints | Suspended:
    """Run a computation to its end or its next interrupt. One that has not started already has its interrupt."""
    try:
        computation.send(interrupt)
    except StopIteration as end:
        drawn: Ints = end.value
        return drawn
    return Suspended(computation)
