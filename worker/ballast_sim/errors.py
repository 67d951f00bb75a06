"""Errors of this package.

SimError
├── BadTrace        a trace that cannot be replayed: where, what was found, what was wanted
├── BadInput        an unknown GPU or model, a figure out of range
├── Impossible      a question physics answers with no; the message has the figure
└── IllegalPlan     a policy broke the contract of `Plan` or a guarantee (always a bug in the policy)
"""

from __future__ import annotations


class SimError(ValueError):
    """Base of this package's errors."""


class BadTrace(SimError):
    """A trace that cannot be replayed."""

    def __init__(self, source: str, line: int | None, problem: str) -> None:
        where = source if line is None else f"{source}, line {line}"
        super().__init__(f"{where}: {problem}")


class BadInput(SimError):
    """An input that names nothing known or is out of range."""


class Impossible(SimError):
    """What was asked for cannot be done by any policy; the message says which figure forbids it."""


class IllegalPlan(SimError):
    """A plan that an engine could not carry out, or that breaks a guarantee."""
