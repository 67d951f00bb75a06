"""The status that each worker publishes for the operator, the CLI and routers, and the figures of the queue.

Whoever may write to the queue can write anything here, so every count has bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

from ballast_queue.job import Count, JobState, RequestCounts

LEAST_RATE = 1e-6
"""The offline rate that a worker publishes if it measured a lower one, or zero."""


class _Published(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


def _checked_address(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port is None:
        raise ValueError
    return address


class ClassLoad(_Published):
    """Load of one class in one worker."""

    running: Count = 0
    parked: Count = 0
    waiting: Count = 0
    held_up: Count = 0
    """Those waiting for a place of their adapter in vLLM, while online requests of other adapters hold all places."""
    reserved: Count = 0
    borrowed: Count = 0
    """Slots held beyond the reservation."""
    prefill_tokens_per_second: float = 0
    decode_tokens_per_second: float = 0
    requests_per_second: float = 0
    """Arrivals (online) or claimed items (offline)."""


class ReservationStatus(_Published):
    """The reservation of offline work, as the engine of one worker computed it in its last step."""

    slots: Count
    """Slots that are reserved; no more than `offline.maxPercent` allows."""
    blocks: Count
    """KV blocks that are reserved."""
    chunk: Count
    """Prefill tokens of a step that are reserved."""
    in_use: Count
    """Reserved slots in which an offline request runs. A parked request holds no slot."""
    is_met: bool
    """At least `min(slots, requests that the caps of their tenants allow to run)` offline requests run, or
    `is_met_by_tokens`.

    Only requests in the engine count. Items in the queue do not: see `WorkerStatus.can_claim`.
    """
    is_met_by_tokens: bool = False
    """Offline work takes the reserved prefill tokens with fewer requests. A free slot is then no shortage."""


class SloStatus(_Published):
    """Online requests of one worker that were judged by the SLO in the last minute."""

    ttft_judged: Count = 0
    ttft_met: Count = 0
    tpot_judged: Count = 0
    tpot_met: Count = 0
    latency_judged: Count = 0
    """Of a model that returns vectors or scores."""
    latency_met: Count = 0


class WorkerStatus(_Published):
    """State of a worker at one moment. Treat a worker without a status as unknown, never as idle."""

    version: int = 1
    worker_id: str
    address: Annotated[str, AfterValidator(_checked_address)]
    """`http://host:port` of its API."""
    at: float
    """When the worker published it, Unix seconds."""
    model: str
    model_revision: str = ""
    device: str = ""
    """The kind of device that computes, `cpu` or `cuda`; empty: unknown."""
    slots: Count
    batch_ceiling: Count
    """Largest batch that the SLO allows, by the cost model: of decodes, or of prompts if the model is an encoder."""
    kv_blocks_total: Count
    kv_blocks_free: Count
    online: ClassLoad
    offline: ClassLoad
    reservation: ReservationStatus
    can_claim: bool = False
    """The queue has items that this worker could run now: their tenant is below its slot cap."""
    offline_reserved: Count
    """Slots that `offline.reservedPercent` reserves. `reservation` has those that the batch ceiling leaves of them."""
    offline_most: Count
    """Slots that offline work may hold, by `offline.maxPercent`."""
    tenant_slots: dict[str, Count] = {}
    """Slots that offline work of each capped tenant may hold, for tenants that the worker serves or has served."""
    tenant_requests: dict[str, Count] = {}
    """Requests of the items that the worker holds, by tenant. An item may be several."""
    offline_items_per_second: float = 0
    """Items that ended per second while the worker last had more offline work than slots for it.

    0: not measured. The least measured rate is `LEAST_RATE`: offline work waits, and none runs.
    """
    offline_tokens_per_second: float = 0
    """Offline tokens decoded per second in the same time, with the same meaning of 0."""
    offline_items_while_running: float = 0
    """Items that ended per second in the part of this time in which offline work ran.

    It orders the jobs: unlike the rates above, it does not fall while none runs. 0: not measured.
    """
    offline_tokens_while_running: float = 0
    """Offline tokens decoded per second in the same part. 0: not measured."""
    ttft_p99_seconds: float | None = None
    tpot_p99_seconds: float | None = None
    latency_p99_seconds: float | None = None
    """Of a model that returns vectors or scores. It has no TTFT and no TPOT."""
    slo: SloStatus
    generation: int = 0
    """Configuration generation in force."""
    config_hash: str = ""
    """Hash of the configuration file's content in force."""
    has_invalid_file: bool = False
    """A file, such as that of API keys, is invalid or missing, so what it contained before is in force."""
    is_ready: bool = True
    is_draining: bool = False

    def public(self) -> str:
        """Return it as JSON for clients, without the names of tenants."""
        return self.model_dump_json(exclude={"tenant_slots", "tenant_requests"})


def held_requests(items: Mapping[str, int], workers: Iterable[WorkerStatus]) -> dict[str, int]:
    """Return the requests that all workers hold, by tenant: at least one for each of the `items` under lease."""
    found = Counter(items)
    published = Counter[str]()
    for worker in workers:
        published.update(worker.tenant_requests)
    return found | published  # the larger number of each tenant


class QueueStats(_Published):
    """Figures of a queue at one moment, over all jobs that it still keeps."""

    version: int = 1
    at: float
    """The server's clock, Unix seconds."""
    items: RequestCounts
    inbox: Count
    """Entries that no worker has read yet. They count as depth."""
    oldest_waiting_seconds: float
    """Age of the oldest job with items that may be claimed, or of the first inbox entry; 0 without one."""
    dead_letters: Count
    jobs_at_risk: Count = 0
    """Jobs that will miss their deadline at the current rates."""
    unclaimable: Count = 0
    """Waiting items of jobs that are paused or ending, and items of a model that no worker serves. More workers would
    run none of them."""
    unclaimable_at_risk: Count = 0
    """Jobs among `jobs_at_risk` that are paused, or whose items all name a model that no worker serves."""
    is_exhausted: bool = False
    """Redis has so little memory that it gives out no item: more than 1.2 times `maxmemory` is used."""
    jobs: dict[JobState, Count]

    @property
    def depth(self) -> int:
        """Items that wait for a worker, and inbox entries."""
        return self.items.waiting + self.inbox

    @property
    def claimable_depth(self) -> int:
        """Return the part of `depth` that more workers would serve: not the unclaimable; 0 if Redis is exhausted."""
        return 0 if self.is_exhausted else max(0, self.depth - self.unclaimable)

    @property
    def claimable_at_risk(self) -> int:
        """Return the part of `jobs_at_risk` that more workers would help: not the unclaimable, as above."""
        return 0 if self.is_exhausted else max(0, self.jobs_at_risk - self.unclaimable_at_risk)
