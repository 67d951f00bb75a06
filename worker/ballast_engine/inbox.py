"""Commands that other threads give to the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Event, Lock

from ballast_engine.errors import DuplicateRequest
from ballast_engine.sequence import Sequence
from ballast_policy.snapshot import PolicyConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """A request came in."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Abort:
    """The caller went away."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """These go on elsewhere."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Configure:
    """The policy is told something new."""

    policy: PolicyConfig


Command = Submit | Abort | GiveBack | Configure


class Inbox:
    """Commands in the order in which they were given; any thread puts, the engine's thread takes."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._event = Event()
        self._ids: set[str] = set()
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put(self, command: Command) -> None:
        """Hand a command to the engine and wake it."""
        self._commands.append(command)
        self._event.set()

    def claim_id(self, request_id: str) -> None:
        """Reserve an id until `free_id`.

        Raises:
            DuplicateRequest: it is in use.
        """
        with self._lock:
            if request_id in self._ids:
                raise DuplicateRequest(request_id)
            self._ids.add(request_id)

    def free_id(self, request_id: str) -> None:
        """Let an id be used again."""
        with self._lock:
            self._ids.discard(request_id)

    @property
    def num_ids(self) -> int:
        """Requests that came in and did not end."""
        return len(self._ids)

    def take(self) -> list[Command]:
        """Take everything out."""
        self._event.clear()
        commands: list[Command] = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def take_newcomers(self) -> list[Submit]:
        """Take out the requests that came in; the rest stays, in its order."""
        newcomers: list[Submit] = []
        rest: list[Command] = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Submit):
                newcomers.append(command)
            else:
                rest.append(command)
        self._commands.extendleft(reversed(rest))
        return newcomers

    def wait(self, timeout: float) -> None:
        """Sleep until a command is there, at most `timeout` seconds."""
        self._event.wait(timeout)
