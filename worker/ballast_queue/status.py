"""What a worker publishes about itself, with a time to live, for the operator, the CLI and routers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ClassLoad(BaseModel):
    """Load of one class in one worker."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    running: int = 0
    parked: int = 0
    waiting: int = 0
    reserved: int = 0
    lent: int = 0
    """Slots held beyond the reservation."""
    prefill_tokens_per_second: float = 0
    decode_tokens_per_second: float = 0
    requests_per_second: float = 0
    """Arrivals (online) or items taken up (offline)."""


class WorkerStatus(BaseModel):
    """A worker's state at one moment. A reader that finds none must treat the worker as unknown, never as idle."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    worker_id: str
    address: str
    """`http://host:port` of its API."""
    at: float
    """When it was published, Unix seconds."""
    model: str
    model_revision: str = ""
    slots: int
    batch_ceiling: int
    """Largest decode batch that the SLO allows, by the cost model."""
    kv_blocks_total: int
    kv_blocks_free: int
    online: ClassLoad
    offline: ClassLoad
    cost_model: tuple[float, ...] = ()
    """Coefficients k0..k4 of the step time, seconds; empty until trusted."""
    ttft_p99_seconds: float | None = None
    tpot_p99_seconds: float | None = None
    generation: int = 0
    """Configuration generation in force."""
    config_hash: str = ""
    """Hash of the configuration file's content in force."""
    is_ready: bool = True
    is_draining: bool = False
