"""The operator as a process: wait to be the active one, then watch, give turns, and end when that is over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights  # `kopf.operator` takes both, and Kopf exports no name for them
from kopf._core.engines.peering import Identity

from ballast_log import Log
from ballast_operator import handlers
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, WATCHED, Key
from ballast_operator.lease import Leadership
from ballast_operator.loads import Loads
from ballast_operator.metrics import Metrics
from ballast_operator.plan import Surroundings
from ballast_operator.reconcile import Reconciler
from ballast_operator.settings import OperatorSettings
from ballast_operator.streams import outlive_kinds
from ballast_operator.surroundings import look, optional_kinds
from ballast_operator.turns import Turns
from ballast_operator.web import Web

log = Log(__name__)

SECRET_EVERY_SECONDS = 60.0
"""How soon a rotated Redis Secret of the operator's own is noticed while Redis still takes the old password."""
SECRET_SOON_SECONDS = 5.0
"""How soon where Redis refuses it."""
KINDS_AGAIN_SECONDS = 3.0
"""Discovery may show a kind a little later than its CRD says it is there."""
AUDIT_SOON_SECONDS = 5.0
TRY_AGAIN_SECONDS = 2.0
LEADERSHIP_LOST = 1
PART_ENDED = 70


async def run(settings: OperatorSettings) -> int:
    """Run until a signal, or until another replica is active; gives the exit code."""
    metrics = Metrics()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Cluster(observe_call=metrics.observe_call) as cluster:
        operator = Operator(settings, cluster, metrics, stop)
        web = Web(metrics, is_alive=operator.is_alive, refresh=operator.refresh)
        await web.start(settings.host, settings.port)
        leadership = Leadership(
            cluster, Key(settings.namespace, settings.lease_name), settings.identity, seconds=time.monotonic
        )
        try:
            if not await _first(leadership.acquire(), stop.wait()):
                return 0
            metrics.active.set(1)
            return await operator.work(leadership)
        finally:
            await leadership.release()
            await web.stop()


