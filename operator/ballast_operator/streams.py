"""Makes Kopf's watches survive errors, and that a kind comes and goes. Shows which kinds are watched.

A watch may get a 404 before Kopf learns that the CRD was deleted, a 403 because a role lacks a verb, or an error that
passes, such as that etcd has no leader. Kopf treats each as fatal and ends. It has no setting and no public name for
this, so this module replaces a private function of Kopf. Starting Kopf again is not enough: when Kopf ends, it cancels
every task that began after it, those of the operator included.

At its start, Kopf holds the events of all objects back until it has seen each object once. For each object that it
sees, it wakes all tasks that wait for this, so a start with many objects took minutes of CPU time. This module replaces
the class that does it.

Kopf asks the API server for its kinds once after each event of a CRD. The API server may list a new kind only later,
and no event follows. So the watch of the CRDs repeats the last event of a CRD until its kind is watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import watching
from kopf._cogs.clients.errors import APIError, APINotFoundError

from ballast_log import Log
from ballast_operator.kinds import CRD, Body, Kind

log = Log(__name__)

RETRY_SECONDS = 3.0
"""Delay before a watch without a kind is tried again, and before an event of a CRD is repeated."""

_END = object()
"""Follows the last event of a watch."""

continuous_watch = watching.continuous_watch
"""Kopf's own function, which `Streams.install` replaces."""


class _Toggles(aiotoggles.ToggleSet):
    """A set of toggles that wakes those who wait for its state only if a change affects this state."""

    async def make_toggle(self, *is_on: bool, name: str | None = None) -> aiotoggles.Toggle:
        """Add a toggle."""
        toggle = aiotoggles.Toggle(*is_on, name=name, condition=self._condition)
        await self._change(lambda: self._toggles.add(toggle))
        return toggle

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        """Remove a toggle."""
        await self._change(lambda: self._toggles.discard(toggle))

    async def _change(self, change: Callable[[], None]) -> None:
        async with self._condition:
            was_on = self.is_on()
            change()
            if self.is_on() != was_on:
                self._condition.notify_all()


class Streams:
    """The watches of this process."""

    def __init__(
        self, kinds: Sequence[Kind], relisted: Callable[[], None], *, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """Prepare for the watches of `kinds`.

        `relisted` is called after each list, which does not show which objects were deleted before it, and when a watch
        ends because its kind is gone.
        """
        self._kinds = kinds
        self._relisted = relisted
        self._retry_seconds = retry_seconds
        self._watched: set[tuple[str, str]] = set()
        """Group and plural of each kind whose objects were listed and are watched."""
        self._crds: dict[tuple[str, str], Body] = {}
        """The CRDs of `kinds` that exist."""
        self._refusals: dict[tuple[str, str], str] = {}
        """Why the API server refused the last watch of a kind."""

    def install(self) -> None:
        """Make every watch of this process use this object, and their start take time in proportion to the objects."""

        def watch(*, resource: Any, **more: Any) -> AsyncIterator[Any]:
            stream = self._patient(resource, more)
            return self._repeating(stream) if resource.plural == CRD.plural else stream

        watching.continuous_watch = watch
        aiotoggles.ToggleSet = _Toggles  # type: ignore[misc]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the kinds that must be watched and are not."""
        return tuple(
            kind.name for kind in self._kinds if not kind.is_optional and (kind.group, kind.plural) not in self._watched
        )

    @property
    def unwatched(self) -> str:
        """Return which kinds that must be watched are not, and why; empty if all are."""
        keys = {kind.name: (kind.group, kind.plural) for kind in (*self._kinds, CRD)}
        refused = {name: why for name, key in keys.items() if (why := self._refusals.get(key))}
        names = [*self.missing, *(name for name in (CRD.name,) if name in refused)]
        if not names:
            return ""
        found = ", ".join(f"{name} ({refused[name]})" if name in refused else name for name in names)
        return f"not watched: {found}; a kind that does not exist is watched when its CRD is installed"

    async def _patient(self, resource: Any, more: dict[str, Any]) -> AsyncIterator[Any]:
        key, is_gone, has_failed, is_refused = (resource.group, resource.plural), False, False, False
        try:
            async for event in continuous_watch(resource=resource, **more):
                if event is watching.Bookmark.LISTED:
                    self._watched.add(key)
                    self._refusals.pop(key, None)
                    self._relisted()
                yield event
        except APINotFoundError:
            is_gone = True
            self._refusals.pop(key, None)
        except APIError as error:
            is_refused = has_failed = True
            self._refusals[key] = f"the API server answered {error.status}: {error.message or error}"
            log.warning("a watch was refused and is tried again", kind=str(resource), error=self._refusals[key])
        except (watching.WatchingError, aiohttp.ClientError, RuntimeError) as error:
            # After a 401, Kopf closes the connections of lists and watches. aiohttp may raise an error without a class.
            if type(error) is RuntimeError and str(error) != "Connection closed.":
                raise
            has_failed = True
            log.warning("a watch failed, so its objects are listed again", kind=str(resource), error=str(error))
        except (asyncio.CancelledError, GeneratorExit):
            self._relisted()
            raise
        finally:
            self._watched.discard(key)
        if is_gone:
            log.info("the kind does not exist, so its watch waits", kind=str(resource))
            yield watching.Bookmark.LISTED  # Kopf waits for the first list of each kind
            await asyncio.sleep(self._retry_seconds)
            self._relisted()
        elif has_failed:
            if is_refused and any(key == (kind.group, kind.plural) for kind in self._kinds if kind.is_optional):
                yield watching.Bookmark.LISTED  # the other kinds do not wait for it
            await asyncio.sleep(self._retry_seconds)  # Kopf lists the objects when this function returns

    async def _repeating(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the events of the CRDs, and repeat them while their kinds are not watched."""
        self._crds.clear()
        events: asyncio.Queue[Any] = asyncio.Queue()

        async def read() -> None:
            try:
                async for event in stream:
                    events.put_nowait(event)
            finally:
                events.put_nowait(_END)

        reading = asyncio.create_task(read())  # one task for all events: Kopf's timeout belongs to the first that asks
        try:
            while True:
                try:
                    async with asyncio.timeout(self._retry_seconds):
                        event = await events.get()
                except TimeoutError:
                    for crd in [body for key, body in self._crds.items() if key not in self._watched]:
                        yield {"type": "MODIFIED", "object": crd}
                    continue
                if event is _END:
                    break
                self._remember(event)
                yield event
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        reading.result()

    def _remember(self, event: Any) -> None:
        if not isinstance(event, dict) or "spec" not in event["object"]:
            return  # a bookmark
        spec = event["object"]["spec"]
        key = spec["group"], spec["names"]["plural"]
        if event["type"] == "DELETED":
            self._crds.pop(key, None)
        elif any(key == (kind.group, kind.plural) for kind in self._kinds):
            self._crds[key] = event["object"]
