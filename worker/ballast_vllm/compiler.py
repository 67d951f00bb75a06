"""The C++ compiler with which vLLM on a CPU compiles parts of itself at the first request that needs them.

Without a compiler, such a request ends EngineCore. Without compilation, vLLM computes the same in plain torch.
"""

from __future__ import annotations

import os
import shutil

OFF = "TORCH_COMPILE_DISABLE"
"""The variable with which torch compiles nothing."""


def missing_compiler() -> str | None:
    """Return the compiler that torch would call and that this machine lacks; None if torch needs none."""
    if OFF in os.environ:
        return None
    name = os.environ.get("CXX", "g++")
    return name if shutil.which(name) is None else None
