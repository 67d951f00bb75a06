"""The kinds and namespaces that can be watched, for an operator that watches some namespaces only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from ballast_log import Log
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable, OperatorError
from ballast_operator.kinds import Kind

log = Log(__name__)

RETRY_SECONDS = 2.0


class Watchable:
    """What of the resources' kinds and of the wanted namespaces can be watched."""

    def __init__(self, cluster: Cluster, kinds: Sequence[Kind], namespaces: Sequence[str]) -> None:
        """Prepare for the kinds of resources. Without `namespaces`, all are watched, and none is left out."""
        self.unreadable: tuple[str, ...] = ()
        """Namespaces that the operator must watch, and whose resources it may not list."""
        self._cluster = cluster
        self._kinds = kinds
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
        """Wait until the kinds exist and a namespace can be watched."""
        if self._namespaces:
            await self._wait_for_kinds()
            await self._wait_for_namespaces()

    async def audit(self) -> None:
        """Raise `OperatorError` if a namespace that was left out can be watched now, which needs a new start."""
        if await self._find_unreadable(self.unreadable) != self.unreadable:
            raise OperatorError("a namespace that was left out can be watched now, so the process ends")

    async def _wait_for_kinds(self) -> None:
        """Wait until the resources' kinds exist: without a watch of CRDs, Kopf finds the kinds at its start only."""
        for kind in self._kinds:
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
                before, self.unreadable = self.unreadable, await self._find_unreadable(self._namespaces)
                readable = tuple(each for each in self._namespaces if each not in self.unreadable)
                if self.unreadable and self.unreadable != before:
                    log.error("namespaces are not watched", because=self.problem)
                if readable:
                    self._cluster.namespaces = readable
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _find_unreadable(self, namespaces: Sequence[str]) -> tuple[str, ...]:
        found = {each for each in namespaces for kind in self._kinds if not await self._cluster.may_list(kind, each)}
        return tuple([each for each in namespaces if each in found])
