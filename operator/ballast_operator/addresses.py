"""The address of each Redis, read from Secrets.

Resources that name the same Secret share one read. The Secret is read again only if it may have changed.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Self

from ballast_operator.children.config import Redis
from ballast_operator.cluster import Cluster
from ballast_operator.kinds import SECRET, Key
from ballast_operator.named_secrets import is_allowed


@dataclass(frozen=True, slots=True)
class Address:
    """URL, password and authorities of a Redis. Never log an address: the URL may hold a password, too."""

    url: str
    password: str | None
    ca: str | None = None
    """Certificates of authorities that are trusted besides those of the system."""

    def __repr__(self) -> str:
        return "Address(...)"

    @classmethod
    def of(cls, data: Mapping[str, str], redis: Redis) -> Self | None:
        """Read the address from the base64 data of a Secret; None if the URL is missing."""
        if redis.url_key not in data:
            return None
        password = _text(data, redis.password_key).rstrip("\r\n") if redis.password_key in data else None
        ca = _text(data, redis.ca_key) if redis.ca_key in data else None
        return cls(_text(data, redis.url_key).strip(), password or None, ca)


def _text(data: Mapping[str, str], key: str | None) -> str:
    return base64.b64decode(data[key or ""]).decode(errors="replace")


class Addresses:
    """The Secrets as they were last read. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, *, least_seconds: float, only_allowed: bool) -> None:
        """Prepare an empty store. A Secret is read at most once in `least_seconds`.

        With `only_allowed`, a Secret that resources may not name counts as missing.
        """
        self._cluster = cluster
        self._only_allowed = only_allowed
        self._least_seconds = least_seconds
        self.secrets: dict[Key, tuple[float, Mapping[str, str]]] = {}
        """The time of the last read of each Secret, and its data."""
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, namespace: str, redis: Redis, *, may_be_outdated: bool) -> Address | None:
        """Return the address in a Secret; None if the Secret or its URL is missing.

        Reads the Secret again if the address was missing or `may_be_outdated`.

        Raises:
            ClusterUnavailable, ClusterRefused: the Secret cannot be read.
        """
        key = Key(SECRET, namespace, redis.secret_name)
        async with self._locks[key]:
            known = self.secrets.get(key)
            found = Address.of(known[1], redis) if known is not None else None
            is_old = known is None or time.monotonic() - known[0] >= self._least_seconds
            if is_old and (found is None or may_be_outdated):
                body = await self._cluster.get(key)
                is_readable = body is not None and (not self._only_allowed or is_allowed(body))
                data: Mapping[str, str] = ((body or {}).get("data") or {}) if is_readable else {}
                self.secrets[key] = time.monotonic(), data
                found = Address.of(data, redis)
            return found

    def forget(self, kept: Container[str]) -> None:
        """Forget the Secrets of all other namespaces than those that are kept."""
        for key in [key for key in self.secrets if key.namespace not in kept]:
            del self.secrets[key], self._locks[key]
