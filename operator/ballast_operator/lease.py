"""Leader election: one operator is active, and renews a Lease.

A replica that cannot renew the Lease for `RENEW_WITHIN_SECONDS` stops, well before another replica may take over after
`DURATION_SECONDS`. Each process measures both intervals with its own clock. No clocks are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ballast_log import Log
from ballast_operator.cluster import Cluster
from ballast_operator.errors import BadSetting, ClusterRefused, ClusterUnavailable, Conflict
from ballast_operator.kinds import LEASE, Body, Key

log = Log(__name__)

DURATION_SECONDS = 15.0
RENEW_WITHIN_SECONDS = 10.0
RENEW_EVERY_SECONDS = 5.0
RENEW_AGAIN_SECONDS = 1.0
"""Delay after a renewal that failed or was answered late."""
POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last version of the Lease, and when this process first read it."""

    version: str
    at: float


class Leadership:
    """This process's part in the election."""

    def __init__(self, cluster: Cluster, key: Key, identity: str, *, seconds: Callable[[], float]) -> None:
        """Create a candidate with the name `identity`. `seconds` returns the time of a monotonic clock."""
        self._cluster = cluster
        self._key = key
        self._identity = identity
        self._seconds = seconds
        self._seen: _Seen | None = None
        self._lease: Body | None = None
        self._renewed = seconds()
        """A time before the last write of the Lease that succeeded."""

    async def acquire(self) -> None:
        """Return when this process is the active operator."""
        log.info("waiting to be the active operator", lease=str(self._key), identity=self._identity)
        while True:
            before = self._seconds()
            try:
                if await self._try():
                    if self._seconds() - before >= RENEW_WITHIN_SECONDS:
                        continue  # the answer took so long that the Lease may have expired again
                    self._renewed = before
                    log.info("active", lease=str(self._key), identity=self._identity)
                    return
            except (ClusterUnavailable, ClusterRefused) as error:
                log.warning("cannot read or write the lease and will retry", error=str(error))
                # The cluster may have new authorities. An active operator ends instead, because its watches need them.
                with contextlib.suppress(BadSetting):  # its files may be incomplete while somebody replaces them
                    await self._cluster.connect()
            await asyncio.sleep(POLL_SECONDS)

    async def keep(self) -> None:
        """Renew the Lease. Return if that fails for too long: this process must then stop at once."""
        while True:
            is_late = self._seconds() - self._renewed >= RENEW_EVERY_SECONDS
            await asyncio.sleep(RENEW_AGAIN_SECONDS if is_late else RENEW_EVERY_SECONDS)
            before = self._seconds()
            try:
                async with asyncio.timeout(max(0.1, self._renewed + RENEW_WITHIN_SECONDS - before)):
                    if not await self._renew():
                        log.error("another operator is active, so this one stops", lease=str(self._key))
                        return
                self._renewed = before
            except (ClusterUnavailable, ClusterRefused, TimeoutError) as error:
                if self._seconds() - self._renewed >= RENEW_WITHIN_SECONDS - 1:
                    said = str(error) or "no answer"
                    log.warning("lease not renewed in time, so this operator stops", error=said)
                    return
                log.warning("cannot renew the lease and will retry", error=str(error) or "no answer")

    async def release(self) -> None:
        """Release the Lease, so that another replica takes over immediately."""
        lease = self._lease
        if lease is None or lease["spec"].get("holderIdentity") != self._identity:
            return
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._cluster.replace(self._key, lease)
        except (ClusterUnavailable, ClusterRefused) as error:
            log.info("cannot release the lease, which expires by itself", error=str(error))

    async def _renew(self) -> bool:
        """Renew the Lease with one call, which fails if another process wrote the Lease."""
        if self._lease is not None:
            try:
                self._lease = await self._write(self._lease)
            except Conflict:
                self._lease = None
            else:
                return True
        return await self._try()

    async def _try(self) -> bool:
        lease = await self._cluster.get(self._key)
        if lease is not None and not self._is_free(lease):
            return False
        try:
            self._lease = await self._write(lease)
        except Conflict:
            return False  # another replica was faster
        return True

    def _is_free(self, lease: Body) -> bool:
        spec: dict[str, Any] = lease.get("spec") or {}
        if spec.get("holderIdentity") in {self._identity, "", None}:
            return True
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(version, self._seconds())
            return False
        return self._seconds() - self._seen.at >= float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)

    async def _write(self, lease: Body | None) -> Body:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = {"holderIdentity": self._identity, "leaseDurationSeconds": int(DURATION_SECONDS), "renewTime": now}
        if lease is None:
            metadata = {"namespace": self._key.namespace, "name": self._key.name}
            spec = mine | {"acquireTime": now, "leaseTransitions": 0}
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}
            return await self._cluster.create(LEASE, body)
        before: dict[str, Any] = lease.get("spec") or {}
        changed = before.get("holderIdentity") != self._identity
        if changed:
            mine |= {"acquireTime": now, "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1}
        return await self._cluster.replace(self._key, lease | {"spec": before | mine})
