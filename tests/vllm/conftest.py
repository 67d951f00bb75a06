"""Tests that need vLLM, except those in `messages`. `make vllm` makes an environment with vLLM and runs all of them.

Elsewhere the others are not collected, so that `make test` neither needs vLLM nor reports skipped tests.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None

if HAS_VLLM:
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parent.parent / "policy")]
else:
    collect_ignore = ["server", *(path.name for path in Path(__file__).parent.glob("test_*.py"))]


@pytest.fixture(scope="session", autouse=HAS_VLLM)
def later_engines_in_this_process() -> Iterator[None]:
    """Hide a module from vLLM's search for kernels in all modules, which each engine does.

    The search fails on an attribute of `llvmlite.binding.ffi`. Engines with n-gram drafts import it, and only the
    engines of tests come after another one in the same process.
    """
    from vllm.triton_utils import dispatcher

    name, rebind = "llvmlite.binding.ffi", dispatcher._rebind_kernels  # noqa: SLF001 -- vLLM's

    def without_llvmlite(overrides: list[Any]) -> None:
        hidden = sys.modules.pop(name, None)
        try:
            rebind(overrides)
        finally:
            if hidden is not None:
                sys.modules[name] = hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_rebind_kernels", without_llvmlite)
        yield


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Take the handler of SIGTERM back that the program sets in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 12 MB with random weights, whose greedy answers repeat."""
    from small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def wandering_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 12 MB with random weights, whose greedy answers wander: equal answers prove something."""
    from small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "wandering", spread=0.12)
