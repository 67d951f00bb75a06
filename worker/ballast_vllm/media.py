"""The images and other media of calls in the API server, from their decoding until EngineCore has the requests.

A small file may hold a large image. vLLM decodes all media of all calls that wait, and works them off on one thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from ballast_policy.request import RequestClass


@dataclass(slots=True, eq=False)
class Media:
    """The media of one call."""

    num_bytes: int = 0
    """Memory of those that are decoded."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one is decoded, so that each one sees the memory of the others."""
    has_place: bool = False
    is_over: bool = False
    """Whether EngineCore has a request of the call, or the call ended."""

    @property
    def needs_place(self) -> bool:
        """Whether the call has no place, and needs one to decode its media."""
        return not (self.has_place or self.is_over)


class MediaPlaces:
    """The places of calls with decoded media. It belongs to the event loop of the API server."""

    def __init__(self, num_places: int) -> None:
        """Let this number of calls have decoded media at a time."""
        self._num_free = num_places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, media: Media) -> None:
        """Return when the call of the media has a place, or needs none any more."""
        if not media.needs_place:
            return
        if self._num_free:
            self._num_free -= 1
        else:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():  # it had its place already
                    self._pass_on()
                raise
        media.has_place = True
        if media.is_over:
            self.leave(media)

    def leave(self, media: Media) -> None:
        """Give the place of a call to the next one, and let the call take no other."""
        media.is_over = True
        if media.has_place:
            media.has_place = False
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1


PLACES = {RequestClass.ONLINE: MediaPlaces(6), RequestClass.OFFLINE: MediaPlaces(2)}
"""Those of each class, so that no online call waits for offline ones. vLLM decodes on eight threads."""
