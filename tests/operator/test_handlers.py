"""The handlers that Kopf calls: an event reconciles a resource once, and only if it shows something new."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
from kopf._cogs.structs.finalizers import is_deletion_blocked
from kopf._core.reactor import processing

from ballast_api.names import child_labels
from ballast_operator import handlers
from ballast_operator.cache import Cache
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, POD, Key


def test_an_event_that_shows_nothing_new_reconciles_no_resource() -> None:
    """It may repeat the answer to a write of the operator, or the last event of a watch."""
    cache, added = Cache(), list[Key]()
    registry = handlers.registry(
        cache, add=lambda key, _: added.append(key), kinds_changed=lambda: None, sees_kinds=False
    )
    found: dict[str, Any] = vars(registry)
    called = [
        next(each.fn for each in found[part].get_all_handlers() if each.id == name)
        for part, name in (("_indexing", "see-pods"), ("_watching", "hear-pods"))
    ]

    def event(kind: str, version: int) -> list[Key]:
        metadata = {"name": "p", "namespace": "ns", "uid": "p", "resourceVersion": str(version)}
        body = {"metadata": metadata | {"labels": child_labels("llm")}, "spec": {}}

        async def call() -> None:
            for each in called:
                await each(body=body, event={"type": kind, "object": body})

        added.clear()
        asyncio.run(call())
        return list(added)

    owner = Key(INFERENCE_DEPLOYMENT, "ns", "llm")
    assert [event("ADDED", 1), event("MODIFIED", 1), event("MODIFIED", 2)] == [[owner], [], [owner]]
    assert [event("DELETED", 3), cache.uids(POD)] == [[owner], {}]


def test_a_finalizer_of_another_operator_that_uses_kopf_stays() -> None:
    """Kopf removes the finalizer of its settings from each object, and all operators have the same one by default."""
    others = kopf.OperatorSettings().persistence.finalizer
    own = handlers.settings(sees_kinds=False).persistence.finalizer

    assert "finalizer" in processing.process_resource_causes.__code__.co_names
    assert not is_deletion_blocked(kopf.Body({"metadata": {"finalizers": [others]}}), own)
    assert " " in own, "the API server refuses it, so no object has it"
