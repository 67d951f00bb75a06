"""How an engine is built; what the policy is told stands in `PolicyConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything that needs a restart to change."""

    directory: Path
    """Checkpoint: `config.json`, `*.safetensors`, `tokenizer.json`."""
    device: str = "auto"
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    attention: str = "auto"
    threads: int = 0
    """CPU threads; 0 takes the cores this process may use, less one."""
    block_tokens: int = 16
    kv_memory_bytes: int | None = None
    """None: a share of what is free, at most what `slots` full contexts can use."""
    slots: int | None = None
    """None: what memory allows, at most 64 on CPU and 256 on a GPU."""
    max_model_len: int | None = None
    """None: the checkpoint's own."""
    prefix_cache: bool = True
    isolate_tenants: bool = False
    """Salt the prefix cache by tenant."""
    mode: Literal["continuous", "static"] = "continuous"
    """`static` is the baseline of the benchmarks: a batch runs to its end before the next one is let in."""
