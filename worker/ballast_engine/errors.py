"""Errors of this package.

EngineError
├── InvalidRequest         the engine can never serve the request
│   └── InvalidChat        the chat template cannot render the messages, or the model has none
├── InvalidCheckpoint      the model directory cannot be loaded
└── InvalidOptions         the engine cannot be built with the options
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors. The message states what was found, what was expected and what to do."""


class InvalidRequest(EngineError, ValueError):
    """The engine can never serve the request."""


class InvalidChat(InvalidRequest):
    """The model's chat template cannot render the messages, or the model has no chat template."""


class InvalidCheckpoint(EngineError):
    """The model directory cannot be loaded."""


class InvalidOptions(EngineError, ValueError):
    """The engine cannot be built with the options."""
