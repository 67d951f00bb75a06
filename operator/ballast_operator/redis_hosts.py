"""The hosts to which the operator connects.

A Secret of a resource names the host, and the operator connects from its own pod, which reaches more than the account
that created the resource. So the operator connects only to hosts that its setting names, and to Services with a
selector in the namespace of the resource. The address of the operator's own Secret is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from ballast_operator.cluster import Cluster
from ballast_operator.kinds import SERVICE, Key

CLUSTER_DOMAIN = "cluster.local"
_HOST = re.compile(r"[a-z0-9._:-]+")
# A shorter name, or one with a final dot, may be that of a host outside of the cluster, such as `redis.dev.`
_SERVICE = re.compile(rf"([a-z0-9-]+)\.([a-z0-9-]+)\.svc(\.{re.escape(CLUSTER_DOMAIN)}\.?)?")


class RedisHosts:
    """Decides to which hosts the operator connects."""

    def __init__(self, cluster: Cluster, patterns: Sequence[str]) -> None:
        """`patterns` are names of hosts, in which `*` stands for any characters."""
        self._cluster = cluster
        self._patterns = tuple(pattern.lower() for pattern in patterns)

    async def admits(self, namespace: str, host: str) -> bool:
        """Return whether the operator may connect to a host that a Secret of this namespace names.

        Raises:
            ClusterUnavailable, ClusterRefused: the Service cannot be read.
        """
        host = host.lower()
        if _HOST.fullmatch(host) is None:
            return False
        if any(fnmatchcase(host, pattern) for pattern in self._patterns):
            return True
        match = _SERVICE.fullmatch(host)
        if match is None or match[2] != namespace:
            return False
        service = await self._cluster.find(Key(SERVICE, namespace, match[1]))
        spec = (service or {}).get("spec") or {}
        return spec.get("type") != "ExternalName" and bool(spec.get("selector"))
