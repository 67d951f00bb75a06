"""The versions of vLLM that Ballast supports."""

from __future__ import annotations

SUPPORTED = ("0.32",)
"""Releases whose private members pass the contract tests (`tests/vllm/test_contract.py`)."""


class UnsupportedVllm(RuntimeError):
    """A version of vLLM, or a setting of it, that Ballast does not support. The message is for the user."""


def check_version(version: str) -> None:
    """Raise `UnsupportedVllm` if Ballast does not support this version of vLLM."""
    release = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    if release not in SUPPORTED:
        raise UnsupportedVllm(
            f"Ballast supports vLLM {' and '.join(SUPPORTED)}, but vLLM {version} is installed. Install a supported "
            "version, or a version of Ballast that supports this one."
        )
