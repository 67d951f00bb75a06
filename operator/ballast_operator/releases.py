"""Which release of the chart reconciles a resource. Its status names the release; other releases write nothing.

A release is named by its Lease, as `NAMESPACE/NAME`. A resource whose release is gone can be claimed by another one.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from ballast_log import Log
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused
from ballast_operator.kinds import LEASE, Key

log = Log(__name__)

GONE_SECONDS = 900.0
"""A release whose Lease was not renewed for this time is gone. It is far longer than an upgrade takes."""
AGAIN_SECONDS = 60.0
"""Interval of reading the Lease of another release."""


class Releases:
    """This release, and what is known about others."""

    def __init__(self, cluster: Cluster, own: str, *, former: str = "") -> None:
        """Prepare for the release with the name `own`. An older version of it may have written the name `former`."""
        self.own = own
        self._cluster = cluster
        self._former = former
        self._known: dict[str, tuple[float, bool]] = {}

    async def may_claim(self, holder: str) -> bool:
        """Return whether this release may claim a resource that `holder` had. An empty name is no release."""
        if holder in {"", self._former}:
            return True
        at, is_gone = self._known.get(holder, (-AGAIN_SECONDS, False))
        if time.monotonic() - at >= AGAIN_SECONDS:
            is_gone = await self._is_gone(holder)
            self._known[holder] = time.monotonic(), is_gone
        return is_gone

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
        return (datetime.now(UTC) - datetime.fromisoformat(renewed)).total_seconds() > GONE_SECONDS

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
