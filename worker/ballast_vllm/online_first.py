"""The order of the work on threads of vLLM that requests of both classes share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Any

from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL
from ballast_vllm.daemon_threads import do

MOST_IN_A_ROW = 9
"""Pieces of online work in a row while offline work waits. A tenth is the default reservation of offline work."""


class OnlineFirst:
    """The `submit` of an executor. Offline work waits for online work, apart from a small share of the turns.

    vLLM renders, tokenizes and answers the calls of encoders on one thread. A call with many texts is many pieces of
    work. Each piece sees the context of its caller.
    """

    def __init__(self, submit: Callable[..., Any]) -> None:
        """Pass work on to `submit`."""
        self._submit = submit
        self._online: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._offline: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_in_a_row = 0
        self._lock = Lock()

    def __call__(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread do the work, and return the future of its result."""
        future: Future[Any] = Future()
        call = CALL.get()
        is_offline = call is not None and call.request_class is RequestClass.OFFLINE
        waiting = self._offline if is_offline else self._online
        waiting.append((future, partial(copy_context().run, work, *args, **kwargs)))
        self._submit(self._do_next)
        return future

    def _do_next(self) -> None:
        """Do one piece of work: the executor calls this as often as there are pieces."""
        with self._lock:
            is_turn = not self._online or self._num_in_a_row >= MOST_IN_A_ROW
            is_offline = bool(self._offline) and is_turn
            self._num_in_a_row = 0 if is_offline or not self._offline else self._num_in_a_row + 1
            found = (self._offline if is_offline else self._online).popleft()
        do(*found)
