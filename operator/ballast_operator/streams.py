"""Makes Kopf's watches survive errors, and that a kind comes and goes. Shows which kinds are watched.

A watch may get a 404 before Kopf learns that the CRD was deleted, a 403 because a role lacks a verb, or an error that
passes, such as that etcd has no leader. Kopf treats each as fatal and ends. It has no setting and no public name for
this, so this module replaces a private function of Kopf. Starting Kopf again is not enough: when Kopf ends, it cancels
every task that began after it, those of the operator included.

At its start, Kopf holds the events of all objects back until it has seen each object once. For each object that it
sees, it wakes all tasks that wait for this, so a start with many objects took minutes of CPU time. This module replaces
the class that does it.

Kopf keeps the objects of the events that it holds back, so they are trimmed here. It decodes a page of a list at once,
and an object of one MiB may take 30 MiB until it is trimmed. So this module replaces the function that requests a page
by one that decodes and trims its objects one after another. Python's decoder fails on an object that is nested deep,
which ends the list and the watch of its kind. So lists and watches use a decoder that survives it.

Kopf repeats a list that is refused for a minute, and one that is not answered for much longer. So those of optional
kinds have one repetition and a short timeout.

Kopf asks the API server for its kinds once after each event of a CRD. The API server may list a new kind only later,
and no event follows. So the watch of the CRDs repeats the last event of a CRD until its kind is watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import api, fetching, watching
from kopf._cogs.clients.errors import APIError, APINotFoundError

from ballast_api.nested_json import decoded
from ballast_log import Log
from ballast_operator.content import items_of, trimmed
from ballast_operator.kinds import CRD, Body, Kind

log = Log(__name__)

RETRY_SECONDS = 3.0
"""Delay before a watch that failed or whose kind is gone is tried again, and before an event of a CRD is repeated."""
LIST_SECONDS = 30.0
"""Timeout of one page of a list of an optional kind."""
MOST_CHARACTERS = 200
"""Of an error in the answer to `/readyz`."""

_Stream = tuple[str, str, str | None]
"""The group, plural and namespace of a watch."""
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
        self._unwatched: dict[_Stream, str | None] = {}
        """For each watch: None if its objects were listed and are watched, else why not, as far as it is known."""
        self._thread = ThreadPoolExecutor(1, "pages")
        """Decodes one page at a time. A page of deep objects takes seconds, in which the Lease is renewed."""
        self._crds: dict[tuple[str, str], Body] = {}
        """The CRDs of `kinds` that exist."""

    def install(self) -> None:
        """Make every watch of this process use this object, and their start take time in proportion to the objects."""

        def watch(*, resource: Any, **more: Any) -> AsyncIterator[Any]:
            stream = self._patient(resource=resource, **more)
            return self._repeating(stream) if resource.plural == CRD.plural else stream

        watching.continuous_watch = watch
        aiotoggles.ToggleSet = _Toggles  # type: ignore[misc]
        fetching.api = SimpleNamespace(get=self._page)  # type: ignore[assignment, attr-defined]
        api.json = SimpleNamespace(loads=decoded)  # type: ignore[assignment, attr-defined]

    async def _page(self, url: str, **more: Any) -> Body:
        """Request a page of a list, and trim its objects."""
        path = url.partition("?")[0]
        kind = next((each for each in self._kinds if _is_list_of(path, each)), None)
        async with await api.request("get", url, **more) as response:
            text = await response.text()
        loop, keep = asyncio.get_running_loop(), (lambda body: body) if kind is None else partial(trimmed, kind)
        items, page = await loop.run_in_executor(self._thread, items_of, text, keep)
        return page | {"items": items}

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the kinds that must be watched and are not."""
        return tuple(kind.name for kind in self._kinds if not kind.is_optional and self._why(kind) is not None)

    @property
    def unwatched(self) -> str:
        """Return which kinds that must be watched are not, and why; empty if all are."""
        missing = self.missing
        if not missing:
            return ""
        # Without the right to watch CRDs, the operator works, but finds no kind that is installed later.
        kinds = [kind for kind in (*self._kinds, CRD) if kind.name in missing or (kind == CRD and self._why(CRD))]
        found = ", ".join(f"{kind.name} ({why})" if (why := self._why(kind)) else kind.name for kind in kinds)
        return f"not watched: {found}; a kind that does not exist is watched when its CRD is installed"

    def _why(self, kind: Kind) -> str | None:
        """Return why a kind is not watched in each namespace, or an empty text if it is not known; None if it is."""
        found = [why for key, why in self._unwatched.items() if key[:2] == (kind.group, kind.plural)]
        if found and all(why is None for why in found):
            return None
        return next(filter(None, found), "")

    async def _patient(
        self, *, resource: Any, namespace: Any, settings: kopf.OperatorSettings, **more: Any
    ) -> AsyncIterator[Any]:
        key, is_listed, is_gone, has_failed = (resource.group, resource.plural, namespace), False, False, False
        kind = next((kind for kind in self._kinds if (kind.group, kind.plural) == key[:2]), None)
        is_optional = kind is not None and kind.is_optional
        settings = self._quick(settings) if is_optional else settings
        before, why = self._unwatched.setdefault(key, ""), ""
        try:
            event: Any
            async for event in continuous_watch(resource=resource, namespace=namespace, settings=settings, **more):
                if event is watching.Bookmark.LISTED:
                    is_listed, self._unwatched[key] = True, None
                    self._relisted()
                elif kind is not None and event["type"] != "BOOKMARK":
                    event["object"] = trimmed(kind, event["object"])  # Kopf keeps it
                yield event
        except APINotFoundError:
            is_gone = True
        except APIError as error:
            has_failed, why = True, f"the API server answered {error.status}: {error.message or error}"
            if why != before:
                log.warning("a watch was refused and is tried again", kind=str(resource), error=why)
        except (watching.WatchingError, aiohttp.ClientError, RuntimeError) as error:
            # After a 401, Kopf closes the connections of lists and watches. aiohttp may raise an error without a class.
            if type(error) is RuntimeError and str(error) != "Connection closed.":
                raise
            has_failed, why = True, f"its watch failed: {str(error)[:MOST_CHARACTERS] or type(error).__name__}"
            log.warning("a watch failed, so its objects are listed again", kind=str(resource), error=str(error))
        except (asyncio.CancelledError, GeneratorExit):
            self._relisted()
            raise
        finally:
            self._unwatched[key] = why
        if is_gone:
            log.info("the kind does not exist, so its watch waits", kind=str(resource))
            yield watching.Bookmark.LISTED  # Kopf waits for the first list of each kind
            await asyncio.sleep(self._retry_seconds)
            self._relisted()
        elif has_failed or not is_listed:  # Kopf ends a list without an error if it gets no answer
            if is_optional:
                yield watching.Bookmark.LISTED  # the other kinds do not wait for it
            await asyncio.sleep(self._retry_seconds)  # Kopf lists the objects when this function returns

    def _quick(self, settings: kopf.OperatorSettings) -> kopf.OperatorSettings:
        """Return settings with which Kopf gives up soon. This object tries again."""
        quick = replace(settings.networking, error_backoffs=[self._retry_seconds], request_timeout=LIST_SECONDS)
        return replace(settings, networking=quick)

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
                    unwatched = {(kind.group, kind.plural) for kind in self._kinds if self._why(kind) is not None}
                    for crd in [body for key, body in self._crds.items() if key in unwatched]:
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


def _is_list_of(path: str, kind: Kind) -> bool:
    """Return whether the path of a call is that of a list of a kind."""
    base, _, plural = kind.path().rpartition("/")
    return path.startswith(f"{base}/") and path.endswith(f"/{plural}")
