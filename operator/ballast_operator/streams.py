"""Makes Kopf's watches survive the deletion of the kind that they watch.

A watch may get a 404 before Kopf learns that the CRD was deleted. Kopf treats that as fatal and ends. It has no setting
and no public name for this, so this module replaces one private function of Kopf. Starting Kopf again is not enough:
when Kopf ends, it cancels every task that began after it, those of the operator included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kopf._cogs.clients import watching
from kopf._cogs.clients.errors import APINotFoundError

from ballast_log import Log

log = Log(__name__)

RETRY_SECONDS = 3.0
"""Delay before a watch without a kind is tried again. Kopf ends the watch when it learns that the CRD is gone."""

_continuous_watch = watching.continuous_watch


def survive_deleted_kinds(relisted: Callable[[], None]) -> None:
    """Make every watch of this process that gets a 404 wait and try again.

    `relisted` is called then: the next list does not show the objects that were deleted in between.
    """

    async def patient_watch(*, resource: Any, **more: Any) -> AsyncIterator[Any]:
        is_gone = False
        try:
            async for event in _continuous_watch(resource=resource, **more):
                yield event
        except APINotFoundError:
            is_gone = True
        if is_gone:
            log.info("the kind does not exist, so its watch waits", kind=str(resource))
            yield watching.Bookmark.LISTED  # Kopf waits for the first list of each kind
            await asyncio.sleep(RETRY_SECONDS)
            relisted()

    watching.continuous_watch = patient_watch
