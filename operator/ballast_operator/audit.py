"""Compares what this process knows with the cluster, at an interval. It finds what no watch has shown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ballast_log import Log
from ballast_operator import handlers
from ballast_operator.cache import Cache
from ballast_operator.cluster import Cluster
from ballast_operator.context_reader import ContextReader
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, WATCHED, Key
from ballast_operator.poller import Poller
from ballast_operator.reconcile import Reconciler
from ballast_operator.secret_grants import SecretGrants
from ballast_operator.settings import OperatorSettings
from ballast_operator.streams import Streams
from ballast_operator.watchable import Watchable
from ballast_queue.errors import QueueError

log = Log(__name__)

AUDIT_SOON_SECONDS = 5.0


@dataclass(kw_only=True, slots=True)
class Audit:
    """Compares the parts of the operator with the cluster. It belongs to one event loop."""

    settings: OperatorSettings
    cluster: Cluster
    cache: Cache
    reconciler: Reconciler
    add: Callable[[Key], None]
    """Reconcile a resource."""
    context: ContextReader
    grants: SecretGrants
    poller: Poller
    watchable: Watchable
    streams: Streams
    """Queues are removed only while no watch is missing."""
    relisted: asyncio.Event
    """A watch has listed its objects again."""

    async def keep(self) -> None:
        """Compare caches and cluster at an interval, and soon after a watch listed its objects again."""
        self.relisted.clear()
        looked = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.audit_seconds):
                    await self.relisted.wait()
                    await asyncio.sleep(AUDIT_SOON_SECONDS)
            self.relisted.clear()
            try:
                await self.compare()
                if time.monotonic() - looked >= self.settings.audit_seconds:
                    looked = time.monotonic()
                    await self._check_unwatched()
                    await self.update_queues()
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("audit not finished", error=str(error))

    async def compare(self) -> None:
        """Find the objects in the caches that the cluster has no more, and the optional kinds that it has."""
        for kind in WATCHED:
            before = self.cache.uids(kind)
            try:
                selector = "" if kind == INFERENCE_DEPLOYMENT else handlers.CHILDREN_SELECTOR
                present = await self.cluster.uids(kind, selector)
            except (ClusterUnavailable, ClusterRefused) as error:
                if not kind.is_optional:
                    raise
                log.warning("an optional kind was not compared with the cluster", kind=kind.name, error=str(error))
                continue
            for key in self.cache.forget_missing(kind, before, present):
                log.info("an audit found a deletion", kind=kind.name, resource=str(key))
                self.add(key)
        await self.context.read_kinds()

    async def _check_unwatched(self) -> None:
        """Check what no watch shows: namespaces that were left out, and Secrets that resources name or have."""
        await self.watchable.audit()
        self.grants.forget(key.namespace for key in self.cache.resources)
        self.poller.forget_unused()
        if await self.grants.audit():
            for key in self.cache.resources:
                self.add(key)
        for key in await self.reconciler.audit_secrets():
            log.info("an audit found a Secret that is missing or changed", resource=str(key))
            self.add(key)

    async def update_queues(self) -> None:
        """Remove the queues of the operator's own Redis that no resource has used for long."""
        context = self.context.present
        if context.redis is None or self.streams.missing or self.watchable.unreadable:
            return
        try:
            removed = await self.poller.update_queues(
                context.redis,
                frozenset(self.reconciler.users.queues(context)),
                release=context.release,
                namespaces=self.settings.namespaces,
            )
        except QueueError as error:
            log.warning("unused queues were not checked", error=type(error).__name__)
        else:
            if removed:
                log.info("unused queues removed", queues=removed, days=self.settings.unused_queue_days)