class Operator:
    """The active replica."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster, metrics: Metrics, stop: asyncio.Event) -> None:
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._stop = stop
        self._cache = Cache()
        self._relisted = asyncio.Event()
        self._insights = Insights()
        """What Kopf's watch of the CRDs found."""
        self._doubted = asyncio.Event()
        """Redis refuses the operator's own Secret, or is not there."""
        self._loads = Loads(
            cluster, every_seconds=settings.look_seconds, looked=self._looked, doubted=self._doubted.set
        )
        self._reconciler = Reconciler(cluster, self._cache, self._loads, Surroundings(image=settings.worker_image))
        self._turns = Turns(self._turn, at_a_time=settings.turns_at_a_time, failed=self._failed)
        self._parts: list[asyncio.Task[object]] = []

    def is_alive(self) -> bool:
        """Every part runs, or this replica stands by."""
        return not any(part.done() for part in self._parts)

    def refresh(self) -> None:
        """Bring the gauges up to date."""
        found = self._reconciler.figures
        phases = Counter(figures.phase for figures in found.values())
        for phase in ("Ready", "Progressing", "NotReady", "Degraded"):
            self._metrics.resources.labels(phase).set(phases[phase])
        self._metrics.replicas.clear()
        for key, figures in found.items():
            self._metrics.replicas.labels(key.namespace, key.name, "desired").set(figures.desired)
            self._metrics.replicas.labels(key.namespace, key.name, "ready").set(figures.ready)
        self._metrics.waiting.set(self._turns.agenda.num_waiting)

    async def work(self, leadership: Leadership) -> int:
        """Do the work until a signal, a lost lease or the end of a part; gives the exit code."""
        await self._look_around()
        stop_kopf = asyncio.Event()
        watching = asyncio.create_task(self._watch(stop_kopf))
        others = [
            asyncio.create_task(self._turns.run()),
            asyncio.create_task(leadership.keep()),
            asyncio.create_task(self._keep_auditing()),
            asyncio.create_task(self._keep_looking_around()),
            asyncio.create_task(self._keep_noticing_kinds()),
        ]
        stopping = asyncio.create_task(self._stop.wait())
        self._parts = [watching, *others]
        try:
            await asyncio.wait([*self._parts, stopping], return_when=asyncio.FIRST_COMPLETED)
            # Kopf takes the signals over and ends in order; it ends by itself only with an error.
            if self._stop.is_set() or (watching.done() and watching.exception() is None):
                log.info("stopping on a signal")
                return 0
            if others[1].done():
                return LEADERSHIP_LOST
            for part in self._parts:
                if part.done() and not part.cancelled() and (error := part.exception()) is not None:
                    trace = "".join(traceback.format_exception(error))
                    log.error("a part of the operator failed, it ends", because=str(error), trace=trace)
            return PART_ENDED
        finally:
            for part in (*others, stopping):
                part.cancel()
            await asyncio.gather(*others, stopping, return_exceptions=True)
            stop_kopf.set()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5):
                    await watching
            self._loads.close()

    async def _watch(self, stop: asyncio.Event) -> None:
        outlive_kinds(self._relisted.set)
        await kopf.operator(
            registry=handlers.registry(
                self._cache, lambda key, seconds: self._turns.add(key, seconds=seconds), self._relisted.set
            ),
            settings=handlers.settings(),
            identity=Identity(self._settings.identity),  # its own would be a user's name, and a pod's may have none
            clusterwide=True,
            standalone=True,
            stop_flag=stop,
            insights=self._insights,
        )

    async def _turn(self, key: Key) -> float | None:
        with self._metrics.turns.time():
            return await self._reconciler.turn(key)

    def _looked(self, key: Key) -> None:
        self._turns.add(key)

    def _failed(self, key: Key, error: Exception) -> None:
        del key
        self._metrics.errors.labels(type(error).__name__).inc()

    async def _keep_auditing(self) -> None:
        """Compare caches and cluster now and then, and soon after a stream was listed anew."""
        self._relisted.clear()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.audit_seconds):
                    await self._relisted.wait()
                    await asyncio.sleep(AUDIT_SOON_SECONDS)
            self._relisted.clear()
            try:
                await self._audit()
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("audit not finished", because=str(error))

    async def _audit(self) -> None:
        for kind in WATCHED:
            before = self._cache.uids(kind)
            selector = "" if kind == INFERENCE_DEPLOYMENT else handlers.CHILDREN_SELECTOR
            present = await self._cluster.uids(kind, selector)
            for key in self._cache.forget_missing(kind, before, present or {}):
                log.info("found gone by an audit", kind=kind.name, resource=str(key))
                self._turns.add(key)
        await self._look_for_kinds()

    async def _look_for_kinds(self) -> None:
        kinds = await optional_kinds(self._cluster)
        self._take(replace(self._reconciler.surroundings, kinds=kinds))

    async def _keep_noticing_kinds(self) -> None:
        """Take up kinds of others as they are installed and removed."""
        changed = asyncio.Event()
        hearing = asyncio.create_task(self._hear_of_kinds(changed))
        try:
            while True:
                await changed.wait()
                changed.clear()
                for seconds in (0.0, KINDS_AGAIN_SECONDS):
                    await asyncio.sleep(seconds)
                    try:
                        await self._look_for_kinds()
                    except (ClusterUnavailable, ClusterRefused) as error:
                        log.warning("kinds of others not read, the next audit does", because=str(error))
        finally:
            hearing.cancel()

    async def _hear_of_kinds(self, changed: asyncio.Event) -> None:
        async with self._insights.revised:
            while True:
                await self._insights.revised.wait()
                changed.set()

    async def _look_around(self) -> None:
        """Learn the surroundings before the first turn."""
        while not self._stop.is_set():
            try:
                kinds = await optional_kinds(self._cluster)
                self._reconciler.surroundings = await look(self._cluster, self._settings, kinds)
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("surroundings not read, tried again", because=str(error))
                await asyncio.sleep(TRY_AGAIN_SECONDS)
            else:
                return

    async def _keep_looking_around(self) -> None:
        if not self._settings.redis_secret:
            await asyncio.Event().wait()
        while True:
            with contextlib.suppress(TimeoutError):
                seconds = SECRET_SOON_SECONDS if self._reconciler.surroundings.lacks_redis else SECRET_EVERY_SECONDS
                async with asyncio.timeout(min(seconds, self._settings.audit_seconds)):
                    await self._doubted.wait()
            try:
                self._take(await look(self._cluster, self._settings, self._reconciler.surroundings.kinds))
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("the operator's Redis Secret was not read", because=str(error))
            if self._doubted.is_set():
                await asyncio.sleep(SECRET_SOON_SECONDS)
                self._doubted.clear()

    def _take(self, surroundings: Surroundings) -> None:
        if surroundings != self._reconciler.surroundings:
            self._reconciler.surroundings = surroundings
            for key in self._cache.resources:
                self._turns.add(key)


async def _first(wanted: Coroutine[Any, Any, object], stop: Coroutine[Any, Any, object]) -> bool:
    """Wait for one of two; True where it was `wanted`."""
    tasks = [asyncio.create_task(wanted), asyncio.create_task(stop)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done() and tasks[0].exception() is None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
