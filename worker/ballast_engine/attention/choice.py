"""Which attention backend runs a model here, and why another does not."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.errors import InvalidOptions
from ballast_engine.models.config import ModelConfig
from ballast_engine.native.compiler import NoCompiler
from ballast_engine.native.library import kernels

log = logging.getLogger(__name__)

Backend = Literal["sdpa", "cpu"]


def choose(wanted: str, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Backend:
    """Take the compiled kernel for `auto` where it can run, else `sdpa`; what is named runs or is refused."""
    if wanted not in {"auto", "sdpa", "cpu"}:
        raise InvalidOptions(f"{wanted!r} is not an attention backend of this engine: give auto, sdpa or cpu.")
    if wanted == "sdpa":
        return "sdpa"
    obstacle = _obstacle(config, dtype, device)
    if obstacle is None:
        return "cpu"
    if wanted == "cpu":
        raise InvalidOptions(f"The attention backend 'cpu' cannot run here: {obstacle}; or choose 'auto' or 'sdpa'.")
    if device.type == "cpu":
        log.warning("compiled kernels not used, the engine runs slower: reason=%s", obstacle)
    return "sdpa"


def _obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the model runs on {device}"
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    of_model = CpuAttention.obstacle(**heads, dtype=dtype)
    if of_model is not None:
        return of_model
    try:
        kernels()
    except NoCompiler as reason:
        return str(reason)
    return None
