"""Where each Redis is, by the Secret that leads there.

A Secret is read once for all resources that name it, and again only where it may have changed.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ballast_operator.children.config import Redis
from ballast_operator.cluster import Cluster
from ballast_operator.kinds import SECRET, Key


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis is, and how it is opened. Holds the password: never logged."""

    url: str
    password: str | None

    def __repr__(self) -> str:
        return "Address(...)"

    @classmethod
    def of(cls, data: Mapping[str, str], redis: Redis) -> Self | None:
        """Take it from the data of a Secret as the API gives them; None where the URL is not there."""
        if redis.url_key not in data:
            return None
        password = _text(data, redis.password_key).rstrip("\r\n") if redis.password_key in data else None
        return cls(_text(data, redis.url_key).strip(), password or None)


def _text(data: Mapping[str, str], key: str | None) -> str:
    return base64.b64decode(data[key or ""]).decode(errors="replace")


class Addresses:
    """Secrets as they were last read. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, *, again_seconds: float) -> None:
        """`again_seconds`: how soon a Secret is read again at the earliest."""
        self._cluster = cluster
        self._again = again_seconds
        self._read: dict[Key, tuple[float, Mapping[str, str]]] = {}
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, namespace: str, redis: Redis, *, is_doubted: bool) -> Address | None:
        """The address in a Secret, read anew where there was none or it is doubted; None where it is not there.

        Raises:
            ClusterUnavailable, ClusterRefused: it could not be read.
        """
        key = Key(namespace, redis.secret_name)
        async with self._locks[key]:
            known = self._read.get(key)
            found = Address.of(known[1], redis) if known is not None else None
            is_old = known is None or time.monotonic() - known[0] >= self._again
            if is_old and (found is None or is_doubted):
                body = await self._cluster.get(SECRET, key)
                data = (body or {}).get("data") or {}
                self._read[key] = time.monotonic(), data
                found = Address.of(data, redis)
            return found
