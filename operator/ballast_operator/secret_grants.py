"""The Secrets that resources name, and whether they carry the label. Only their metadata is read."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable

from ballast_api.conditions import ConditionReason
from ballast_api.names import ALLOW_LABEL
from ballast_operator.cluster import Cluster
from ballast_operator.conditions.given import ConditionValue, on_hold
from ballast_operator.kinds import SECRET, Key
from ballast_operator.named_secrets import is_allowed

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""Any other name exists nowhere, and would be a part of a path of the API server."""


class SecretGrants:
    """The labels of the Secrets that resources name. It belongs to one event loop."""

    def __init__(self, cluster: Cluster, *, is_required: bool, least_seconds: float) -> None:
        """Prepare an empty store. A Secret that is not allowed is read at most once in `least_seconds`."""
        self.is_required = is_required
        self.least_seconds = least_seconds
        self._cluster = cluster
        self._known: dict[Key, tuple[float, bool]] = {}
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def refusal(self, namespace: str, names: Iterable[str]) -> ConditionValue | None:
        """Return why a resource may not name these Secrets, as the value of `Degraded`; None if it may.

        Raises:
            ClusterUnavailable, ClusterRefused: a Secret cannot be read.
        """
        for name in names if self.is_required else ():
            if _NAME.fullmatch(name) is None or not await self._is_allowed(Key(SECRET, namespace, name)):
                # A missing Secret reads the same: the account may lack the right to learn which Secrets exist.
                message = (
                    f'Secret {name} does not exist or lacks the label {ALLOW_LABEL}: "true", so no resource may name '
                    f"it. Create it, and run kubectl label secret {name} {ALLOW_LABEL}=true"
                )
                return on_hold(ConditionReason.SECRET_NOT_ALLOWED, message)
        return None

    async def audit(self) -> bool:
        """Read the allowed Secrets again, and forget the others. Return whether a Secret is not allowed any more."""
        changed = False
        for key, (_, was_allowed) in list(self._known.items()):
            self._known.pop(key, None)
            changed |= was_allowed and not await self._is_allowed(key)
        return changed

    def forget(self, namespaces: Iterable[str]) -> None:
        """Forget the Secrets of all other namespaces, which no resource names."""
        kept = frozenset(namespaces)
        for key in self._known.keys() | self._locks.keys():
            if key.namespace not in kept:  # a check in progress may have only one of both
                self._known.pop(key, None)
                self._locks.pop(key, None)

    async def _is_allowed(self, key: Key) -> bool:
        async with self._locks[key]:
            at, allowed = self._known.get(key, (-math.inf, False))
            if not allowed and time.monotonic() - at >= self.least_seconds:
                body = await self._cluster.metadata(key)
                allowed = body is not None and is_allowed(body)
                self._known[key] = time.monotonic(), allowed
            return allowed
