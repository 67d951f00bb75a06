"""The digest by which a repeated submission shows that it has the same lines."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from ballast_queue.batch_lines import content_of


class LineDigest:
    """The digest of the lines so far. Blank lines, and the ends of lines, do not change it."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_requests = 0
        """Lines that are not blank."""
        self._state = sha256()

    def add(self, lines: Iterable[bytes]) -> None:
        """Add the next lines."""
        for raw in lines:
            self.num_lines += 1
            if content := content_of(raw):
                self.num_requests += 1
                self._state.update(content)
                self._state.update(b"\n")

    def text(self) -> str:
        """Return the digest as text."""
        return self._state.hexdigest()

    def copy(self) -> LineDigest:
        """Return a digest that goes on from here by itself."""
        other = LineDigest()
        other.num_lines, other.num_requests, other._state = self.num_lines, self.num_requests, self._state.copy()
        return other
