"""One worker: engine, loop, tenancy, metrics, and the feeder if there is a queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from ballast_api.worker_config import WorkerConfig
from ballast_engine.build import build_engine
from ballast_engine.errors import EngineError
from ballast_engine.request import FinishReason, GenerationRequest
from ballast_engine.tokenizer import Tokenizer
from ballast_log import Log
from ballast_openai.chat_limits import joined
from ballast_policy.request import RequestClass
from ballast_queue.settings import QueueSettings
from ballast_worker import settings
from ballast_worker.bodies import BodyMemory, BodyReaders
from ballast_worker.engine import Engine
from ballast_worker.errors import NotServed, Refused
from ballast_worker.feeder import Feeder
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.items import GenerationReader
from ballast_worker.loop import BROKEN, EngineLoop, Stream
from ballast_worker.metrics import WorkerMetrics
from ballast_worker.model_server import ModelServer, every
from ballast_worker.openai import Caller, PublishedModel
from ballast_worker.prompt_length import longest_token_bytes
from ballast_worker.queue_limit import QueueLimit
from ballast_worker.reload import ConfigWatcher, Loaded
from ballast_worker.requests import RequestTiming, promised
from ballast_worker.responses import AnswerBuffer, stopping
from ballast_worker.status import Identity
from ballast_worker.suggested_sampling import suggested_sampling
from ballast_worker.tls import Certificate
from ballast_worker.utilization import Utilization

log = Log(__name__)

KEEPALIVE_SECONDS = 15
"""How often a silent stream sends a comment, so that no proxy closes it."""
SAMPLE_SECONDS = 1.0


class Worker(ModelServer):
    """All parts of one process except the HTTP server. It belongs to one event loop."""

    engine: Engine
    loop: EngineLoop
    connections: Connections
    _utilization: Utilization

    def __init__(
        self,
        loaded: Loaded,
        *,
        path: Path | None = None,
        build: Callable[..., Engine] = build_engine,
    ) -> None:
        """Load the model.

        Args:
            loaded: the configuration
            path: the file of the configuration, which is watched for changes; None: it never changes
            build: builds the engine; by default that of Ballast

        Raises:
            NotServed: the configuration asks for something that this worker cannot do, or the checkpoint is wrong.
        """
        config = loaded.config
        # Before any other file is read: one that changes while the model loads is read again.
        self._watcher = None if path is None else self._watch(path, loaded)
        super().__init__(loaded, BodyMemory())
        self.certificate = Certificate.of(config.runtime)
        # The server corrects it when it knows its port.
        self.address = (
            f"{'http' if self.certificate is None else 'https'}://{config.runtime.host}:{config.runtime.port}"
        )
        try:
            self.engine, self.served = _load(config, build)
        except EngineError as error:
            raise NotServed(str(error)) from error
        self.loop = EngineLoop(self.engine, self._steps.add)
        most = config.limits.most_requests(self.engine.policy.slots)
        self.connections = Connections(HttpLimits.beside(most))
        self.readers = BodyReaders()
        self.feeder = self._feed(config)
        self.metrics = WorkerMetrics(self._figures, shows_tenants=False)
        self.tenant_metrics = WorkerMetrics(self._figures, shows_tenants=True)
        self._utilization = Utilization(self.engine.footprint)
        self._queue_limit = QueueLimit(self.rates)
        self._answering: dict[Stream, RequestTiming] = {}
        """The HTTP requests in the engine."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def identity(self) -> Identity:
        return Identity(self.served.name, self.served.revision, "cpu")

    # Life

    def start(self) -> None:
        """Start the threads. Call it on the event loop that serves HTTP."""
        self.loop.start(asyncio.get_running_loop())
        if self.feeder is not None:
            self.feeder.start()
        if self._watcher is not None:
            self._watcher.start()
        self._tasks = [
            asyncio.create_task(every(SAMPLE_SECONDS, self._sample)),
            asyncio.create_task(every(KEEPALIVE_SECONDS, self.loop.wake_streams)),
        ]
        log.info(
            "worker started",
            worker=self.id,
            model=self.served.name,
            revision=self.served.revision,
            slots=self.engine.policy.slots,
            kv_blocks=self.engine.policy.num_blocks,
            context=self.served.max_model_len,
            queue=self.config.queue_name if self.feeder is not None else "none",
        )

    async def stop(self) -> None:
        """Stop the threads. Requests that were not drained are aborted, and their leases expire."""
        for task in self._tasks:
            task.cancel()
        if self._watcher is not None:
            await asyncio.to_thread(self._watcher.stop)
        if self.feeder is not None:
            await asyncio.to_thread(self.feeder.stop)
        await asyncio.to_thread(self.loop.stop)
        self.readers.close()
        log.info("worker stopped", worker=self.id)

    # Requests

    def check_open(self) -> None:
        """Refuse a request if the worker shuts down or its engine failed."""
        if self.is_closed:
            raise stopping()
        if not self.loop.is_healthy:
            raise Refused(500, self.loop.failure or BROKEN, code="engine_failed", kind="server_error")

    def check_queue(self, caller: Caller) -> None:
        """Refuse a request if its class may not run, or its waiting queue is full, with a time for the next try."""
        self.tenancy.check_offline(caller)
        request_class, loop = caller.request_class, self.loop
        self._queue_limit.check(
            self.config.limits,
            self.engine.stats,
            request_class,
            loop.num_waiting(request_class),
            lambda: self.tenancy.num_before(caller.tenant, loop.waiting_by_tenant(request_class)),
        )

    def began(self, request: GenerationRequest, arrival: float, stream: Stream) -> RequestTiming:
        """Return the timing of an HTTP request that the engine has, with its SLO."""
        slo = self.config.slo if request.request_class is RequestClass.ONLINE else None
        ttft = promised(slo, "ttft", request.ttft_seconds)
        tpot = promised(slo, "tpot", request.tpot_seconds)
        timing = self._answering[stream] = RequestTiming(request.request_class, arrival, ttft, tpot)
        return timing

    @property
    def num_answering(self) -> int:
        return len(self._answering)

    def abort_answers(self) -> None:
        self.loop.abort_streams()

    def ended(self, timing: RequestTiming, stream: Stream, answer: AnswerBuffer) -> None:
        """Count an HTTP request that ended. Without a finish reason, its client is gone."""
        del self._answering[stream]
        timing.first_at = stream.first_at
        reason = answer.finish_reason or FinishReason.ABORTED
        # The client may read the answer for long after its last token.
        at = time.monotonic() if stream.last_at is None else stream.last_at
        self.recorder.ended(timing, reason, answer.num_prompt, answer.num_output, at)
        if reason in {FinishReason.STOP, FinishReason.LENGTH} and stream.first_at is not None:
            self._queue_limit.add_answer(at - stream.first_at)

    # Status and metrics

    @property
    def failure(self) -> str | None:
        """Why only a restart helps; None while the worker is healthy."""
        if not self.loop.is_healthy:
            return self.loop.failure or "Several engine steps in a row failed."
        if self.feeder is not None and self.feeder.is_dead:
            return "The feeder ended, so the worker does no offline work."
        return None

    @property
    def is_healthy(self) -> bool:
        return self.loop.is_healthy

    def _sample(self) -> None:
        now = time.monotonic()
        for stream, timing in self._answering.items():
            timing.first_at = stream.first_at
        self.recorder.judge(self._answering.values(), now)
        stats = self.engine.stats()
        num_online = self.loop.num_entered(RequestClass.ONLINE)
        started = {RequestClass.ONLINE: num_online, RequestClass.OFFLINE: self.loop.num_started}
        self.rates.sample(stats, started, now)
        waiting = self.loop.num_waiting(RequestClass.ONLINE)
        self._queue_limit.sample(stats, num_online - waiting, waiting, now)
        for request_class in RequestClass:
            self.loop.waiting_by_tenant(request_class)  # clients without keys may invent tenants without end
        self._utilization.sample(stats, now)
        self._spending.sample(stats, self.config.cost.dollars_per_gpu_hour, now)

    # Configuration, on the watcher's thread

    def _apply(self, loaded: Loaded) -> None:
        self.engine.configure(settings.policy_config(loaded.config, self.engine.policy))
        self._put_in_force(loaded, self.connections)

    def _queue_settings(self, config: WorkerConfig) -> QueueSettings:
        return settings.queue_settings(config, self.served.names)

    def _watch(self, path: Path, loaded: Loaded) -> ConfigWatcher:
        also = settings.watched_files(
            loaded.config,
            reload_keys=self._reload_keys,
            reconnect=self._reconnect,
            reload_certificate=self._reload_certificate,
        )
        return ConfigWatcher(path, loaded, self._apply, also=also)

    def _reconnect(self) -> None:
        if self.feeder is not None:
            self.feeder.reconnect()

    def _reload_certificate(self) -> None:
        if self.certificate is not None:
            self.certificate.reload()

    def _feed(self, config: WorkerConfig) -> Feeder | None:
        if settings.redis_address(config)[0] is None:
            return None
        return Feeder(
            connect=lambda: settings.open_queue(config),
            worker=self.id,
            loop=self.loop,
            reader=GenerationReader(self.served, self.loop.submit),
            status=self.status,
            settings=self._queue_settings(config),
        )


def _load(config: WorkerConfig, build: Callable[..., Engine]) -> tuple[Engine, PublishedModel]:
    directory = settings.model_directory(config)
    tokenizer = Tokenizer(directory, joined)
    sampling = suggested_sampling(directory / "generation_config.json")
    engine = build(settings.engine_options(config, directory), tokenizer=tokenizer)
    engine.configure(settings.policy_config(config, engine.policy))
    served = PublishedModel(
        names=settings.served_names(config, directory),
        revision=settings.model_revision(config, directory),
        created=int((directory / "config.json").stat().st_mtime),
        max_model_len=engine.max_tokens,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        sampling=sampling,
        longest_token_bytes=longest_token_bytes(directory / "tokenizer.json"),
    )
    return engine, served
