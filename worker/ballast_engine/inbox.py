"""Commands that other threads give to the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Event, Lock

from ballast_engine.errors import InvalidRequest
from ballast_engine.request import FinishReason
from ballast_engine.sequence import Sequence
from ballast_policy.snapshot import PolicyConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """Add a request."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class End:
    """End requests whose caller is gone, or that another engine continues."""

    request_ids: tuple[str, ...]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Configure:
    """Use another policy configuration."""

    policy: PolicyConfig


Command = Submit | End | Configure


class Inbox:
    """Commands in their order, and the ids in use. Any thread puts commands, the engine's thread takes them."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._event = Event()
        self._ids: set[str] = set()
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put(self, command: Command) -> None:
        """Add a command and wake the engine."""
        self._commands.append(command)
        self._event.set()

    def claim_id(self, request_id: str) -> None:
        """Reserve an id until `free_id`.

        Raises:
            InvalidRequest: the id is in use.
        """
        with self._lock:
            if request_id in self._ids:
                raise InvalidRequest(
                    f"Request id {request_id!r} is in use by a request that has not ended: choose another id."
                )
            self._ids.add(request_id)

    def free_id(self, request_id: str) -> None:
        """Release an id."""
        with self._lock:
            self._ids.discard(request_id)

    @property
    def num_ids(self) -> int:
        """Requests that have not ended."""
        return len(self._ids)

    def take(self) -> list[Command]:
        """Remove and return all commands."""
        self._event.clear()
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def take_newcomers(self) -> list[Submit]:
        """Remove and return the new requests. The other commands keep their order."""
        commands = [self._commands.popleft() for _ in range(len(self._commands))]
        self._commands.extendleft(command for command in reversed(commands) if not isinstance(command, Submit))
        return [command for command in commands if isinstance(command, Submit)]

    def wait(self, timeout: float) -> None:
        """Sleep until there is a command, at most `timeout` seconds."""
        self._event.wait(timeout)
