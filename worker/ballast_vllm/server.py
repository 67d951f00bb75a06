"""Ballast in the API server of `vllm serve`: tenants, limits, feeder, metrics, drain.

One object for each server process. It belongs to the event loop of the server, which computes no tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_engine.request import FinishReason
from ballast_log import Log
from ballast_openai.item_body import ITEM_URLS
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.errors import InvalidSubmission, QueueError
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.status import WorkerStatus
from ballast_vllm import configuration
from ballast_vllm.adapters import TenantAdapters
from ballast_vllm.arguments import LAUNCHED
from ballast_vllm.calls import Call
from ballast_vllm.compiler import OFF, missing_compiler
from ballast_vllm.drain import Drain
from ballast_vllm.engine_client import EngineDead, EngineTap
from ballast_vllm.items import HttpItemLoop, HttpReader, VllmEngine
from ballast_vllm.metrics import ServerMetrics
from ballast_vllm.settings import message_of, stated_in
from ballast_vllm.stats import engine_stats, steps
from ballast_worker import settings
from ballast_worker.bodies import BodyMemory
from ballast_worker.errors import NotServed, Refused
from ballast_worker.feeder import Feeder
from ballast_worker.http_connection import SWEEP_SECONDS, Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.metrics import ScrapeData, Spending, StepMetrics, queue_view
from ballast_worker.owner_port import owner_server
from ballast_worker.preflight import listen_for_metrics
from ballast_worker.queue_limit import QueueLimit
from ballast_worker.reload import ConfigWatcher, Loaded, content_hash
from ballast_worker.requests import Recorder, RequestOutcome
from ballast_worker.responses import stopping
from ballast_worker.status import Identity, SmoothedRates, worker_status
from ballast_worker.tenancy import Tenancy
from ballast_worker.tls import Certificate

log = Log(__name__)

POLL_SECONDS = 0.25
"""How often the figures of the scheduler are read. Between two polls, the API server counts itself."""
REPORT_SECONDS = 3.0
"""Time that the feeder has for its last reports."""
CONFIGURE_SECONDS = 30.0
"""Time that EngineCore has to answer a change of the configuration."""
DIED = "EngineCore of vLLM ended."


class VllmServer:
    """All parts of Ballast in one API server."""

    def __init__(self, app: Any, inner: ASGIApp, loaded: Loaded, path: Path | None) -> None:
        """Prepare the parts. `inner` is the app behind the middleware, and `app` the whole app."""
        config, arguments = loaded.config, app.state.args
        self.tap = EngineTap(app.state.engine_client, time.monotonic)
        self.tap.check_queue = self.check_requests
        self.id = settings.worker_id(config)
        self.address = _address(arguments)
        self.is_draining = False
        """Whether the server shuts down: it is not ready, and claims no items."""
        self.is_closed = False
        """Whether the server refuses new requests."""
        self.recorder = Recorder()
        self.calls: set[Call] = set()
        """HTTP requests that wait for an answer."""
        self.feeder: Feeder | None = None
        self.metrics = ServerMetrics(self._figures, shows_tenants=False)
        self.tenant_metrics = ServerMetrics(self._figures, shows_tenants=True)
        self.bodies = BodyMemory()
        self.bodies.fit(config.limits.max_body_kibibytes)
        self._app, self._inner = app, inner
        self.loaded, self._path = loaded, path
        self._keys = settings.api_keys(config)
        self.tenancy = Tenancy(config.offline.tenants, self._keys)
        self._step_metrics = StepMetrics()
        self._num_steps = 0
        self._spending = Spending()
        self.rates = SmoothedRates()
        self._queue_limit = QueueLimit(self.rates)
        self._watcher: ConfigWatcher | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_entered = dict.fromkeys(RequestClass, 0)
        self._urls: tuple[str, ...] = ()
        self._queue_models: tuple[str, ...] = ()
        self._owner_port: HttpServer | None = None
        self._certificate: Certificate | None = None
        self._connections: Connections | None = None
        self.drain = Drain(self, getattr(app.state, "server", None))

    @property
    def config(self) -> WorkerConfig:
        """The configuration in force."""
        return self.loaded.config

    @property
    def policy(self) -> PolicyConfig:
        """The policy in force."""
        return self.engine.policy

    @property
    def identity(self) -> Identity:
        """The model that is served, and the device."""
        return Identity(self.models[0], self.revision, self.tap.device)

    @property
    def models(self) -> tuple[str, ...]:
        """The names that clients use: of the model, and of its LoRA adapters."""
        models = self._app.state.openai_serving_models
        return (*(model.name for model in models.base_model_paths), *models.lora_requests)

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
        self._check_arguments()
        self.revision = await asyncio.to_thread(self._revision)
        found = await self.tap.stats(0)
        stats = engine_stats(found)
        num_blocks = stats.kv_used + stats.kv_cached + stats.kv_free
        block_tokens = self._app.state.vllm_config.cache_config.block_size
        policy = _policy(self.config, PolicyConfig(slots=stats.slots, num_blocks=num_blocks, block_tokens=block_tokens))
        self.engine = VllmEngine(self.tap, stats, policy)
        await self.tap.configure(message_of(policy))
        models = self._app.state.openai_serving_models
        models.lora_requests = TenantAdapters(models.lora_requests, self.config.model.adapters)
        self.tap.isolates_tenants = self.config.engine.isolate_tenants
        self._urls = _item_urls(self._app)
        self.loop = HttpItemLoop(self._inner, self._scope(), self.engine)
        await self._poll()
        self._limit_connections()
        self._start_ports()
        self._start_feeder()
        self._start_watcher()
        for seconds, task in ((POLL_SECONDS, self._poll), (POLL_SECONDS, self._watch), (1.0, self._sample)):
            self._keep(asyncio.create_task(_every(seconds, task)))
        self.drain.take_signals()
        ignored = () if LAUNCHED in os.environ else configuration.ignored(self.config)
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

    def _check_arguments(self) -> None:
        if self.tap.num_servers > 1:
            raise NotServed(
                f"vLLM runs {self.tap.num_servers} API server processes, and Ballast supports one: each would have its "
                "own limits and count only its own requests. Remove --api-server-count"
            )
        if stated := stated_in(self._app.state.vllm_config.additional_config):
            raise NotServed(
                f'--additional-config sets {", ".join(sorted(stated))} in "ballast", which Ballast\'s middleware '
                f"overwrites. Remove it, and set the fields in the file that {configuration.FILE_VARIABLE} names"
            )
        if problem := self._slo_problem(self.config):
            raise NotServed(problem)
        has_keys = self.config.runtime.api_keys_file is not None
        if has_keys and _api_key(self._app.state.args):
            raise NotServed(
                "Both vLLM's --api-key (or VLLM_API_KEY) and Ballast's runtime.apiKeysFile are set, and a request has "
                "one key. Remove --api-key"
            )

    def _slo_problem(self, config: WorkerConfig) -> str | None:
        """Return a sentence if the configuration has the SLO of another kind of model."""
        if config.slo.latency_milliseconds is None or self.tap.is_encoder:
            return None
        return (
            "slo.latencyMilliseconds is the SLO of a model that returns vectors or scores, and this model generates "
            "text. Set slo.ttftMilliseconds and slo.tpotMilliseconds"
        )

    def _limit_connections(self) -> None:
        """Give vLLM's HTTP server, if it serves the app, connections with the limits of a worker."""
        if (http_server := getattr(self._app.state, "server", None)) is not None:
            num_requests = self.engine.policy.slots + 2 * self.config.limits.max_queued_requests
            self._connections = Connections(HttpLimits.beside(num_requests))
            http_server.config.http_protocol_class = self._connections.protocol()
            self._keep(asyncio.create_task(_every(SWEEP_SECONDS, self._sweep)))

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
        url = settings.redis_url(config)
        if url is None:
            return
        try:
            password, ca = settings.redis_password(config), settings.redis_ca(config)
            Queue.connect(url, config.queue_name, password=password, ca=ca).close()
        except InvalidSubmission as error:
            raise NotServed(f"runtime.redisUrl: {error}") from error
        except QueueError as error:
            log.warning("queue is unavailable, only online requests are served", because=str(error))
        if not self._urls:
            raise NotServed("The model serves none of the URLs of items. Remove runtime.redisUrl")
        self.feeder = Feeder(
            connect=lambda: settings.open_queue(config),
            worker=self.id,
            loop=self.loop,
            reader=HttpReader(self.revision, self._urls, lambda: self.models, self.loop.start),
            status=self.status,
            settings=self._queue_settings(self.config),
        )
        self.feeder.start()

    def _start_watcher(self) -> None:
        if self._path is None:
            return
        also = settings.watched_files(
            self.config,
            reload_keys=self._reload_keys,
            reconnect=None if self.feeder is None else self.feeder.reconnect,
            reload_certificate=None if self._certificate is None else self._certificate.reload,
        )
        self._watcher = ConfigWatcher(
            self._path,
            self.loaded,
            self._apply,
            also=also,
            parse=self._parse,
        )
        self._watcher.start()

    def _parse(self, text: str, source: str) -> WorkerConfig:
        config = configuration.parse(text, source, model=str(self._app.state.args.model))
        if problem := self._slo_problem(config):
            raise InvalidConfig(source, [problem])
        return config

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _scope(self) -> dict[str, Any]:
        headers = [(b"host", b"ballast"), (b"content-type", b"application/json")]
        if key := _api_key(self._app.state.args):
            headers.append((b"authorization", b"Bearer " + key.encode()))
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "query_string": b"",
            "root_path": "",
            "client": ("ballast", 0),
            "server": ("ballast", 0),
            "app": self._app,
            "headers": headers,
        }

    def _revision(self) -> str:
        """Return the name of everything that decides the tokens of an answer."""
        directory = Path(self.tap.identity[0])
        weights = settings.model_revision(self.config, directory) if directory.is_dir() else self.config.model.revision
        parts = ("vllm", weights, *self.tap.identity, *self.config.engine.vllm.args)  # such as --hf-overrides
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    # Requests

    def check_open(self) -> None:
        """Refuse a request if the server shuts down or EngineCore ended."""
        if self.is_closed:
            raise stopping()
        if self.tap.is_dead:
            raise Refused(500, DIED, code="engine_failed", kind="server_error")

    def check_queue(self, request_class: RequestClass, *, num_more: int = 0) -> None:
        """Refuse a request if the waiting queue of its class is full: 429 with a time for the next try.

        `num_more`: requests that enter before it, and do not wait yet.
        """
        waiting = self.tap.num_waiting(request_class) + num_more
        if request_class is RequestClass.OFFLINE and self.feeder is not None:
            waiting = max(0, waiting - self.feeder.num_held)  # items have a limit of their own
        self._queue_limit.check(self.config.limits, self.engine.stats, request_class, waiting)

    def check_requests(self, call: Call, number: int) -> None:
        """Refuse a call if its next `number` requests exceed the waiting queue: 400 if no other time is better.

        Clients of embeddings put some thousand inputs into a call. An encoder computes many of them in a step, so one
        call of it counts once.
        """
        if self.tap.is_encoder:
            return
        try:
            self.check_queue(call.request_class, num_more=number - 1 - call.is_entering)
        except Refused as refused:
            call.refused = refused
            limit = self.config.limits.max_queued_requests
            num_requests = number + sum(not request.is_over for request in call.requests)
            if num_requests > limit:
                call.refused = Refused(
                    400,
                    f"The call makes {num_requests} requests or more, the limit is {limit} (limits.maxQueuedRequests), "
                    "apart from those that find free slots. Divide it into several calls.",
                    code="too_many_requests",
                )
            raise call.refused from None

    def begin(self, call: Call, *, is_queued: bool) -> None:
        """Note that an HTTP request goes to vLLM. With `is_queued`, EngineCore gets requests of it."""
        if is_queued:
            self.tap.enter(call)
        slo = self.config.slo
        is_online = call.request_class is RequestClass.ONLINE
        timing, caller = call.timing, call.caller
        if slo.latency_milliseconds is None:
            timing.ttft_slo = caller.ttft_seconds or (slo.seconds("ttft") if is_online else None)
            timing.tpot_slo = caller.tpot_seconds or (slo.seconds("tpot") if is_online else None)
        else:
            timing.latency_slo = caller.ttft_seconds or (slo.seconds("latency") if is_online else None)
        self.calls.add(call)
        self._num_entered[call.request_class] += 1

    def end(self, call: Call, status: int | None, *, is_complete: bool) -> None:
        """Count an HTTP request that ended. `status` is that of the response, None without one."""
        self.calls.discard(call)
        self.tap.end(call)
        if status is not None and status >= 400:
            self.recorder.refused(call.request_class, outcome_of(status))
            return
        if not call.requests:
            return  # such as /tokenize
        reason = call.ending(is_complete=is_complete, is_dead=self.tap.is_dead)
        num_prompt = sum(request.num_prompt for request in call.requests)
        ended = call.last_at or time.monotonic()
        self.recorder.ended(call.timing, reason, num_prompt, call.num_output, ended)
        if reason in {FinishReason.STOP, FinishReason.LENGTH} and call.timing.first_at is not None:
            self._queue_limit.add_answer(ended - call.timing.first_at)

    # Status and metrics

    @property
    def failure(self) -> str | None:
        """Why only a restart helps; None while the server works."""
        if self.tap.is_dead:
            return DIED
        if self.feeder is not None and self.feeder.is_dead:
            return "The feeder ended, so the server does no offline work."
        return None

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts new requests."""
        return self.failure is None and not self.is_draining

    def status(self) -> WorkerStatus:
        """Return the status now."""
        return worker_status(self, self.engine.stats())

    def _figures(self) -> ScrapeData:
        feeder, watcher = self.feeder, self._watcher
        view = None
        if feeder is not None:
            view = queue_view(feeder, self.config.queue_name)
        return ScrapeData(
            model=self.models[0],
            stats=self.engine.stats(),
            steps=self._step_metrics,
            recorders=(self.recorder, feeder.recorder) if feeder is not None else (self.recorder,),
            spending=self._spending,
            utilization=None,
            connections=self._connections,
            queue=view,
            block_tokens=self.engine.policy.block_tokens,
            generation=self.config.runtime.generation,
            restart_required=len(self.loaded.restart_required),
            config_invalid=watcher is not None and watcher.is_invalid,
            is_draining=self.is_draining,
            is_healthy=self.failure is None,
        )

    async def _poll(self) -> None:
        """Read the figures of the scheduler."""
        try:
            found = await self.tap.stats(self._num_steps)
        except EngineDead:
            return  # `_watch` reports it
        self._num_steps = found["steps"]
        self.engine.latest = engine_stats(found)
        for record in steps(found):
            self._step_metrics.add(record)

    async def _watch(self) -> None:
        """Fail the items in flight if EngineCore ended: it answers no call, not even with an error."""
        if self.tap.is_dead and self.loop.failure is None:
            log.error("engine failed", because=DIED)
            self.loop.fail(DIED)

    async def _sweep(self) -> None:
        """Close the connections whose time is over."""
        if self._connections is not None:
            self._connections.sweep(asyncio.get_running_loop().time())

    async def _sample(self) -> None:
        now = time.monotonic()
        self.recorder.judge((call.timing for call in self.calls if call.requests), now)
        self.tap.sweep()
        if self.feeder is not None and self.models != self._queue_models:  # an adapter was loaded
            self.feeder.configure(self._queue_settings(self.config))
        stats = self.engine.stats()
        started = {**self._num_entered, RequestClass.OFFLINE: self.loop.num_started}
        self.rates.sample(stats, started, self.recorder.num_ended(), now)
        waiting = self.tap.num_waiting(RequestClass.ONLINE)
        self._queue_limit.sample(stats, self.tap.num_answered[RequestClass.ONLINE], waiting, now)
        self._spending.sample(stats, self.config.cost.dollars_per_gpu_hour, now)

    # Configuration

    def _queue_settings(self, config: WorkerConfig) -> QueueSettings:
        self._queue_models = self.models
        found = settings.queue_settings(config, self._queue_models[0])
        return found.model_copy(update={"models": self._queue_models, "urls": self._urls})

    def _apply(self, loaded: Loaded) -> None:
        """Put a changed configuration in force, on the watcher's thread.

        Raises:
            EngineDead, NotServed: EngineCore did not take it, so nothing changed here.
            TimeoutError: the same, but EngineCore may take it later.
        """
        config = loaded.config
        policy = _policy(config, self.engine.policy)
        configured = self.tap.configure(message_of(policy))
        asyncio.run_coroutine_threadsafe(configured, self.loop.events).result(timeout=CONFIGURE_SECONDS)
        self.engine.policy = policy
        self.tenancy = Tenancy(config.offline.tenants, self._keys)
        if self.feeder is not None:
            self.feeder.configure(self._queue_settings(config))
        self.bodies.fit(config.limits.max_body_kibibytes)
        self.loaded = loaded  # last: the status states that its generation is in force

    def _reload_keys(self) -> None:
        self._keys = settings.reloaded_keys(self.config, self._keys)
        self.tenancy = Tenancy(self.config.offline.tenants, self._keys)


def outcome_of(status: int) -> RequestOutcome:
    """Return the outcome of a request that gets an error."""
    if status == 429:
        return RequestOutcome.QUEUE_FULL
    return RequestOutcome.FAILED if status >= 500 else RequestOutcome.INVALID


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


def _item_urls(app: Any) -> tuple[str, ...]:
    """Return the URLs of items that have a route: vLLM adds the routes that its model can serve."""
    known = app.openapi()["paths"]
    return tuple(url for url in ITEM_URLS if "post" in known.get(url, {}))


def _address(arguments: Any) -> str:
    scheme = "https" if arguments.ssl_keyfile else "http"
    return f"{scheme}://{settings.public_host(arguments.host or '0.0.0.0')}:{arguments.port}"  # noqa: S104 - vLLM's default


def _api_key(arguments: Any) -> str | None:
    keys: list[str] = [key for key in (arguments.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    return keys[0] if keys else None


async def _every(seconds: float, task: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await task()
        except Exception:  # a defect in one call must not end all calls
            log.exception("periodic task failed")
