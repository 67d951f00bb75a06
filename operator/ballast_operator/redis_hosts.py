"""The hosts to which the operator connects.

A Secret of a resource names the host, and the operator connects from its own pod, which reaches more than the account
that created the resource. So the operator connects only by `redis` and `rediss`, and only to hosts that its setting
names, and to Services with a selector in the namespace of the resource. The address of the operator's own Secret is not
checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ballast_operator.cluster import Cluster
from ballast_operator.kinds import SERVICE, Key

CLUSTER_DOMAIN = "cluster.local"
OPTIONS = frozenset({"db", "ssl_cert_reqs", "ssl_check_hostname"})
"""Parameters that a URL may have. Others name files of the operator, or change how it connects."""
_HOST = re.compile(r"[a-z0-9._:-]+")
_SERVICE = re.compile(rf"([a-z0-9-]+)\.([a-z0-9-]+)(\.svc(\.{re.escape(CLUSTER_DOMAIN)})?)?\.?")


class RedisHosts:
    """Decides to which hosts the operator connects."""

    def __init__(self, cluster: Cluster, patterns: Sequence[str]) -> None:
        """`patterns` are names of hosts, in which `*` stands for any characters."""
        self._cluster = cluster
        self._patterns = tuple(pattern.lower() for pattern in patterns)

    async def admits(self, namespace: str, url: str) -> bool:
        """Return whether the operator may connect to the URL in a Secret of this namespace.

        Raises:
            ClusterUnavailable, ClusterRefused: a Service cannot be read.
        """
        host = host_of(url)
        if host is None:
            return False
        if any(fnmatchcase(host, pattern) for pattern in self._patterns):
            return True
        match = _SERVICE.fullmatch(host)
        if match is None or match[2] != namespace:
            return False
        service = await self._cluster.find(Key(SERVICE, namespace, match[1]))
        spec = (service or {}).get("spec") or {}
        return spec.get("type") != "ExternalName" and bool(spec.get("selector"))


def host_of(url: str) -> str | None:
    """Return the host of a Redis URL, or None if the operator does not use such a URL."""
    try:
        parts: SplitResult = urlsplit(url)
        options = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
        host = (parts.hostname or "").lower()
        port = parts.port  # raises ValueError
    except ValueError:
        return None
    is_redis = parts.scheme in {"redis", "rediss"} and url.startswith(f"{parts.scheme}://") and port != 0
    return host if is_redis and options <= OPTIONS and _HOST.fullmatch(host) else None
