"""The fields of a resource that let vLLM serve the small model on a CPU with little memory."""

from __future__ import annotations

from typing import Any

from images import VLLM_WORKER

ARGUMENTS = ("--enforce-eager",)
ENGINE: dict[str, Any] = {
    "backend": "vllm", "threads": 1, "kvMemoryMebibytes": 256, "vllm": {"args": list(ARGUMENTS)},
}  # fmt: skip
START_SECONDS = 420


def template(node: str) -> dict[str, Any]:
    """Return the fields of a pod with the image of vLLM, on the node that has it."""
    return {
        "image": VLLM_WORKER.name,
        "nodeSelector": {"kubernetes.io/hostname": node},
    }
