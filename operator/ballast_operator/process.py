"""The operator as a process: become the active replica, watch, reconcile, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections import Counter
from collections.abc import Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Literal

import kopf

from ballast_api.wildcard import ANY, listening_host
from ballast_log import Log
from ballast_operator import handlers, inference_deployment
from ballast_operator.addresses import Address, Addresses
from ballast_operator.cache import Cache
from ballast_operator.children.config import CA, own_redis
from ballast_operator.cluster import Cluster
from ballast_operator.context import GcsValkey, OperatorContext
from ballast_operator.controller import Controller
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, OperatorError
from ballast_operator.kinds import LEASE, SECRET, Key, Kind
from ballast_operator.lease import Leadership
from ballast_operator.metrics import PHASES, REPLICA_STATES, Metrics
from ballast_operator.poller import Poller
from ballast_operator.reconcile import Reconciler
from ballast_operator.redis_hosts import RedisHosts
from ballast_operator.releases import Releases
from ballast_operator.resource_type import ResourceType
from ballast_operator.secret_grants import SecretGrants
from ballast_operator.settings import OperatorSettings, listed
from ballast_operator.streams import Streams
from ballast_operator.user_sync import RedisUserSync, UserKeyStore
from ballast_operator.web import Web
from ballast_queue.errors import QueueError

log = Log(__name__)

RESOURCE_TYPES: tuple[ResourceType[Any], ...] = (inference_deployment.RESOURCE_TYPE,)
SECRET_EVERY_SECONDS = 60.0
"""Interval of reading the operator's own Redis Secret while Redis accepts its password."""
SECRET_SOON_SECONDS = 5.0
"""The same interval while Redis refuses the password."""
KINDS_AGAIN_SECONDS = 3.0
"""The API server may list a new kind a moment after its CRD changed."""
UNREAD_KINDS_AGAIN_SECONDS = 30.0
"""Interval of reading the optional kinds of a group that could not be read."""
AUDIT_SOON_SECONDS = 5.0
RETRY_SECONDS = 2.0
DAY_SECONDS = 86400.0
LEADERSHIP_LOST = 1
PART_ENDED = 70


