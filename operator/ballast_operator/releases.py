"""Which release of the chart reconciles a resource. Its status names the release; other releases write nothing.

A release is named by its Lease, as `NAMESPACE/NAME`. A resource whose release is gone can be claimed by another one.
After an outage of the API server or a sleep of the cluster, the Lease of a live release is old until it is renewed, and
clocks may differ. So an old Lease must also stay unchanged for a time that this process measures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from ballast_log import Log
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused
from ballast_operator.kinds import LEASE, Key

log = Log(__name__)

GONE_SECONDS = 900.0
"""A release whose Lease was not renewed for this time is gone. It is far longer than an upgrade takes."""
UNCHANGED_SECONDS = 300.0
"""Time for which an old Lease must stay as it is. The kubelet restarts a container that failed within this time."""
LEASE_AGAIN_SECONDS = 60.0
"""Interval of reading the Lease of another release."""


class Releases:
    """This release, and what is known about others."""

    def __init__(self, cluster: Cluster, own: str, *, seconds: Callable[[], float] = time.monotonic) -> None:
        """Prepare for the release with the name `own`. `seconds` returns the time of a monotonic clock."""
        self.own = own
        self._cluster = cluster
        self._seconds = seconds
        self._known: dict[str, tuple[float, bool]] = {}
        self._old: dict[str, tuple[str, float]] = {}
        """By release: when its Lease was renewed, and when this process first found that time to be old."""

    async def may_claim(self, holder: str) -> bool:
        """Return whether this release may claim a resource that `holder` had. An empty name is no release."""
        if not holder:
            return True
        at, is_gone = self._known.get(holder, (-math.inf, False))
        if self._seconds() - at >= LEASE_AGAIN_SECONDS:
            is_gone = await self._is_gone(holder)
            self._known[holder] = self._seconds(), is_gone
        return is_gone

    def is_former(self, holder: str) -> bool:
        """Return whether `holder` is no release, or one that is known to be gone."""
        return not holder or self._known.get(holder, (0.0, False))[1]

    async def _is_gone(self, holder: str) -> bool:
        namespace, _, name = holder.partition("/")
        if not name:
            self._warn(holder, "this is no NAMESPACE/NAME of a Lease")
            return False  # a release that may exist is not gone
        try:
            lease = await self._cluster.get(Key(LEASE, namespace, name))
        except ClusterRefused as error:
            self._warn(holder, f"this release may not read the Lease {holder}: {error}")
            return False
        renewed = ((lease or {}).get("spec") or {}).get("renewTime")
        if renewed is None:
            return True
        if (datetime.now(UTC) - datetime.fromisoformat(renewed)).total_seconds() <= GONE_SECONDS:
            return False
        if self._old.get(holder, ("", 0.0))[0] != renewed:
            self._old[holder] = renewed, self._seconds()
        return self._seconds() - self._old[holder][1] >= UNCHANGED_SECONDS

    def _warn(self, holder: str, because: str) -> None:
        """Log once for each release why it is not known whether it is gone."""
        if holder not in self._known:
            log.warning(
                "cannot know whether another release is gone, so its resources are not claimed",
                release=holder,
                because=because,
                remedy="if it is gone, set status.operator of its resources to null, as in "
                "docs/how-to/install-on-kubernetes.md, or permit this operator to get the Lease",
            )
