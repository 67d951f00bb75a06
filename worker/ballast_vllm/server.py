"""Ballast in the API server of `vllm serve`: tenants, limits, feeder, metrics, drain.

One object for each server process. It belongs to the event loop of the server, which computes no tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_engine.stats import EngineStats
from ballast_log import Log
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.settings import QueueSettings
from ballast_vllm import configuration
from ballast_vllm.adapters import TenantAdapters
from ballast_vllm.admission import DIED, Admission
from ballast_vllm.arguments import LAUNCHED
from ballast_vllm.bodies import MOST_BODY_BYTES
from ballast_vllm.compiler import OFF, missing_compiler
from ballast_vllm.drain import Drain
from ballast_vllm.engine_client import EngineDead, EngineTap
from ballast_vllm.engine_view import VllmEngine
from ballast_vllm.item_loop import HttpItemLoop
from ballast_vllm.items import HttpReader
from ballast_vllm.metrics import PRIVATE, ServerMetrics
from ballast_vllm.served_app import (
    address,
    admit_prompts,
    chat_rendering,
    check_start,
    item_scope,
    item_urls,
    limit_requests,
    slo_problem,
    slo_warning,
)
from ballast_vllm.settings import message_of
from ballast_vllm.stats import engine_stats, steps
from ballast_worker import settings
from ballast_worker.bodies import BodyMemory
from ballast_worker.feeder import Feeder
from ballast_worker.http_connection import SWEEP_SECONDS, Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.model_server import ModelServer, every
from ballast_worker.owner_port import owner_server
from ballast_worker.preflight import check_queue, listen_for_metrics
from ballast_worker.reload import ConfigWatcher, Loaded
from ballast_worker.status import Identity
from ballast_worker.tls import Certificate

log = Log(__name__)

POLL_SECONDS = 0.25
"""How often the figures of the scheduler are read. Between two polls, the API server counts itself."""
REPORT_SECONDS = 3.0
"""Time that the feeder has for its last reports."""
CONFIGURE_SECONDS = 30.0
"""Time that EngineCore has to answer a change of the configuration."""
STEP_LIMIT, STEP_SECONDS = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 300.0
"""vLLM's variable for the longest step, and its default. vLLM checks it only for ranks in processes of their own."""
SEARCHING = tuple(f"openai_serving_{name}" for name in ("chat", "completion", "transcription", "translation"))
"""Names in the state of the app of the parts that carry out beam searches."""
HUNG = "EngineCore of vLLM has not answered for {:g} s ({}): a step may hang on the GPU."


