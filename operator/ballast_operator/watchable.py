"""The namespaces that can be watched, for an operator that watches some namespaces only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from ballast_log import Log
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, OperatorError
from ballast_operator.kinds import INFERENCE_DEPLOYMENT

log = Log(__name__)

RETRY_SECONDS = 2.0


class Watchable:
    """Which of the wanted namespaces can be watched."""

    def __init__(self, cluster: Cluster, namespaces: Sequence[str]) -> None:
        """Without `namespaces`, all are watched, and none is left out."""
        self.unreadable: tuple[str, ...] = ()
        """Namespaces that the operator must watch, and whose resources it may not list."""
        self._cluster = cluster
        self._namespaces = namespaces

    @property
    def problem(self) -> str:
        """Return why namespaces are not watched; empty if none is left out."""
        if not self.unreadable:
            return ""
        return (
            f"may not list the resources of namespace {', '.join(self.unreadable)}, which was deleted or lacks the "
            "Role of the operator; the next audit after both exist starts the operator again"
        )

    async def wait(self) -> None:
        """Wait until the kind of the resources exists and a namespace can be watched."""
        if self._namespaces:
            await self._wait_for_kind()
            await self._wait_for_namespaces()

    async def audit(self) -> None:
        """Raise `OperatorError` if a namespace that was left out can be watched now, which needs a new start."""
        if await self._find_unreadable(self.unreadable) != self.unreadable:
            raise OperatorError("a namespace that was left out can be watched now, so the process ends")

    async def _wait_for_kind(self) -> None:
        """Wait until the kind exists: without a watch of CRDs, Kopf finds kinds at its start only."""
        while True:
            with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                if INFERENCE_DEPLOYMENT.plural in await self._cluster.plurals(INFERENCE_DEPLOYMENT):
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _wait_for_namespaces(self) -> None:
        """Wait until the resources of a namespace can be listed, and leave out the namespaces whose resources cannot.

        Kopf handles no event before it has listed all namespaces. The Role in a namespace goes with the namespace.
        """
        while True:
            with contextlib.suppress(ClusterUnavailable, ClusterRefused):
                before, self.unreadable = self.unreadable, await self._find_unreadable(self._namespaces)
                readable = tuple(each for each in self._namespaces if each not in self.unreadable)
                if self.unreadable and self.unreadable != before:
                    log.error("namespaces are not watched", because=self.problem)
                if readable:
                    self._cluster.namespaces = readable
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _find_unreadable(self, namespaces: Sequence[str]) -> tuple[str, ...]:
        return tuple([each for each in namespaces if not await self._cluster.may_list(INFERENCE_DEPLOYMENT, each)])
