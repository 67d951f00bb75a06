"""The operator as a process: become the active replica, watch, reconcile, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections.abc import Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import kopf

from ballast_log import Log
from ballast_operator import handlers
from ballast_operator.addresses import Addresses
from ballast_operator.audit import Audit
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.context import OperatorContext
from ballast_operator.context_reader import ContextReader
from ballast_operator.controller import Controller
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, LEASE, WATCHED, Key
from ballast_operator.lease import Leadership
from ballast_operator.metrics import Metrics
from ballast_operator.poller import Poller
from ballast_operator.reconcile import Reconciler
from ballast_operator.redis_hosts import RedisHosts
from ballast_operator.releases import Releases
from ballast_operator.secret_grants import SecretGrants
from ballast_operator.settings import OperatorSettings, listed
from ballast_operator.streams import Streams
from ballast_operator.user_sync import RedisUserSync
from ballast_operator.watchable import Watchable
from ballast_operator.web import Web

log = Log(__name__)

DAY_SECONDS = 86400.0
LEADERSHIP_LOST = 1
PART_ENDED = 70


async def run(settings: OperatorSettings) -> int:
    """Run until a signal, or until another replica is active. Return the exit code."""
    metrics = Metrics()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster = Cluster(observe_call=metrics.observe_call, namespaces=settings.namespaces)
    operator = Operator(settings, cluster, metrics, stop)
    # The Lease has connections of its own, so that slow answers to other calls do not delay its renewal.
    async with Cluster(observe_call=metrics.observe_call) as of_lease:
        web = Web(metrics, is_alive=operator.is_alive, unready=operator.unready, refresh=operator.refresh)
        await web.start(settings.listening_host, settings.port)
        lease = Key(LEASE, settings.namespace, settings.lease_name)
        leadership = Leadership(of_lease, lease, settings.identity, seconds=time.monotonic)
        try:
            if not await _first(leadership.acquire(), stop.wait()):
                return 0
            async with cluster:
                try:
                    return await operator.work(leadership)
                finally:
                    await leadership.release()  # before the end of `cluster`, which waits for the last Events
        finally:
            await leadership.release()
            await web.stop()


def report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop with its traceback, or without it where the error is of no consequence.

    Kopf does not close the generators of its watches when it stops. Python closes them, and may fail to, because one
    generator is closed inside another.
    """
    if "asyncgen" in context:
        log.debug("a watch was not closed in order", error=str(context.get("exception")))
    else:
        loop.default_exception_handler(context)


