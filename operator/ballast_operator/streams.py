"""Kopf's streams, made to outlive the kind that they watch.

A kind's stream may find 404 before Kopf heard that the kind's CRD was removed, or between two of its stores; Kopf takes
that for fatal and ends the operator. A kind that is not there has no objects, and may come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kopf._cogs.clients import watching  # Kopf has no public place for this
from kopf._cogs.clients.errors import APINotFoundError

from ballast_log import Log

log = Log(__name__)

GONE_SECONDS = 3.0
"""How long a stream rests whose kind is not there. Kopf ends it when it hears that the CRD is gone."""

_continuous_watch = watching.continuous_watch


def outlive_kinds(relisted: Callable[[], None]) -> None:
    """Let every stream of this process that finds its kind gone rest and try again.

    `relisted` is called then: objects that went meanwhile are in no list, so nobody else would tell of them.
    """

    async def patient_watch(*, resource: Any, **more: Any) -> AsyncIterator[Any]:
        is_gone = False
        try:
            async for event in _continuous_watch(resource=resource, **more):
                yield event
        except APINotFoundError:
            is_gone = True
        if is_gone:
            log.info("the kind is not there, its stream waits", kind=str(resource))
            yield watching.Bookmark.LISTED  # else the whole operator would wait for its first list
            await asyncio.sleep(GONE_SECONDS)
            relisted()

    watching.continuous_watch = patient_watch
