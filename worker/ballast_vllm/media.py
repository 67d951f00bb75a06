"""The images and other media of calls in the API server, from their decoding until vLLM has prepared the requests.

A small file may hold a large image. vLLM decodes all media of all calls that wait, and works them off on one thread.
So each call has a limit of memory. Up to a quarter of it, some calls decode at a time, and beyond that one call of each
class. A call that waits to go beyond it keeps its place, and the call before it waits for none: so each one goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from dataclasses import dataclass, field

from ballast_api.pods import MEDIA_MEMORY
from ballast_policy.request import RequestClass
from ballast_worker.errors import NotServed

MOST_MEBIBYTES = 1024
"""Memory of the decoded media of one call, unless the variable states another number. 0 means no limit."""
PLACE_PART = 4
"""The part of that memory that a call may have without a large place: the limit, divided by this number."""


def most_bytes() -> int:
    """Return the memory of the decoded media of one call.

    Raises:
        NotServed: the variable is no number.
    """
    text = os.environ.get(MEDIA_MEMORY) or str(MOST_MEBIBYTES)
    if not (text.isascii() and text.isdigit()):
        raise NotServed(f"{MEDIA_MEMORY} is {text[:40]!r}. Set a number of MiB, or 0 for no limit")
    return int(text) * 2**20 or sys.maxsize


class NeedsLargePlace(Exception):
    """The media of a call take more memory than its place has."""


@dataclass(slots=True, eq=False)
class Media:
    """The media of one call."""

    num_bytes: int = 0
    """Memory of those that are decoded, or that threads decode now."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one is decoded whose memory is known only afterwards."""
    has_place: bool = False
    has_large_place: bool = False
    is_over: bool = False
    """Whether vLLM has prepared a request of the call for EngineCore, or the call ended."""
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the call takes a place, so that it takes only one."""
    counting: threading.Lock = field(default_factory=threading.Lock)

    def needs_place(self, *, is_large: bool) -> bool:
        """Return whether the call has no such place, and may take one."""
        return not (self.is_over or (self.has_large_place if is_large else self.has_place))

    def add(self, num_bytes: int, *, needs_place: bool) -> bool:
        """Count memory before it is taken. Return whether the call may have it. Several threads may call it.

        Raises:
            NeedsLargePlace: the call may have it with a large place. Nothing is counted.
        """
        most = most_bytes()
        with self.counting:
            total = self.num_bytes + num_bytes
            if total > most:
                return False
            if needs_place and total > most // PLACE_PART and self.needs_place(is_large=True):
                raise NeedsLargePlace
            self.num_bytes = total
            return True

    def take_back(self, num_bytes: int) -> None:
        """Count memory no longer. It may be that of an earlier turn of the call, which counts as 0 already."""
        with self.counting:
            self.num_bytes = max(0, self.num_bytes - num_bytes)


class MediaPlaces:
    """The places of calls with decoded media. It belongs to the event loop of the API server."""

    def __init__(self, num_places: int) -> None:
        """Let this number of calls have decoded media at a time, and one of them more than the others."""
        self._places, self._large = asyncio.Semaphore(num_places), asyncio.Semaphore(1)

    async def take(self, media: Media, *, is_large: bool = False) -> None:
        """Return when the call of the media has a place, or needs none any more."""
        if not media.needs_place(is_large=is_large):
            return
        async with media.taking:
            if media.needs_place(is_large=False):
                await self._places.acquire()
                media.has_place = True
            if is_large and media.needs_place(is_large=True):
                await self._large.acquire()
                media.has_large_place = True
        if media.is_over:
            self.leave(media)

    def leave(self, media: Media) -> None:
        """Give the places of a call to the next ones, and let the call take no other.

        The next turn of a tool loop has the whole memory again: vLLM decodes all media of the call in each turn.
        """
        media.is_over = True
        with media.counting:
            media.num_bytes = 0
        if media.has_place:
            media.has_place = False
            self._places.release()
        if media.has_large_place:
            media.has_large_place = False
            self._large.release()


PLACES = {RequestClass.ONLINE: MediaPlaces(6), RequestClass.OFFLINE: MediaPlaces(2)}
"""Those of each class, so that no online call waits for offline ones. vLLM decodes on eight threads."""
