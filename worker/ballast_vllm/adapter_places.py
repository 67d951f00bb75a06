"""The LoRA adapters whose requests the policy host may know.

The requests that the host knows, running, parked and waiting, use at most `max_loras` adapters. So no plan computes
more adapters than vLLM does in a step. The host does not know the requests of other adapters: they hold up no other
request, and wait outside until a place is free.

While requests wait outside and no place is free, one adapter is *closing*. A request of it enters only if it precedes
all requests outside, so the place becomes free when its requests end. For an online request, an adapter that has only
offline requests gives up its place at once. For an offline request, an adapter that has online requests does not close.
While all places have online requests, the offline requests outside are *held up*: no end of offline work frees a place.
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
        self._closing = 0
        """The adapter that is closing; 0 if none is."""

    def enter(self, record: Request, adapter: int) -> bool:
        """Return whether a request may enter the host. If not, it waits outside."""
        if not adapter:
            return True
        self.is_changed = True
        self._adapters[record.seq] = adapter
        if self._may_enter(record, adapter):
            self._known.setdefault(adapter, {})[record.seq] = record
            return True
        self.outside[record.seq] = record
        return False

    def _may_enter(self, record: Request, adapter: int) -> bool:
        if not self.outside:
            return adapter in self._known or len(self._known) < self._num_places
        if adapter == self._closing:
            return _order(record) < _order(self._first)
        return adapter in self._known

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

    def close(self) -> Sequence[Request]:
        """Choose the adapter that is closing. Return its requests if they leave the host now."""
        if not self.outside or len(self._known) < self._num_places:
            return ()
        offline = [adapter for adapter in self._known if not self._has_online(adapter)]
        is_online = self._first.request_class is ONLINE
        among = offline or (self._known if is_online else ())
        if self._closing not in among:
            self._closing = min(among, key=self._num_computed, default=0)
        return tuple(self._known[self._closing].values()) if is_online and offline else ()

    def move_out(self, record: Request) -> None:
        """Note that a request left the host and waits outside."""
        self._forget(record.seq, self._adapters[record.seq])
        self.outside[record.seq] = record

    def give(self) -> Sequence[Request]:
        """Give free places to adapters. Return their requests, which enter the host."""
        self.is_changed = False
        entering: list[Request] = []
        while self.outside and len(self._known) < self._num_places:
            adapter = self._adapters[self._first.seq]
            found = {seq: record for seq, record in self.outside.items() if self._adapters[seq] == adapter}
            for seq in found:
                del self.outside[seq]
            self._known.setdefault(adapter, {}).update(found)
            entering += found.values()
            self._closing = 0
            self.is_changed = True  # another adapter may have to close
        return entering

    def held_up(self) -> Sequence[Request]:
        """Return the offline requests outside, if online requests hold all places."""
        if not self.outside or not all(map(self._has_online, self._known)):
            return ()
        return [record for record in self.outside.values() if record.request_class is not ONLINE]

    @property
    def _first(self) -> Request:
        """The first request that waits outside."""
        return min(self.outside.values(), key=_order)

    def _has_online(self, adapter: int) -> bool:
        return any(record.request_class is ONLINE for record in self._known[adapter].values())

    def _num_computed(self, adapter: int) -> int:
        return sum(record.num_computed for record in self._known[adapter].values())

    def _forget(self, seq: int, adapter: int) -> None:
        known = self._known[adapter]
        del known[seq]
        if not known:
            del self._known[adapter]
            if adapter == self._closing:
                self._closing = 0


def _order(record: Request) -> tuple[bool, int, int]:
    """Return the key by which requests outside get a place: their class, then priority, then order."""
    return record.request_class is not ONLINE, -record.priority, record.seq
