"""One worker: engine, loop, tenancy, metrics, and the feeder where there is a queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ballast_api.worker_config import WorkerConfig
from ballast_engine.build import build_engine
from ballast_engine.options import EngineOptions
from ballast_engine.request import FinishReason, GenerationRequest
from ballast_engine.stats import EngineStats
from ballast_engine.tokenizer import Tokenizer
from ballast_log import Log
from ballast_policy.request import RequestClass
from ballast_policy.reservation import most_slots
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.errors import QueueForbidden
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus
from ballast_worker import settings
from ballast_worker.engine import Engine
from ballast_worker.errors import NotServed, Refused
from ballast_worker.feeder import Feeder
from ballast_worker.loop import BROKEN, EngineLoop, Stream
from ballast_worker.metrics import Figures, Metrics, QueueView, Spending, StepMeter
from ballast_worker.openai import Served
from ballast_worker.reload import Loaded, Watcher
from ballast_worker.requests import Passage, Recorder
from ballast_worker.shapes import Answer, stopping
from ballast_worker.status import Rates, coefficients, reservation
from ballast_worker.tenancy import ApiKeys, Tenancy
from ballast_worker.utilization import Utilization

log = Log(__name__)

KEEPALIVE_SECONDS = 15
"""How often a stream that says nothing sends a comment, so that nothing between here and the client cuts it."""
SAMPLE_SECONDS = 1.0
HARDEST_RETRY_SECONDS = 30


class Build(Protocol):
    """Builds an engine that is ready to serve."""

    def __call__(self, options: EngineOptions, /, *, tokenizer: Tokenizer) -> Engine: ...


class Worker:
    """Everything of one process but the HTTP server; belongs to one event loop."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        path: Path | None = None,
        build: Build = build_engine,
    ) -> None:
        """Load the model.

        Args:
            loaded: the configuration
            path: the file that the configuration came from, watched for changes; None: it never changes
            build: builds the engine; by default Ballast's own

        Raises:
            NotServed: the configuration asks for what this worker cannot do.
            EngineError: the checkpoint, or the options of the engine, are wrong.
        """
        config = loaded.config
        directory = settings.model_directory(config)
        keys = _load_keys(config)
        self.id = settings.worker_id(config)
        self.address = f"http://{config.runtime.host}:{config.runtime.port}"
        """Of the HTTP API; the server corrects it once it knows its port."""
        self.is_draining = False
        """It is on its way out: not ready, and it claims nothing."""
        self.is_closed = False
        """It takes no more requests."""
        self.recorder = Recorder()
        self.tenancy = Tenancy(config.offline.tenants, keys)
        tokenizer = Tokenizer(directory)
        self.engine = build(settings.engine_options(config, directory), tokenizer=tokenizer)
        self.engine.configure(settings.policy_config(config, self.engine.policy))
        self.served = _served(config, directory, self.engine, tokenizer)
        self._steps = StepMeter()
        self.loop = EngineLoop(self.engine, self._steps.add)
        self.feeder = self._feed(config)
        self.metrics = Metrics(self._figures)
        self._keys = keys
        self._loaded = loaded
        self._spending = Spending()
        self._utilization = Utilization(self.engine.footprint)
        self._rates = Rates()
        self._watcher: Watcher | None = None
        if path is not None:
            self._watcher = Watcher(path, loaded, self._take_up, also=self._files_beside(config))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def config(self) -> WorkerConfig:
        """The configuration in force."""
        return self._loaded.config

    # Life

    def start(self) -> None:
        """Start the threads; call it on the event loop that serves HTTP."""
        self.loop.start(asyncio.get_running_loop())
        if self.feeder is not None:
            self.feeder.start()
        if self._watcher is not None:
            self._watcher.start()
        self._tasks = [
            asyncio.create_task(_every(SAMPLE_SECONDS, self._sample)),
            asyncio.create_task(_every(KEEPALIVE_SECONDS, self.loop.wake_streams)),
        ]
        log.info(
            "worker started",
            worker=self.id,
            model=self.served.name,
            revision=self.served.revision,
            device=self.engine.device,
            slots=self.engine.policy.slots,
            kv_blocks=self.engine.policy.num_blocks,
            context=self.served.max_model_len,
            queue=self.config.queue_name if self.feeder is not None else "none",
        )

    async def stop(self) -> None:
        """Stop the threads. What has not been drained before is aborted, its leases run out."""
        for task in self._tasks:
            task.cancel()
        if self._watcher is not None:
            await asyncio.to_thread(self._watcher.stop)
        if self.feeder is not None:
            await asyncio.to_thread(self.feeder.stop)
        await asyncio.to_thread(self.loop.stop)
        log.info("worker stopped", worker=self.id)

    # Requests

    def check_open(self) -> None:
        """Refuse a request of a worker that shuts down, or whose engine failed."""
        if self.is_closed:
            raise stopping()
        if not self.loop.is_healthy:
            raise Refused(500, self.loop.failure or BROKEN, code="engine_failed", kind="server_error")

    def check_room(self, request_class: RequestClass) -> None:
        """Refuse a request where as many of its class wait as may: 429 with the time after which it is worth trying."""
        most = self.config.limits.max_queued_requests
        waiting = self.loop.num_waiting(request_class)
        if waiting < most:
            return
        stats = self.engine.stats()
        if request_class is RequestClass.ONLINE:
            free = stats.slots - stats.online.running - stats.reservation.in_use
        else:
            free = stats.slots - stats.online.running - stats.offline.running
        if waiting - free < most:
            return
        rate = self._rates.classes[request_class].ended
        seconds = min(HARDEST_RETRY_SECONDS, max(1, round(waiting / rate))) if rate else 1
        raise Refused(
            429,
            f"{waiting} {request_class} requests wait already, this worker lets {most} wait "
            f"(limits.maxQueuedRequests): try again in {seconds} s.",
            code="queue_full",
            kind="rate_limit_error",
            headers={"retry-after": str(seconds)},
        )

    def passage(self, request: GenerationRequest, arrival: float) -> Passage:
        """What is measured of a request, with what it is promised."""
        slo = self.config.slo
        is_online = request.request_class is RequestClass.ONLINE
        ttft = request.ttft_seconds or (slo.ttft_milliseconds / 1000 if is_online else None)
        tpot = request.tpot_seconds or (slo.tpot_milliseconds / 1000 if is_online else None)
        return Passage(request.request_class, arrival, ttft, tpot)

    def ended(self, passage: Passage, stream: Stream, answer: Answer) -> None:
        """Count an HTTP request that is over; one without a finish was hung up on."""
        passage.first_at = stream.first_at
        self.recorder.ended(
            passage,
            answer.finish_reason or FinishReason.ABORTED,
            answer.num_prompt,
            answer.num_output,
            time.monotonic(),
        )

    # What it says about itself

    def status(self) -> WorkerStatus:
        """The worker at this moment."""
        stats = self.engine.stats()
        policy = self.engine.policy
        ttft, tpot = self.recorder.p99(time.monotonic())
        return WorkerStatus(
            worker_id=self.id,
            address=self.address,
            at=time.time(),
            model=self.served.name,
            model_revision=self.served.revision,
            device=self.engine.device,
            slots=stats.slots,
            batch_ceiling=stats.batch_ceiling,
            kv_blocks_total=stats.kv_used + stats.kv_cached + stats.kv_free,
            kv_blocks_free=stats.kv_cached + stats.kv_free,
            online=self._rates.load(stats, RequestClass.ONLINE),
            offline=self._rates.load(stats, RequestClass.OFFLINE),
            reservation=reservation(stats),
            can_claim=self.feeder is not None and self.feeder.can_claim,
            offline_most=most_slots(policy.offline_max_share, stats.slots),
            tenant_slots=_caps(policy, stats),
            offline_items_per_second=round(self._rates.offline_items, 4),
            offline_tokens_per_second=round(self._rates.offline_tokens, 3),
            cost_model=coefficients(stats),
            ttft_p99_seconds=ttft,
            tpot_p99_seconds=tpot,
            slo=self.recorder.slo_status(time.monotonic()),
            generation=self.config.runtime.generation,
            config_hash=self._loaded.content_hash,
            is_ready=self.is_ready,
            is_draining=self.is_draining,
        )

    @property
    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.loop.is_healthy and not self.is_draining

    def _figures(self) -> Figures:
        feeder, watcher = self.feeder, self._watcher
        view = None
        if feeder is not None:
            view = QueueView(self.config.queue_name, feeder.is_up, feeder.stats, feeder.num_at_risk, feeder.num_held)
        return Figures(
            model=self.served.name,
            stats=self.engine.stats(),
            steps=self._steps,
            recorders=(self.recorder, feeder.recorder) if feeder is not None else (self.recorder,),
            spending=self._spending,
            utilization=self._utilization,
            queue=view,
            block_tokens=self.engine.policy.block_tokens,
            generation=self.config.runtime.generation,
            restart_required=len(self._loaded.restart_required),
            config_invalid=watcher is not None and watcher.is_invalid,
            is_draining=self.is_draining,
            is_healthy=self.loop.is_healthy,
        )

    def _sample(self) -> None:
        now = time.monotonic()
        stats = self.engine.stats()
        taken_up = {RequestClass.ONLINE: self.loop.num_entered(RequestClass.ONLINE)}
        taken_up[RequestClass.OFFLINE] = self.loop.num_started
        self._rates.sample(stats, taken_up, self.recorder.num_ended(), now)
        self._utilization.sample(stats, now)
        self._spending.sample(stats, self.config.cost.dollars_per_gpu_hour, now)

    # Configuration, on the watcher's thread

    def _take_up(self, loaded: Loaded) -> None:
        config = loaded.config
        self.engine.configure(settings.policy_config(config, self.engine.policy))
        self.tenancy = Tenancy(config.offline.tenants, self._keys)
        self._loaded = loaded
        if self.feeder is not None:
            self.feeder.configure(settings.queue_settings(config, self.served.name))

    def _files_beside(self, config: WorkerConfig) -> dict[Path, Callable[[], None]]:
        """Files that may change under a running worker, and what then is done."""
        runtime = config.runtime
        files = {path: self._reload_keys for path in (runtime.api_keys_file,) if path is not None}
        if self.feeder is not None:
            addresses = (runtime.redis_url_file, runtime.redis_password_file)
            files |= {path: self.feeder.reconnect for path in addresses if path is not None}
        return files

    def _reload_keys(self) -> None:
        try:
            self._keys = _load_keys(self.config)
        except NotServed as error:
            log.warning("API keys not taken up, the old ones stay in force", because=str(error))
            return
        self.tenancy = Tenancy(self.config.offline.tenants, self._keys)
        log.info("API keys taken up")

    def _feed(self, config: WorkerConfig) -> Feeder | None:
        if settings.redis_url(config) is None:
            return None
        return Feeder(
            connect=lambda: _connect(config),
            worker=self.id,
            loop=self.loop,
            served=self.served,
            status=self.status,
            settings=settings.queue_settings(config, self.served.name),
        )


