"""Errors of this package.

EngineError
├── InvalidRequest         a request that can never be served as it stands
│   ├── RequestTooLong     its prompt leaves no room for an answer
│   ├── DuplicateRequest   its id is in use
│   └── InvalidChat        messages that the model's chat template cannot take, or a model without one
├── InvalidCheckpoint      a model directory that cannot be loaded
├── InvalidOptions         an engine that cannot be built as asked
└── IntegrityError         blocks, slots or counters that do not balance: a defect of this package
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors; the message says what was found, what was wanted and what to do."""


class InvalidRequest(EngineError, ValueError):
    """A request that can never be served as it stands."""


class RequestTooLong(InvalidRequest):
    """The prompt leaves no room for an answer."""

    def __init__(self, num_prompt: int, limit: int) -> None:
        self.num_prompt = num_prompt
        self.limit = limit
        super().__init__(
            f"The prompt has {num_prompt} tokens; this model serves {limit} tokens of prompt and answer together, and "
            f"the answer needs at least one: shorten the prompt to {limit - 1} tokens or fewer."
        )


class DuplicateRequest(InvalidRequest):
    """The id belongs to a request that is still in the engine."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"Request id {request_id!r} is in use by a request that has not ended: choose another id.")


class InvalidChat(InvalidRequest):
    """Messages that the model's chat template cannot take, or a model without a chat template."""


class InvalidCheckpoint(EngineError):
    """A model directory that cannot be loaded."""


class InvalidOptions(EngineError, ValueError):
    """An engine that cannot be built as asked."""


class IntegrityError(EngineError):
    """Blocks, slots or counters do not balance: a defect of this package, worth a report with its message."""
