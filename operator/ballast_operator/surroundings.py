"""What is the same for every resource, kept up to date: optional kinds, and the operator's own Redis Secret."""

from __future__ import annotations

from ballast_operator.cluster import Cluster
from ballast_operator.kinds import SECRET, WATCHED, Key
from ballast_operator.plan import Surroundings
from ballast_operator.settings import OperatorSettings


async def look(cluster: Cluster, settings: OperatorSettings, kinds: frozenset[str]) -> Surroundings:
    """Read the operator's own Secret; `kinds` is what the last audit found."""
    key = Key(settings.namespace, settings.redis_secret) if settings.redis_secret else None
    body = await cluster.get(SECRET, key) if key else None
    redis = None if body is None else dict(body.get("data") or {})
    runbooks = settings.runbook_base_url or None
    return Surroundings(image=settings.worker_image, kinds=kinds, redis=redis, redis_key=key, runbooks=runbooks)


async def optional_kinds(cluster: Cluster) -> frozenset[str]:
    """Which of the optional kinds this cluster has; one call for each of their groups."""
    optional = [kind for kind in WATCHED if kind.is_optional]
    groups = {(kind.group, kind.version): kind for kind in optional}
    plurals = {group: await cluster.plurals(kind) for group, kind in groups.items()}
    return frozenset(kind.name for kind in optional if kind.plural in plurals[kind.group, kind.version])
