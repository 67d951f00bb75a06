"""The fields of a resource that let vLLM serve the small model on a CPU with little memory."""

from __future__ import annotations

from typing import Any

from images import VLLM_WORKER

ARGUMENTS = ("--enforce-eager",)
ENGINE: dict[str, Any] = {
    "backend": "vllm", "threads": 1, "kvMemoryMebibytes": 256, "vllm": {"args": list(ARGUMENTS)},
}  # fmt: skip
TEMPLATE: dict[str, Any] = {
    "image": VLLM_WORKER.name,
    # vLLM compiles a part of its logprobs even with --enforce-eager, and the image has no compiler.
    "env": [{"name": "TORCH_COMPILE_DISABLE", "value": "1"}],
}
START_SECONDS = 420