class Operator:
    """The active replica: its parts, and the order in which they start and stop."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster, metrics: Metrics, stop: asyncio.Event) -> None:
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._stop = stop
        self._parts: list[asyncio.Task[object]] = []
        self._controller = Controller(
            self._reconcile,
            max_concurrent=settings.max_concurrent_reconciles,
            failed=lambda error: metrics.errors.labels(type(error).__name__).inc(),
        )
        self._grants = SecretGrants(
            cluster, is_required=settings.require_secret_label, least_seconds=settings.poll_seconds
        )
        self.cache = Cache()
        self.context = ContextReader(settings, cluster, changed=self._use)
        self.poller = self._make_poller()
        """The polls of all resources."""
        self._users = self._make_users()
        self.reconciler = Reconciler(
            cluster,
            self.cache,
            poller=self.poller,
            grants=self._grants,
            releases=Releases(cluster, settings.lease),
            context=self.context.present,
            users_changed=self._users.changed.set,
        )
        self.watchable = Watchable(cluster, settings.namespaces)
        relisted = asyncio.Event()
        self.streams = Streams(WATCHED, relisted.set)
        self.audit = Audit(
            settings=settings,
            cluster=cluster,
            cache=self.cache,
            reconciler=self.reconciler,
            add=self._controller.add,
            context=self.context,
            grants=self._grants,
            poller=self.poller,
            watchable=self.watchable,
            streams=self.streams,
            relisted=relisted,
        )

    def _make_poller(self) -> Poller:
        settings, cluster = self._settings, self._cluster
        return Poller(
            Addresses(cluster, least_seconds=settings.poll_seconds, only_allowed=settings.require_secret_label),
            RedisHosts(cluster, listed(settings.redis_hosts)),
            every_seconds=settings.poll_seconds,
            keep_seconds=settings.unused_queue_days * DAY_SECONDS,
            polled=self._controller.add,
            outdated=self.context.secret_outdated.set,
        )

    def _make_users(self) -> RedisUserSync:
        return RedisUserSync(
            self._cluster,
            release=self.context.present.release,
            every_seconds=self._settings.poll_seconds,
            address=self.context.redis_address,
            wanted=lambda: self.reconciler.users.users,
            on_hold=lambda: self.reconciler.users.on_hold,
            has_all=self.has_all,
            has_pods=self._has_pods,
            refused=self.context.note_refusal,
        )

    async def _reconcile(self, key: Key) -> float | None:
        with self._metrics.reconciles.time():
            return await self.reconciler.reconcile(key)

    def _use(self, context: OperatorContext) -> None:
        """Reconcile every resource with another context."""
        self.reconciler.context = context
        for key in self.cache.resources:
            self._controller.add(key)

    def _has_pods(self, resource: str) -> bool:
        """Return whether a resource, as `namespace/name`, has pods."""
        namespace, _, name = resource.partition("/")
        return bool(self.cache.pods(Key(INFERENCE_DEPLOYMENT, namespace, name)))

    def has_all(self, present: AbstractSet[Key]) -> bool:
        """Return whether the cache has all these resources. Just after a start, it may lack some."""
        return not self.watchable.unreadable and present <= self.cache.resources.keys()

    def is_alive(self) -> bool:
        """Return whether every part runs, or this replica is on standby."""
        return not any(part.done() for part in self._parts)

    def unready(self) -> str:
        """Return why this replica does not reconcile; empty if it does, or is on standby."""
        if not self.is_alive():
            return "a part of the operator has stopped"
        if self.context.unread:
            return f"nothing is reconciled before this is read: {self.context.unread}"
        return self.watchable.problem or (self.streams.unwatched if self._parts else "")

    def refresh(self) -> None:
        """Update the gauges."""
        self._metrics.show(self.reconciler.figures, num_foreign=len(self.reconciler.foreign))
        self._metrics.waiting.set(self._controller.queue.num_waiting)
        self._metrics.active.set(bool(self._parts) and not self.streams.unwatched)

    async def work(self, leadership: Leadership) -> int:
        """Work until a signal, a lost lease or the end of a part. Return the exit code."""
        # The Lease expires while a slow API server answers the first calls, so it is kept from the beginning.
        leading = asyncio.create_task(leadership.keep())
        stopping = asyncio.create_task(self._stop.wait())
        reading = asyncio.create_task(self.context.read())
        first = (leading, stopping, reading)
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return 0
            if leading.done():
                return LEADERSHIP_LOST
            reading.result()
            return await self._work(leading, stopping)
        finally:
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)

    async def _work(self, leading: asyncio.Task[None], stopping: asyncio.Task[Literal[True]]) -> int:
        """Watch and reconcile. Return the exit code."""
        stop_kopf = asyncio.Event()
        watching = asyncio.create_task(self._watch(stop_kopf))
        others: list[asyncio.Task[None]] = [
            leading,
            asyncio.create_task(self._controller.run()),
            asyncio.create_task(self.audit.keep()),
            asyncio.create_task(self.context.follow_redis_secret()),
            asyncio.create_task(self.context.follow_kinds()),
            asyncio.create_task(self._users.run()),
        ]
        self._parts = [watching, *others]
        try:
            await asyncio.wait([*self._parts, stopping], return_when=asyncio.FIRST_COMPLETED)
            # Kopf takes over the signals. Without an error, it ends only on a signal.
            if self._stop.is_set() or (watching.done() and watching.exception() is None):
                log.info("stopping on a signal")
                return 0
            if leading.done():
                return LEADERSHIP_LOST
            for part in self._parts:
                if part.done() and not part.cancelled() and (error := part.exception()) is not None:
                    trace = "".join(traceback.format_exception(error))
                    log.error("a part of the operator failed, so the process ends", error=str(error), trace=trace)
            return PART_ENDED
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            stop_kopf.set()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5):
                    await watching
            self.poller.close()

    async def _watch(self, stop: asyncio.Event) -> None:
        namespaces = self._settings.namespaces
        await self.watchable.wait()
        self.streams.install()
        await kopf.operator(
            registry=handlers.registry(
                self.cache,
                add=self._controller.add,
                kinds_changed=self.context.kinds_changed.set,
                sees_kinds=not namespaces,
            ),
            settings=handlers.settings(sees_kinds=not namespaces),
            # Kopf's default contains a user name, which a pod may lack. The type has no public name.
            identity=self._settings.identity,  # type: ignore[arg-type]
            clusterwide=not namespaces,
            namespaces=self._cluster.namespaces,
            standalone=True,
            stop_flag=stop,
        )


async def _first(wanted: Coroutine[Any, Any, object], stop: Coroutine[Any, Any, object]) -> bool:
    """Wait until one of two coroutines ends. Return whether `wanted` did, and raise its error."""
    tasks = [asyncio.create_task(wanted), asyncio.create_task(stop)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return False
        tasks[0].result()
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
