"""Errors of this package.

SimError
├── BadTrace        a trace that cannot be replayed: the line, the value found, and the value expected
├── BadInput        an unknown GPU or model, or a figure out of range
├── Impossible      a question that physics answers with no; the message has the figure
└── PolicyDefect    a policy broke the contract of `StepPlan` (always a bug in the policy)
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
    """An input with an unknown name or a figure out of range."""


class Impossible(SimError):
    """A demand that no policy can meet. The message has the figure that forbids it."""


class PolicyDefect(SimError):
    """A plan that an engine could not execute, or work that waits indefinitely."""