def _served(config: WorkerConfig, directory: Path, engine: Engine, tokenizer: Tokenizer) -> Served:
    return Served(
        name=settings.served_name(config, directory),
        revision=settings.model_revision(config, directory),
        created=int((directory / "config.json").stat().st_mtime),
        max_model_len=engine.max_tokens,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
    )


def _caps(policy: PolicyConfig, stats: EngineStats) -> dict[str, int]:
    """Slots that capped tenants' offline work may hold; of those that it ever served, as there may be a thousand."""
    served = [tenant for request_class, tenant in stats.service if request_class is RequestClass.OFFLINE]
    shares = {tenant: policy.tenants[tenant].max_slots for tenant in served if tenant in policy.tenants}
    return {tenant: most for tenant, most in shares.items() if most}


def _connect(config: WorkerConfig) -> Queue:
    """Open the queue with the address and the password that are there now: both may be changed while a worker runs."""
    try:
        url, password = settings.redis_url(config), settings.redis_password(config)
    except NotServed as error:
        raise QueueForbidden(str(error)) from error
    return Queue.connect(url or "", config.queue_name, password=password)


def _load_keys(config: WorkerConfig) -> ApiKeys | None:
    path = config.runtime.api_keys_file
    return None if path is None else ApiKeys.load(path)


async def _every(seconds: float, turn: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            turn()
        except Exception:  # a defect in a figure must not end the figures
            log.exception("a periodic turn failed")