class VllmServer(ModelServer):
    """All parts of Ballast in one API server."""

    engine: VllmEngine
    loop: HttpItemLoop

    def __init__(self, app: Any, inner: ASGIApp, loaded: Loaded, path: Path | None) -> None:
        """Prepare the parts. `inner` is the app behind the middleware, and `app` the whole app."""
        super().__init__(loaded, BodyMemory(MOST_BODY_BYTES))
        config, arguments = loaded.config, app.state.args
        self.tap = EngineTap(app.state.engine_client, time.monotonic)
        self.address = address(arguments)
        hidden = PRIVATE if any(adapter.tenants is not None for adapter in config.model.adapters) else frozenset[str]()
        self.metrics = ServerMetrics(self._figures, shows_tenants=False, hidden=hidden)
        self.tenant_metrics = ServerMetrics(self._figures, shows_tenants=True)
        self._app, self._inner, self._path = app, inner, path
        self._num_steps = 0
        default = 0.0 if self.tap.device == "cpu" else STEP_SECONDS  # a step on a CPU may take longer
        self._silence, self._most_silence = 0.0, float(os.environ.get(STEP_LIMIT) or default)
        """Seconds since EngineCore last answered, and after how many the server has failed: at 0, after no number."""
        self.admission = Admission(self)
        self.calls = self.admission.calls
        self.tap.check_queue = self.admission.check_requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._urls: tuple[str, ...] = ()
        self._queue_models: tuple[str, ...] = ()
        self._owner_port: HttpServer | None = None
        self._certificate: Certificate | None = None
        self.drain = Drain(self, getattr(app.state, "server", None))

    @property
    def identity(self) -> Identity:
        """The model that is served, and the device."""
        return Identity(self.models[0], self.revision, self.tap.device)

    @property
    def models(self) -> tuple[str, ...]:
        """The names that clients use: those of the model, and those of its LoRA adapters."""
        models = self._app.state.openai_serving_models
        return (*(model.name for model in models.base_model_paths), *models.lora_requests)

    @property
    def dollars_per_hour(self) -> float:
        """The price of all GPUs of the worker. vLLM knows them also if the configuration does not name them."""
        return self.config.cost.dollars_per_gpu_hour * int(self._app.state.vllm_config.parallel_config.world_size)

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._keys is not None

    # Life

    async def start(self) -> None:
        """Check the configuration, and start the feeder and the other tasks.

        Raises:
            NotServed: the configuration or vLLM's arguments ask for something that Ballast cannot do.
        """
        state = self._app.state
        num_adapters = len(state.openai_serving_models.lora_requests)
        check_start(self.tap, self.config, state.vllm_config, state.args, num_adapters)
        limit_requests(self.tap)
        admit_prompts()
        if (scoring := getattr(self._app.state, "serving_generative_scoring", None)) is not None:
            self.tap.build_scores_on_threads(scoring)
        for name in SEARCHING:
            if (serving := getattr(self._app.state, name, None)) is not None:
                self.tap.limit_searches(serving)
        self.revision = await asyncio.to_thread(self._revision)
        found = await self.tap.stats(0)
        stats = engine_stats(found)
        num_blocks = stats.kv_used + stats.kv_cached + stats.kv_free
        block_tokens = self._app.state.vllm_config.cache_config.block_size
        sizes = PolicyConfig(
            slots=stats.slots, num_blocks=num_blocks, block_tokens=block_tokens, is_encoder=self.tap.is_encoder
        )
        policy = _policy(self.config, sizes)
        self.engine = VllmEngine(self.tap, stats, policy)
        await self.tap.configure(message_of(policy))
        models = self._app.state.openai_serving_models
        models.lora_requests = TenantAdapters(models.lora_requests, self.config.model.adapters)
        self.tap.isolates_tenants = self.config.engine.isolate_tenants
        self._urls = item_urls(self._app)
        self.loop = HttpItemLoop(self._inner, item_scope(self._app), self.engine)
        await self._poll()
        self._limit_connections()
        self._start_ports()
        self._start_feeder()
        self._start_watcher()
        for seconds, task in ((POLL_SECONDS, self._poll), (POLL_SECONDS, self._watch), (1.0, self._sample)):
            self._keep(asyncio.create_task(every(seconds, task)))
        self.drain.take_signals()
        ignored = () if LAUNCHED in os.environ else configuration.ignored(self.config)
        if warning := slo_warning(self.config, self.tap):
            log.warning(warning)
        for field in ignored:
            log.warning("the field has no effect inside vLLM", field=field)
        if self.tap.device == "cpu" and (compiler := missing_compiler()) is not None:
            log.warning(
                "C++ compiler not found, a request with logprobs ends vLLM", compiler=compiler, remedy=f"{OFF}=1"
            )
        log.info(
            "ballast started",
            worker=self.id,
            models=", ".join(self.models),
            slots=self.engine.policy.slots,
            kv_blocks=num_blocks,
            items=", ".join(self._urls) if self.feeder is not None else "none",
            queue=self.config.queue_name if self.feeder is not None else "none",
        )

    async def stop(self) -> None:
        """Return the items that are left, and stop the threads."""
        await self._watch()  # when EngineCore ends, vLLM may stop the server before the next poll
        if self.feeder is not None:
            self.feeder.drain()
            await asyncio.to_thread(self.feeder.drained.wait, REPORT_SECONDS)
            await asyncio.to_thread(self.feeder.stop)
        if self._watcher is not None:
            await asyncio.to_thread(self._watcher.stop)
        if self._owner_port is not None:
            self._owner_port.should_exit = True
        for task in self._tasks:
            task.cancel()
        self._app.state.args.ballast_failure = self.failure  # `ballast-vllm` ends with it
        log.info("ballast stopped", worker=self.id)

    def _limit_connections(self) -> None:
        """Give vLLM's HTTP server, if it serves the app, connections with the limits of a worker."""
        if (http_server := getattr(self._app.state, "server", None)) is not None:
            most = self.config.limits.most_requests(self.engine.policy.slots)
            self.connections = self._app.state.connections = Connections(HttpLimits.beside(most))
            http_server.config.http_protocol_class = self.connections.protocol()
            self._keep(asyncio.create_task(every(SWEEP_SECONDS, self._sweep)))

    def _start_ports(self) -> None:
        """Serve what names tenants on a port of its own, and both ports with one certificate, as a worker does.

        vLLM's port gets the certificate before it accepts connections. vLLM's `--enable-ssl-refresh` watches the file
        and misses changes of a Secret volume, which swaps a symlink two directories up.
        """
        is_launched = LAUNCHED in os.environ
        listener = listen_for_metrics(self.config)
        if is_launched or listener is not None:
            self._certificate = Certificate.of(self.config.runtime)
        tls = None if self._certificate is None else self._certificate.context
        if is_launched and tls is not None:
            self._app.state.server.config.ssl = tls
        if listener is None:
            return
        self._owner_port = owner_server(self, listener, tls)
        self._keep(asyncio.create_task(self._owner_port.serve(sockets=[listener])))

    def _start_feeder(self) -> None:
        config = self.config
        if settings.redis_address(config)[0] is None:
            return
        check_queue(config)
        if not self._urls:
            log.warning("the model serves no URL of items, so every item of the queue is refused")
        self.feeder = Feeder(
            connect=lambda: settings.open_queue(config),
            worker=self.id,
            loop=self.loop,
            reader=HttpReader(
                self.revision,
                self._urls,
                lambda: self.models,
                self.loop.start,
                is_encoder=self.tap.is_encoder,
                crowded=lambda: self.engine.crowded,
            ),
            status=self.status,
            settings=self._queue_settings(self.config),
        )
        self.feeder.start()

    def _start_watcher(self) -> None:
        also = settings.watched_files(
            self.config,
            reload_keys=self._reload_keys,
            reconnect=None if self.feeder is None else self.feeder.reconnect,
            reload_certificate=None if self._certificate is None else self._certificate.reload,
        )
        if self._path is None and not also:
            return
        self._watcher = ConfigWatcher(self._path, self.loaded, self._apply, also=also, parse=self._parse)
        self._watcher.start()

    def _parse(self, text: str, source: str) -> WorkerConfig:
        config = configuration.parse(text, source, model=str(self._app.state.args.model))
        if problem := slo_problem(config, self.tap):
            raise InvalidConfig(source, [problem])
        return config

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _revision(self) -> str:
        """Return the name of everything that decides the tokens of an answer."""
        directory = Path(self.tap.identity[0])
        weights = settings.model_revision(self.config, directory) if directory.is_dir() else self.config.model.revision
        rendering = chat_rendering(self._app.state.args)
        parts = ("vllm", weights, *self.tap.identity, *rendering, *self.config.engine.vllm.args)  # e.g. --hf-overrides
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    # Status and metrics

    @property
    def failure(self) -> str | None:
        """Why only a restart helps; None while the server works."""
        if self.tap.is_dead:
            return DIED
        if self.loop.failure is not None:  # also after EngineCore answers again: its items are given up
            return self.loop.failure
        if self.feeder is not None and self.feeder.is_dead:
            return "The feeder ended, so the server does no offline work."
        return None

    @property
    def num_answering(self) -> int:
        """Online requests whose answer is not sent yet."""
        return len(self.calls)

    def abort_answers(self) -> None:
        """Abort these requests."""
        for call in tuple(self.calls):
            call.hang_up()

    @property
    def is_healthy(self) -> bool:
        """Whether the server works."""
        return self.failure is None

    def has_route(self, scope: Scope) -> bool:
        """Return whether vLLM has a route for a request."""
        return any(route.matches(scope)[0] is Match.FULL for route in self._app.routes)

    def shown(self) -> EngineStats:
        return self.engine.shown()

    async def _poll(self) -> None:
        """Read the figures of the scheduler."""
        try:
            found = await self.tap.stats(self._num_steps)
        except EngineDead:
            return  # `_watch` reports it
        finally:
            self._silence = 0.0  # an error is an answer, too
        stats = engine_stats(found)
        self._num_steps = stats.steps
        self.engine.take(stats)
        self.engine.in_step = found["in_step"]
        if self.engine.note_held_up(found["held_up"]):
            self.loop.wake_feeder()
        for record in steps(found):
            self._steps.add(record)
            self.admission.add_step(record.seconds)

    async def _watch(self) -> None:
        """Fail the items in flight if EngineCore ended or hangs: it answers no call, not even with an error."""
        self._silence += POLL_SECONDS  # not by a clock, which goes on while this process is stopped, too
        why = DIED if self.tap.is_dead else None
        if why is None and 0 < self._most_silence < self._silence:
            why = HUNG.format(self._most_silence, STEP_LIMIT)
        if why is not None and self.loop.failure is None:
            log.error("engine failed", because=why)
            self.loop.fail(why)

    async def _sweep(self) -> None:
        """Close the connections whose time is over."""
        if self.connections is not None:
            self.connections.sweep(asyncio.get_running_loop().time())

    async def _sample(self) -> None:
        now = time.monotonic()
        self.recorder.judge((call.timing for call in self.calls if call.requests), now)
        self.tap.sweep()
        if self.feeder is not None and self.models != self._queue_models:  # an adapter was loaded
            self.feeder.configure(self._queue_settings(self.config))
        stats = self.engine.stats()
        started = {RequestClass.ONLINE: self.tap.num_online, RequestClass.OFFLINE: self.loop.num_started}
        self.rates.sample(stats, started, now)
        self.admission.sample(stats, now)
        self._spending.sample(stats, self.dollars_per_hour, now)

    # Configuration

    def _queue_settings(self, config: WorkerConfig) -> QueueSettings:
        self._queue_models = self.models
        found = settings.queue_settings(config, self._queue_models)
        return found.model_copy(update={"urls": self._urls, "serves_items": bool(self._urls)})

    def _apply(self, loaded: Loaded) -> None:
        """Put a changed configuration in force, on the watcher's thread.

        Raises:
            EngineDead, NotServed: EngineCore did not take it, so nothing changed here.
            TimeoutError: the same, but EngineCore may take it later.
        """
        policy = _policy(loaded.config, self.engine.policy)
        configured = self.tap.configure(message_of(policy))
        asyncio.run_coroutine_threadsafe(configured, self.loop.events).result(timeout=CONFIGURE_SECONDS)
        self.engine.policy = policy
        # Also the connections of another server, as of a replica.
        self._put_in_force(loaded, getattr(self._app.state, "connections", None))


def load(arguments: Any) -> tuple[Loaded, Path | None]:
    """Return the configuration and its file, if there is one.

    Raises:
        InvalidConfig: the message names each wrong field.
    """
    named = os.environ.get(configuration.FILE_VARIABLE)
    path = Path(named) if named else None
    config = configuration.load(path, model=str(arguments.model))
    text = path.read_text(encoding="utf-8") if path is not None else config.dump()
    return Loaded(config, content_hash(text)), path


def _policy(config: WorkerConfig, current: PolicyConfig) -> PolicyConfig:
    policy = settings.policy_config(config, current)
    return policy if config.slots is None else replace(policy, slots=min(config.slots, current.slots))
