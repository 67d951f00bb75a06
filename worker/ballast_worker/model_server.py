"""A server of one model, as its status, its metrics, its drain, and a change of its configuration see it.

A worker and the API server of vLLM are such servers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from ballast_api.worker_config import WorkerConfig
from ballast_engine.stats import EngineStats
from ballast_log import Log
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.settings import QueueSettings
from ballast_queue.status import WorkerStatus
from ballast_worker import STARTED_AT, settings
from ballast_worker.bodies import BodyMemory
from ballast_worker.feeder import Feeder
from ballast_worker.http_connection import Connections
from ballast_worker.items import ItemEngine, ItemLoop
from ballast_worker.metrics import ScrapeData, Spending, StepMetrics, WorkerMetrics, queue_view
from ballast_worker.reload import ConfigWatcher, Loaded
from ballast_worker.requests import Recorder
from ballast_worker.status import Identity, SmoothedRates, worker_status
from ballast_worker.tenancy import Tenancy
from ballast_worker.utilization import Utilization

log = Log(__name__)


class ModelServer(ABC):
    """The parts that every server of a model has."""

    address: str
    """The address of the HTTP API."""
    is_draining = False
    """Whether the server shuts down: it is not ready, and claims no items."""
    is_closed = False
    """Whether the server refuses new requests."""
    engine: ItemEngine
    loop: ItemLoop
    feeder: Feeder | None = None
    connections: Connections | None = None
    """None if another server holds the connections."""
    tenant_metrics: WorkerMetrics
    """The metrics with the series that name tenants."""
    _utilization: Utilization | None = None
    """None if the peak of the device is not known."""
    _watcher: ConfigWatcher | None = None

    def __init__(self, loaded: Loaded, bodies: BodyMemory) -> None:
        """Prepare the parts that need no engine."""
        config = loaded.config
        self.loaded = loaded
        self.id = settings.worker_id(config)
        self._keys = settings.api_keys(config)
        self.tenancy = self._tenancy_of(config)
        self.recorder = Recorder()
        self.bodies = bodies
        self.bodies.fit(config.limits.max_body_kibibytes)
        self._steps = StepMetrics()
        self._spending, self.rates = Spending(STARTED_AT), SmoothedRates()

    @property
    def config(self) -> WorkerConfig:
        """The configuration in force."""
        return self.loaded.config

    @property
    def policy(self) -> PolicyConfig:
        """The policy in force."""
        return self.engine.policy

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """The model that is served, and the device."""

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether the engine works."""

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.is_healthy and not self.is_draining

    @property
    @abstractmethod
    def num_answering(self) -> int:
        """HTTP requests that the engine got, whose answer is not sent yet."""

    @abstractmethod
    def abort_answers(self) -> None:
        """Abort these requests."""

    def shown(self) -> EngineStats:
        """Return the figures of the engine for status and metrics."""
        return self.engine.stats()

    def status(self) -> WorkerStatus:
        """Return the status now."""
        return worker_status(self, self.shown())

    @property
    def has_invalid_file(self) -> bool:
        """Whether a watched file is invalid or missing, so that the earlier one is in force."""
        return self._watcher is not None and self._watcher.is_invalid

    def _figures(self) -> ScrapeData:
        feeder = self.feeder
        return ScrapeData(
            model=self.identity.model,
            stats=self.shown(),
            steps=self._steps,
            recorders=(self.recorder, feeder.recorder) if feeder is not None else (self.recorder,),
            spending=self._spending,
            utilization=self._utilization,
            connections=self.connections,
            queue=None if feeder is None else queue_view(feeder, self.config.queue_name),
            block_tokens=self.policy.block_tokens,
            generation=self.config.runtime.generation,
            restart_required=len(self.loaded.restart_required),
            config_invalid=self.has_invalid_file,
            is_draining=self.is_draining,
            is_healthy=self.is_healthy,
        )

    def _tenancy_of(self, config: WorkerConfig) -> Tenancy:
        return Tenancy(config.offline.tenants, self._keys, serves_offline=config.offline.max_percent > 0)

    # Configuration, on the watcher's thread

    @abstractmethod
    def _queue_settings(self, config: WorkerConfig) -> QueueSettings:
        """Return what the queue shall know of this configuration."""

    def _put_in_force(self, loaded: Loaded, connections: Connections | None) -> None:
        """Use a changed configuration, after the engine took it."""
        config = loaded.config
        self.tenancy = self._tenancy_of(config)
        if self.feeder is not None:
            self.feeder.configure(self._queue_settings(config))
        self.bodies.fit(config.limits.max_body_kibibytes)
        if connections and config.limits.max_queued_requests != self.config.limits.max_queued_requests:
            connections.fit(config.limits.most_requests(self.policy.slots))
        self.loaded = loaded  # last: the status states that its generation is in force

    def _reload_keys(self) -> None:
        self._keys = settings.api_keys(self.config)
        self.tenancy = self._tenancy_of(self.config)
        log.info("API keys loaded")


async def every(seconds: float, task: Callable[[], Awaitable[None] | None]) -> None:
    """Call a function again and again."""
    while True:
        await asyncio.sleep(seconds)
        try:
            found = task()
            if found is not None:
                await found
        except Exception:  # a defect in one call must not end all calls
            log.exception("periodic task failed")
