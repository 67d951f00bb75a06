"""What Kopf calls. Every event only says whose turn it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from ballast_api.names import MANAGED_BY_LABEL, OPERATOR
from ballast_operator.cache import Cache, owner_of
from ballast_operator.cluster import log_in
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, WATCHED, Body, Key, Kind, key_of

SETTLE_SECONDS = 0.1
"""Changes of children come in bursts: one turn serves them all."""
LOGIN_AGAIN_SECONDS = 2.0
CHILDREN_SELECTOR = f"{MANAGED_BY_LABEL}={OPERATOR}"


def registry(cache: Cache, add: Callable[[Key, float], None], relisted: Callable[[], None]) -> kopf.OperatorRegistry:
    """Handlers that fill `cache` and `add` turns; `relisted` is called where a stream was listed anew."""
    found = kopf.OperatorRegistry()

    @kopf.on.login(id="log-in", registry=found, backoff=LOGIN_AGAIN_SECONDS)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return log_in()

    for kind in WATCHED:
        _register(found, kind, cache, add, relisted)
    return found


def settings() -> kopf.OperatorSettings:
    """Kopf as a source of events and nothing else: it writes nothing, neither annotations nor finalizers nor events."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.queueing.idle_timeout = 1.0
    found.persistence.diffbase_storage = _NothingToCompare()
    for kind in WATCHED:
        if kind != INFERENCE_DEPLOYMENT:
            found.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILDREN_SELECTOR
    return found


class _NothingToCompare(kopf.DiffBaseStorage):
    """Spares each event a deep copy of its object: Kopf would compare it with the one before, for handlers of changes.

    That was half of the operator's CPU.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        del body
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is written to objects."""


def _register(
    found: kopf.OperatorRegistry,
    kind: Kind,
    cache: Cache,
    add: Callable[[Key, float], None],
    relisted: Callable[[], None],
) -> None:
    news: set[str] = set()

    # The index is Kopf's barrier: no event is handled before all kinds were listed once and passed through here.
    @kopf.index(kind.group, kind.version, kind.plural, id=f"see-{kind.plural}", registry=found)
    async def see(body: kopf.Body, **_: Any) -> None:
        if cache.put(kind, dict(body)) is not None:
            news.add(body["metadata"]["uid"])

    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"hear-{kind.plural}", registry=found)
    async def hear(event: kopf.RawEvent, **_: Any) -> None:
        body: Body = dict(event["object"])
        uid = body["metadata"]["uid"]
        if event["type"] is None:
            relisted()
        if event["type"] == "DELETED":
            key = cache.drop(kind, body)
        elif uid in news:  # what came back of our own writes is none
            key = key_of(body) if kind == INFERENCE_DEPLOYMENT else owner_of(body)
        else:
            key = None
        news.discard(uid)
        if key is not None:
            add(key, 0.0 if kind == INFERENCE_DEPLOYMENT else SETTLE_SECONDS)
