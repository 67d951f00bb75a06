"""Errors of this package.

BadArguments       vLLM refuses its arguments, or they contradict the configuration
UnsupportedVllm    this version of vLLM, or a setting of it, is not supported; in `versions`
"""

from __future__ import annotations


class BadArguments(Exception):
    """vLLM refuses its arguments, or they contradict the configuration."""
