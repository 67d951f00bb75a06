"""The handlers that Kopf calls. Each event only updates a cache and adds a resource to the work queue."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from ballast_api.names import MANAGED_BY_LABEL, OPERATOR
from ballast_operator.cache import Cache
from ballast_operator.errors import BadSetting
from ballast_operator.kinds import CRD, INFERENCE_DEPLOYMENT, WATCHED, Body, Key, Kind

SETTLE_SECONDS = 0.1
"""Children change in bursts. The resource is reconciled once for all changes of a burst."""
LOGIN_AGAIN_SECONDS = 2.0
NEVER = timedelta(days=36500)
PAGE = 20
"""Objects that a list requests at the same time. The API server admits objects of 1.5 MiB, and pages of several kinds
are in memory at the same time."""
NO_FINALIZER = "no finalizer"
"""A name that the API server refuses. Kopf removes its finalizer from each object, and all operators that use Kopf
have the same one by default."""
CHILDREN_SELECTOR = f"{MANAGED_BY_LABEL}={OPERATOR}"


def registry(
    cache: Cache, *, add: Callable[[Key, float], None], kinds_changed: Callable[[], None], sees_kinds: bool
) -> kopf.OperatorRegistry:
    """Return the handlers that fill `cache`. They call `add(key, seconds)` to reconcile a resource after some seconds.

    If `sees_kinds`, they watch CRDs, and call `kinds_changed` if one of an optional kind was added, changed or deleted.
    """
    found = kopf.OperatorRegistry()
    refused: kopf.ConnectionInfo | None = None

    @kopf.on.login(id="log-in", registry=found, backoff=LOGIN_AGAIN_SECONDS)
    async def log_in(*, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
        nonlocal refused
        login = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
        if login is None:
            raise BadSetting(
                "Found no service account and no usable kubeconfig. Run the operator in a pod, or set KUBECONFIG"
            )
        if login == refused:
            await asyncio.sleep(LOGIN_AGAIN_SECONDS)
        refused = login  # once Kopf asks again
        # Kopf ends if a login equals one that was refused, and an API server may refuse a valid token for a moment.
        return dataclasses.replace(login, expiration=datetime.now(UTC) + NEVER)

    groups = {kind.group for kind in WATCHED if kind.is_optional}

    async def see_kinds(spec: kopf.Spec, **_: Any) -> None:
        if spec.get("group") in groups:
            kinds_changed()

    if sees_kinds:
        kopf.on.event(CRD.group, CRD.version, CRD.plural, id="see-kinds", registry=found)(see_kinds)

    for kind in WATCHED:
        _register(found, kind, cache, add)
    return found


def settings(*, sees_kinds: bool) -> kopf.OperatorSettings:
    """Return settings for Kopf as a source of events only: it writes no annotations, finalizers or events."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.queueing.idle_timeout = 1.0
    found.scanning.disabled = not sees_kinds  # it watches CRDs and namespaces, which needs a ClusterRole
    found.watching.chunk_size = PAGE
    found.persistence.diffbase_storage = _NothingToCompare()
    found.persistence.finalizer = NO_FINALIZER
    for kind in WATCHED:
        if kind != INFERENCE_DEPLOYMENT:
            found.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILDREN_SELECTOR
    return found


class _NothingToCompare(kopf.DiffBaseStorage):
    """Saves a deep copy of each object, which Kopf would compare with the next version for its change handlers.

    These copies took half of the operator's CPU time.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        del body
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing to objects."""


def _register(found: kopf.OperatorRegistry, kind: Kind, cache: Cache, add: Callable[[Key, float], None]) -> None:
    changed: dict[str, tuple[Key, ...]] = {}
    """Resources to reconcile, by the uid of the object that changed."""

    # The index is Kopf's barrier: it handles no event before it has listed and indexed all kinds once.
    @kopf.index(kind.group, kind.version, kind.plural, id=f"see-{kind.plural}", registry=found)
    async def see(body: kopf.Body, **_: Any) -> None:
        keys = cache.put(kind, dict(body))
        if keys:
            uid = body["metadata"]["uid"]
            changed[uid] = (*changed.get(uid, ()), *keys)

    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"hear-{kind.plural}", registry=found)
    async def hear(event: kopf.RawEvent, **_: Any) -> None:
        body: Body = dict(event["object"])
        # An object that the cache already holds, such as the answer to the operator's own write, is not a change.
        keys = list(changed.pop(body["metadata"]["uid"], ()))
        if event["type"] == "DELETED" and (dropped := cache.drop(kind, body)) is not None:
            keys.append(dropped)
        for key in dict.fromkeys(keys):
            add(key, 0.0 if key.kind == kind else SETTLE_SECONDS)
