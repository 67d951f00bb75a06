"""The options with which an engine is built. `PolicyConfig` has those of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that change only with a restart."""

    directory: Path
    """Checkpoint: `config.json`, `*.safetensors`, `tokenizer.json`."""
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    attention: str = "auto"
    threads: int = 0
    """CPU threads; 0 uses all cores of this process except one."""
    block_tokens: int = 16
    kv_memory_bytes: int | None = None
    """None: a share of the free memory, at most what `slots` full contexts can use."""
    slots: int | None = None
    """None: as many as memory allows, at most 64."""
    max_model_len: int | None = None
    """None: that of the checkpoint."""
    prefix_cache: bool = True
    isolate_tenants: bool = False
    """Salt the prefix cache by tenant."""