async def run(settings: OperatorSettings, types: Sequence[ResourceType[Any]] = RESOURCE_TYPES) -> int:
    """Run until a signal, or until another replica is active. Return the exit code."""
    metrics = Metrics()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster = Cluster(observe_call=metrics.observe_call, namespaces=settings.namespaces)
    operator = Operator(settings, types, cluster, metrics, stop)
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
    """The active replica."""

    def __init__(
        self,
        settings: OperatorSettings,
        types: Sequence[ResourceType[Any]],
        cluster: Cluster,
        metrics: Metrics,
        stop: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._types = types
        self._cluster = cluster
        self._metrics = metrics
        self._stop = stop
        self._relisted = asyncio.Event()
        self._kinds_changed = asyncio.Event()
        self._secret_outdated = asyncio.Event()
        """Redis refuses the operator's own Secret, or the Secret is missing."""
        self._controller = Controller(
            self._reconcile,
            max_concurrent=settings.max_concurrent_reconciles,
            failed=lambda error: metrics.errors.labels(type(error).__name__).inc(),
        )
        self._grants = SecretGrants(
            cluster, is_required=settings.require_secret_label, least_seconds=settings.poll_seconds
        )
        own = f"{settings.namespace}/{settings.lease_name}"
        self._releases = Releases(cluster, own)
        self.poller = Poller(
            Addresses(cluster, least_seconds=settings.poll_seconds, only_allowed=settings.require_secret_label),
            RedisHosts(cluster, listed(settings.redis_hosts)),
            every_seconds=settings.poll_seconds,
            keep_seconds=settings.unused_queue_days * DAY_SECONDS,
            polled=self._controller.add,
            outdated=self._secret_outdated.set,
        )
        """The polls of all resources."""
        self._context = OperatorContext(
            image=settings.worker_image,
            vllm_image=settings.vllm_worker_image,
            ray_image=settings.ray_worker_image,
            ray_vllm_image=settings.ray_vllm_worker_image,
            gcs=GcsValkey(
                settings.gcs_redis_image,
                settings.gcs_redis_storage,
                settings.gcs_redis_storage_class,
                settings.gcs_redis_pod_security_context,
            ),
            rules=settings.pod_rules,
            runbooks=settings.runbook_base_url or None,
            release=settings.release or own,
            shared_queues=listed(settings.shared_queues),
            any_host=listening_host(ANY, settings.pod_ip),
        )
        self._user_keys = UserKeyStore(
            cluster,
            Key(SECRET, settings.namespace, f"{settings.lease_name}-redis-users"),
            days=settings.redis_password_days,
        )
        self._users = RedisUserSync(
            cluster,
            release=self._context.release,
            every_seconds=settings.poll_seconds,
            kinds=[found.kind for found in types],
            address=self._own_redis,
            wanted=lambda: {
                key: users for each in self._reconcilers.values() for key, users in each.users.users.items()
            },
            on_hold=lambda: {key for each in self._reconcilers.values() for key in each.users.on_hold},
            has_all=self._has_all,
            has_pods=self._has_pods,
            refused=self._note_refusal,
        )
        self.caches = {found.kind: Cache(found.kind, found.label, queue_of=found.queue_of) for found in types}
        """The watched objects, by kind of resource."""
        self._reconcilers: dict[Kind, Reconciler[Any]] = {found.kind: self._reconciler(found) for found in types}
        self.streams = Streams(handlers.watched(types), self._relisted.set)
        """The watches. Queues are removed only while none is missing."""
        self.unreadable: tuple[str, ...] = ()
        """Namespaces that the operator must watch, and whose resources it may not list."""
        self._unread = ""
        """Why the context was not read yet; empty on standby."""
        self._has_unread_kinds = False
        """Whether a group of optional kinds could not be read."""
        self._parts: list[asyncio.Task[object]] = []

    def _reconciler(self, resource_type: ResourceType[Any]) -> Reconciler[Any]:
        return Reconciler(
            resource_type,
            self._cluster,
            self.caches[resource_type.kind],
            poller=self.poller,
            grants=self._grants,
            releases=self._releases,
            context=self._context,
            users_changed=self._users.changed.set,
        )

    def is_alive(self) -> bool:
        """Return whether every part runs, or this replica is on standby."""
        return not any(part.done() for part in self._parts)

    def unready(self) -> str:
        """Return why this replica does not reconcile; empty if it does, or is on standby."""
        if not self.is_alive():
            return "a part of the operator has stopped"
        if self._unread:
            return f"nothing is reconciled before this is read: {self._unread}"
        if self.unreadable:
            return (
                f"may not list the resources of namespace {', '.join(self.unreadable)}, which was deleted or lacks the "
                "Role of the operator; the next audit after both exist starts the operator again"
            )
        return self.streams.unwatched if self._parts else ""

    def refresh(self) -> None:
        """Update the gauges."""
        self._metrics.replicas.clear()
        self._metrics.conditions.clear()
        self._metrics.ray_ready.clear()
        for kind, reconciler in self._reconcilers.items():
            phases = Counter(figures.phase for figures in reconciler.figures.values())
            for phase in PHASES:
                self._metrics.resources.labels(kind.name, phase).set(phases[phase])
            self._metrics.foreign.labels(kind.name).set(len(reconciler.foreign))
            for key, figures in reconciler.figures.items():
                labels = kind.name, key.namespace, key.name
                for condition in figures.conditions:
                    self._metrics.conditions.labels(*labels, *condition).set(1)
                for part, is_ready in figures.ray.items():
                    self._metrics.ray_ready.labels(*labels, part).set(is_ready)
                if figures.desired is not None:
                    for state, number in zip(REPLICA_STATES, (figures.desired, figures.ready), strict=True):
                        self._metrics.replicas.labels(*labels, state).set(number)
        self._metrics.waiting.set(self._controller.queue.num_waiting)
        self._metrics.active.set(bool(self._parts) and not self.streams.unwatched)

    async def work(self, leadership: Leadership) -> int:
        """Work until a signal, a lost lease or the end of a part. Return the exit code."""
        # The Lease expires while a slow API server answers the first calls, so it is kept from the beginning.
        leading = asyncio.create_task(leadership.keep())
        stopping = asyncio.create_task(self._stop.wait())
        reading = asyncio.create_task(self._read_context())
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
            asyncio.create_task(self._keep_auditing()),
            asyncio.create_task(self._follow_redis_secret()),
            asyncio.create_task(self._follow_kinds()),
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
        if namespaces:
            await self._wait_for_kinds()
            await self._wait_for_namespaces()
        self.streams.install()
        listener = handlers.Listener(add=self._controller.add, kinds_changed=self._kinds_changed.set)
        await kopf.operator(
            registry=handlers.registry(self._types, list(self.caches.values()), listener, sees_kinds=not namespaces),
            settings=handlers.settings(self._types, sees_kinds=not namespaces),
            # Kopf's default contains a user name, which a pod may lack. The type has no public name.
            identity=self._settings.identity,  # type: ignore[arg-type]
            clusterwide=not namespaces,
            namespaces=self._cluster.namespaces,
            standalone=True,
            stop_flag=stop,
        )

    async def _wait_for_kinds(self) -> None:
        """Wait until the resources' kinds exist: without a watch of CRDs, Kopf finds the kinds at its start only."""
        for kind in self.caches:
            while True:
                with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                    if kind.plural in await self._cluster.plurals(kind):
                        break
                await asyncio.sleep(RETRY_SECONDS)

    async def _wait_for_namespaces(self) -> None:
        """Wait until the resources of a namespace can be listed, and leave out the namespaces whose resources cannot.

        Kopf handles no event before it has listed all namespaces. The Role in a namespace goes with the namespace.
        """
        while True:
            with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                before, self.unreadable = self.unreadable, await self._find_unreadable(self._settings.namespaces)
                readable = tuple(each for each in self._settings.namespaces if each not in self.unreadable)
                if self.unreadable and self.unreadable != before:
                    log.error("namespaces are not watched", because=self.unready())
                if readable:
                    self._cluster.namespaces = readable
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _find_unreadable(self, namespaces: Sequence[str]) -> tuple[str, ...]:
        found = {each for each in namespaces for kind in self.caches if not await self._cluster.may_list(kind, each)}
        return tuple([each for each in namespaces if each in found])

    async def _reconcile(self, key: Key) -> float | None:
        with self._metrics.reconciles.time():
            return await self._reconcilers[key.kind].reconcile(key)

    async def _keep_auditing(self) -> None:
        """Compare caches and cluster at an interval, and soon after a watch listed its objects again."""
        self._relisted.clear()
        looked = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.audit_seconds):
                    await self._relisted.wait()
                    await asyncio.sleep(AUDIT_SOON_SECONDS)
            self._relisted.clear()
            try:
                await self._audit()
                if time.monotonic() - looked >= self._settings.audit_seconds:
                    looked = time.monotonic()
                    await self._audit_unwatched()
                    await self.update_queues()
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("audit not finished", error=str(error))

    async def _audit(self) -> None:
        for kind in handlers.watched(self._types):
            before = {cache: cache.uids(kind) for cache in self.caches.values()}
            try:
                present = await self._cluster.uids(kind, "" if kind in self.caches else handlers.CHILDREN_SELECTOR)
            except (ClusterUnavailable, ClusterRefused) as error:
                if not kind.is_optional:
                    raise
                log.warning("an optional kind was not compared with the cluster", kind=kind.name, error=str(error))
                continue
            for cache, uids in before.items():
                for key in cache.forget_missing(kind, uids, present):
                    log.info("an audit found a deletion", kind=kind.name, resource=str(key))
                    self._controller.add(key)
        await self._read_kinds()

    async def _audit_unwatched(self) -> None:
        """Check what no watch shows: Secrets that resources name or have as children."""
        if await self._find_unreadable(self.unreadable) != self.unreadable:
            raise OperatorError("a namespace that was left out can be watched now, so the process ends")
        self._grants.forget(key.namespace for cache in self.caches.values() for key in cache.resources)
        self.poller.forget_unused()
        if await self._grants.audit():
            for key in (key for cache in self.caches.values() for key in cache.resources):
                self._controller.add(key)
        for reconciler in self._reconcilers.values():
            for key in await reconciler.audit_secrets():
                log.info("an audit found a Secret that is missing or changed", resource=str(key))
                self._controller.add(key)

    async def update_queues(self) -> None:
        """Remove the queues of the operator's own Redis that no resource has used for long."""
        if self._context.redis is None or self.streams.missing or self.unreadable:
            return
        used = {queue for each in self._reconcilers.values() for queue in each.users.queues(self._context)}
        try:
            removed = await self.poller.update_queues(
                self._context.redis, used, release=self._context.release, namespaces=self._settings.namespaces
            )
        except QueueError as error:
            log.warning("unused queues were not checked", error=type(error).__name__)
        else:
            if removed:
                log.info("unused queues removed", queues=removed, days=self._settings.unused_queue_days)

    async def _read_kinds(self) -> None:
        kinds = await self._optional_kinds()  # first: the context may change meanwhile
        self.use(replace(self._context, kinds=kinds))

    async def _follow_kinds(self) -> None:
        """Read the optional kinds again when a CRD of theirs changes."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_KINDS_AGAIN_SECONDS if self._has_unread_kinds else None):
                    await self._kinds_changed.wait()
            self._kinds_changed.clear()
            for seconds in (0.0, KINDS_AGAIN_SECONDS):
                await asyncio.sleep(seconds)
                try:
                    await self._read_kinds()
                except (ClusterUnavailable, ClusterRefused) as error:
                    log.warning("cannot read the optional kinds, which the next audit retries", error=str(error))

    async def _read_context(self) -> None:
        """Read the context before the first reconciliation."""
        self._unread = "the kinds of the cluster and the operator's own Secrets"
        while not self._stop.is_set():
            try:
                kinds = await self._optional_kinds()
                self.use(replace(await self._with_secret(), kinds=kinds))
            except (ClusterUnavailable, ClusterRefused) as error:
                self._unread = str(error)
                log.warning("cannot read the cluster and will retry", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._unread = ""
                return

    async def _follow_redis_secret(self) -> None:
        """Read the operator's own Redis Secret at an interval, and at once if it may have changed."""
        if not self._settings.redis_secret:
            await asyncio.Event().wait()
        while True:
            with contextlib.suppress(TimeoutError):
                seconds = SECRET_SOON_SECONDS if self._context.lacks_redis else SECRET_EVERY_SECONDS
                async with asyncio.timeout(min(seconds, self._settings.audit_seconds)):
                    await self._secret_outdated.wait()
            try:
                self.use(await self._with_secret())
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("cannot read the operator's Redis Secret", error=str(error))
            if self._secret_outdated.is_set():
                await asyncio.sleep(SECRET_SOON_SECONDS)
                self._secret_outdated.clear()

    async def _with_secret(self) -> OperatorContext:
        """Return the context with the present data of the operator's own Redis Secret."""
        name = self._settings.redis_secret
        key = Key(SECRET, self._settings.namespace, name) if name else None
        body = await self._cluster.get(key) if key else None
        redis = None if body is None else dict(body.get("data") or {})
        if redis is not None and self._settings.redis_ca_secret:
            # Workers would be replaced by others without the file, so a Secret without it counts as missing.
            authority = Key(SECRET, self._settings.namespace, self._settings.redis_ca_secret)
            found = await self._cluster.get(authority)
            ca = ((found or {}).get("data") or {}).get(CA)
            redis, key = (redis | {CA: ca}, key) if ca else (None, authority)
        user_keys = await self._user_keys.read() if redis is not None else self._context.user_keys
        return replace(self._context, redis=redis, redis_key=key, user_keys=user_keys)

    def _note_refusal(self, *, is_refused: bool) -> None:
        """Note whether the operator's own Redis refuses the creation of users."""
        self.use(replace(self._context, refuses_users=is_refused))

    def _has_all(self, present: AbstractSet[Key]) -> bool:
        """Return whether the caches have all these resources. Just after a start, they may lack some."""
        return not self.unreadable and present <= {key for cache in self.caches.values() for key in cache.resources}

    def _has_pods(self, resource: str) -> bool:
        """Return whether a resource, as `namespace/name`, has pods."""
        namespace, _, name = resource.partition("/")
        return any(cache.pods(Key(kind, namespace, name)) for kind, cache in self.caches.items())

    def _own_redis(self) -> Address | None:
        return Address.of(self._context.redis or {}, own_redis("", self._context.redis_keys))

    async def _optional_kinds(self) -> frozenset[str]:
        """Return the names of the optional kinds that the cluster has, with one call for each of their groups.

        The kinds of a group that cannot be read stay as they were.
        """
        optional = [kind for kind in handlers.watched(self._types) if kind.is_optional]
        groups = {(kind.group, kind.version): kind for kind in optional}
        known = frozenset(kind.plural for kind in optional if kind.name in self._context.kinds)
        plurals, unread = {}, False
        for group, kind in groups.items():
            try:
                plurals[group] = await self._cluster.plurals(kind)
            except (ClusterUnavailable, ClusterRefused) as error:
                if isinstance(error, ClusterUnavailable) and not error.is_about_one:
                    raise
                plurals[group], unread = known, True
                log.warning("cannot read the optional kinds of a group and will retry", error=str(error))
        if unread and not self._has_unread_kinds:
            self._kinds_changed.set()  # `_follow_kinds` then tries again at an interval
        self._has_unread_kinds = unread
        return frozenset(kind.name for kind in optional if kind.plural in plurals[kind.group, kind.version])

    def use(self, context: OperatorContext) -> None:
        """Use another context from now on, and reconcile every resource."""
        if context == self._context:
            return
        self._context = context
        for kind, reconciler in self._reconcilers.items():
            reconciler.context = context
            for key in self.caches[kind].resources:
                self._controller.add(key)


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
