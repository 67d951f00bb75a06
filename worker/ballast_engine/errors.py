"""Errors of this package.

EngineError
├── InvalidRequest         the engine can never serve the request
│   ├── RequestTooLong     the prompt leaves no tokens for an answer
│   ├── DuplicateRequest   the id is in use
│   └── InvalidChat        the chat template cannot render the messages, or the model has none
├── InvalidCheckpoint      the model directory cannot be loaded
├── InvalidOptions         the engine cannot be built with the options
└── IntegrityError         blocks, slots or counters do not balance: a defect of this package
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors. The message states what was found, what was expected and what to do."""


class InvalidRequest(EngineError, ValueError):
    """The engine can never serve the request."""


class RequestTooLong(InvalidRequest):
    """The prompt leaves no tokens for an answer."""

    def __init__(self, num_prompt: int, limit: int) -> None:
        self.num_prompt = num_prompt
        self.limit = limit
        super().__init__(
            f"The prompt has {num_prompt} tokens, but this model serves {limit} tokens of prompt and answer together: "
            f"shorten the prompt to {limit - 1} tokens or fewer."
        )


class DuplicateRequest(InvalidRequest):
    """The id belongs to a request that is still in the engine."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"Request id {request_id!r} is in use by a request that has not ended: choose another id.")


class InvalidChat(InvalidRequest):
    """The model's chat template cannot render the messages, or the model has no chat template."""


class InvalidCheckpoint(EngineError):
    """The model directory cannot be loaded."""


class InvalidOptions(EngineError, ValueError):
    """The engine cannot be built with the options."""


class IntegrityError(EngineError):
    """Blocks, slots or counters do not balance: a defect of this package. Report the message."""
