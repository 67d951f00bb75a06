"""Choose the attention backend that runs a model on this machine."""

from __future__ import annotations

from typing import Literal

import torch

from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.errors import InvalidOptions
from ballast_engine.models.config import ModelConfig
from ballast_engine.native.compiler import NoCompiler
from ballast_engine.native.library import kernels
from ballast_log import Log

log = Log(__name__)

Backend = Literal["sdpa", "cpu"]


def choose(wanted: str, config: ModelConfig, *, dtype: torch.dtype) -> Backend:
    """Return the backend: for `auto` the compiled kernel if it can run here, else `sdpa`.

    Raises:
        InvalidOptions: the backend is unknown, or it was asked for by name and cannot run here.
    """
    if wanted not in {"auto", "sdpa", "cpu"}:
        raise InvalidOptions(f"{wanted!r} is not an attention backend of this engine: use auto, sdpa or cpu.")
    if wanted == "sdpa":
        return "sdpa"
    obstacle = _obstacle(config, dtype)
    if obstacle is None:
        return "cpu"
    if wanted == "cpu":
        raise InvalidOptions(f"The attention backend 'cpu' cannot run here: {obstacle}. Choose 'auto' or 'sdpa'.")
    log.warning("compiled kernels not used, the engine runs slower", reason=obstacle)
    return "sdpa"


def _obstacle(config: ModelConfig, dtype: torch.dtype) -> str | None:
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    of_model = CpuAttention.obstacle(**heads, dtype=dtype)
    if of_model is not None:
        return of_model
    try:
        kernels()
    except NoCompiler as reason:
        return str(reason)
    return None
