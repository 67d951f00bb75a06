"""The order of the work on threads of vLLM that requests of both classes share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL
from ballast_vllm.daemon_threads import do

MOST_IN_A_ROW = 9
"""Pieces of online work in a row while offline work waits. A tenth is the default reservation of offline work."""
MOST_SECONDS = 10.0
"""While offline work has waited for this time, a piece of each class is done by turns.

All pieces of a large call are due at once. Tenants take turns also then, so another one does not wait for all of them.
vLLM counts a chat that is not rendered within 30 s, with its wait for a thread, as one whose template does not end.
"""


@dataclass(frozen=True, slots=True)
class _Piece:
    future: Future[Any]
    work: Callable[[], Any]
    at: float


class _Turns:
    """The pieces of one class. Tenants with pieces take turns, so that none waits for all pieces of another."""

    def __init__(self) -> None:
        self._by_tenant: dict[str | None, deque[_Piece]] = {}
        """The tenant that is next comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    @property
    def oldest_at(self) -> float:
        return min(pieces[0].at for pieces in self._by_tenant.values())

    def append(self, tenant: str | None, piece: _Piece) -> None:
        self._by_tenant.setdefault(tenant, deque()).append(piece)

    def pop_next(self) -> _Piece:
        tenant = next(iter(self._by_tenant))
        pieces = self._by_tenant.pop(tenant)
        piece = pieces.popleft()
        if pieces:
            self._by_tenant[tenant] = pieces
        return piece


class OnlineFirst:
    """The `submit` of an executor. Offline work waits for online work, apart from a small share of the turns.

    vLLM renders, tokenizes and answers the calls of encoders on one thread. A call with many texts is many pieces of
    work. Each piece sees the context of its caller. Within a class, tenants take turns.
    """

    def __init__(self, submit: Callable[..., Any], now: Callable[[], float]) -> None:
        """Pass work on to `submit`. `now` is a clock in seconds."""
        self._submit, self._now = submit, now
        self._online, self._offline = _Turns(), _Turns()
        self._num_in_a_row = 0
        self._was_due = False
        """Whether the last piece was offline work that was due."""
        self._lock = Lock()

    def __call__(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread do the work, and return the future of its result."""
        future: Future[Any] = Future()
        call = CALL.get()
        is_offline = call is not None and call.request_class is RequestClass.OFFLINE
        piece = _Piece(future, partial(copy_context().run, work, *args, **kwargs), self._now())
        with self._lock:
            waiting = self._offline if is_offline else self._online
            waiting.append(None if call is None else call.caller.tenant, piece)
        self._submit(self._take_turn)
        return future

    def _take_turn(self) -> None:
        """Do as many pieces of work as wait now: the executor calls this once for each piece, or less often.

        If a chat template does not end, vLLM replaces the threads, and the turns that wait behind it are lost.
        """
        with self._lock:
            number = len(self._online) + len(self._offline)
        for _ in range(number):
            piece = self._next()
            if piece is None:
                return
            do(piece.future, piece.work)

    def _next(self) -> _Piece | None:
        with self._lock:
            if not self._offline:
                self._num_in_a_row = 0
                return self._online.pop_next() if self._online else None
            is_due = not self._was_due and self._now() - self._offline.oldest_at >= MOST_SECONDS
            self._was_due = is_due
            if is_due or not self._online or self._num_in_a_row >= MOST_IN_A_ROW:
                self._num_in_a_row = 0
                return self._offline.pop_next()
            self._num_in_a_row += 1
            return self._online.pop_next()
