"""The LoRA adapters whose requests the policy host may know.

The requests that the host knows, running, parked and waiting, use at most `max_loras` adapters. So no plan computes
more adapters than vLLM does in a step. The host does not know the requests of other adapters: they hold up no other
request, and wait outside until a place is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast_policy.request import ONLINE, Request


class AdapterPlaces:
    """The places for adapters of one EngineCore. Adapter 0 is the base model, which needs no place."""

    def __init__(self, num_places: int) -> None:
        self.outside: dict[int, Request] = {}
        """Requests whose adapter has no place, by `seq`. The host does not know them."""
        self.is_changed = False
        """Whether a request came or went since the last call of `give`."""
        self._num_places = num_places
        self._known: dict[int, dict[int, Request]] = {}
        """The requests that the host knows, by adapter and `seq`. Each adapter here has a place."""
        self._adapters: dict[int, int] = {}
        """The adapters of all requests that have one, by `seq`."""

    def enter(self, record: Request, adapter: int) -> bool:
        """Return whether a request may enter the host. If not, it waits outside."""
        if not adapter:
            return True
        self.is_changed = True
        self._adapters[record.seq] = adapter
        if adapter in self._known or (len(self._known) < self._num_places and not self.outside):
            self._known.setdefault(adapter, {})[record.seq] = record
            return True
        self.outside[record.seq] = record
        return False

    def leave(self, seq: int) -> bool:
        """Forget a request. Return whether it waited outside."""
        adapter = self._adapters.pop(seq, 0)
        if not adapter:
            return False
        self.is_changed = True
        if self.outside.pop(seq, None) is not None:
            return True
        self._forget(seq, adapter)
        return False

    def give(self) -> Sequence[Request]:
        """Give free places to adapters. Return their requests, which enter the host."""
        self.is_changed = False
        entering: list[Request] = []
        while self.outside and len(self._known) < self._num_places:
            adapter = self._adapters[min(self.outside.values(), key=_order).seq]
            found = {seq: record for seq, record in self.outside.items() if self._adapters[seq] == adapter}
            for seq in found:
                del self.outside[seq]
            self._known.setdefault(adapter, {}).update(found)
            entering += found.values()
        return entering

    def _forget(self, seq: int, adapter: int) -> None:
        known = self._known[adapter]
        del known[seq]
        if not known:
            del self._known[adapter]


def _order(record: Request) -> tuple[bool, int, int]:
    """Return the key by which requests outside get a place: their class, then priority, then order."""
    return record.request_class is not ONLINE, -record.priority, record.seq
