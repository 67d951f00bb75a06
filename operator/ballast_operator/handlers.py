"""The handlers that Kopf calls. Each event only updates a cache and adds a resource to the work queue."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from ballast_api.names import MANAGED_BY_LABEL, OPERATOR
from ballast_operator.cache import Cache
from ballast_operator.errors import BadSetting
from ballast_operator.kinds import CRD, POD, Body, Key, Kind
from ballast_operator.resource_type import ResourceType

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


@dataclass(frozen=True, slots=True)
class Listener:
    """The functions that the handlers call."""

    add: Callable[[Key, float], None]
    """Reconcile a resource after some seconds."""
    kinds_changed: Callable[[], None]
    """A CRD of an optional kind was added, changed or deleted."""


def watched(types: Sequence[ResourceType[Any]]) -> tuple[Kind, ...]:
    """Return every kind to watch: the resources, their children and pods."""
    kinds = [kind for found in types for kind in (found.kind, *found.children, POD)]
    return tuple(dict.fromkeys(kinds))


def registry(
    types: Sequence[ResourceType[Any]], caches: Sequence[Cache], listener: Listener, *, sees_kinds: bool
) -> kopf.OperatorRegistry:
    """Return the handlers that fill `caches` and call `listener`. CRDs are watched if `sees_kinds`."""
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

    groups = {kind.group for kind in watched(types) if kind.is_optional}

    async def see_kinds(spec: kopf.Spec, **_: Any) -> None:
        if spec.get("group") in groups:
            listener.kinds_changed()

    if sees_kinds:
        kopf.on.event(CRD.group, CRD.version, CRD.plural, id="see-kinds", registry=found)(see_kinds)

    for kind in watched(types):
        _register(found, kind, caches, listener)
    return found


def settings(types: Sequence[ResourceType[Any]], *, sees_kinds: bool) -> kopf.OperatorSettings:
    """Return settings for Kopf as a source of events only: it writes no annotations, finalizers or events."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.queueing.idle_timeout = 1.0
    found.scanning.disabled = not sees_kinds  # it watches CRDs and namespaces, which needs a ClusterRole
    found.watching.chunk_size = PAGE
    found.persistence.diffbase_storage = _NothingToCompare()
    found.persistence.finalizer = NO_FINALIZER
    resources = {each.kind for each in types}
    for kind in watched(types):
        if kind not in resources:
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


def _register(found: kopf.OperatorRegistry, kind: Kind, caches: Sequence[Cache], listener: Listener) -> None:
    changed: dict[str, tuple[Key, ...]] = {}
    """Resources to reconcile, by the uid of the object that changed."""

    # The index is Kopf's barrier: it handles no event before it has listed and indexed all kinds once.
    @kopf.index(kind.group, kind.version, kind.plural, id=f"see-{kind.plural}", registry=found)
    async def see(body: kopf.Body, **_: Any) -> None:
        for cache in caches:
            keys = cache.put(kind, dict(body))
            if keys:
                uid = body["metadata"]["uid"]
                changed[uid] = (*changed.get(uid, ()), *keys)

    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"hear-{kind.plural}", registry=found)
    async def hear(event: kopf.RawEvent, **_: Any) -> None:
        body: Body = dict(event["object"])
        # An object that the cache already holds, such as the answer to the operator's own write, is not a change.
        keys = list(changed.pop(body["metadata"]["uid"], ()))
        if event["type"] == "DELETED":
            keys += [key for cache in caches if (key := cache.drop(kind, body)) is not None]
        for key in dict.fromkeys(keys):
            listener.add(key, 0.0 if key.kind == kind else SETTLE_SECONDS)
