"""Errors of this package.

WorkerError        of `ballast_worker`
└── ServerFailed   the server had started, and has failed
BadArguments       vLLM refuses its arguments, or they contradict the configuration
UnsupportedVllm    this version of vLLM, or a setting of it, is not supported; in `versions`
"""

from __future__ import annotations

from ballast_worker.errors import WorkerError


class BadArguments(Exception):
    """vLLM refuses its arguments, or they contradict the configuration."""


class ServerFailed(WorkerError):
    """The server had started, and has failed."""
