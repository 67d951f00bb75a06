"""The common place in the order of requests with the same prompt prefix."""

from __future__ import annotations

REQUESTS_PER_KEY = 64
"""Requests with one prefix key that keep the place of the first of them."""
MOST_KEYS = 1000


class PrefixPlaces:
    """The first request of each prefix key."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, int]] = {}
        """By prefix key: the `seq` of the request that opened the group, and the requests since."""

    def place(self, key: int | None, seq: int) -> int:
        """Return the `seq` of the first request with a prefix key: their common place among requests of equal slack.

        After every `REQUESTS_PER_KEY` requests, the next request keeps its own place, so that a key does not overtake
        the others indefinitely.
        """
        if key is None:
            return seq
        first, num = self._keys.get(key, (seq, 0))
        if num >= REQUESTS_PER_KEY:
            first, num = seq, 0
        elif not num and len(self._keys) >= MOST_KEYS:
            self._keys.clear()
        self._keys[key] = first, num + 1
        return first
