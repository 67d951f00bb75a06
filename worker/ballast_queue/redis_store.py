"""The queue as submitters and workers use it: one class over the parts that this package is made of."""

from __future__ import annotations

from typing import Self

from pydantic import TypeAdapter, ValidationError

from ballast_openai.errors import describe
from ballast_queue.connection import Connection
from ballast_queue.errors import InvalidJob, ServerUnfit
from ballast_queue.fitness import inspect
from ballast_queue.inbox import TakingIn
from ballast_queue.integrity import Auditing
from ballast_queue.jobs import Jobs
from ballast_queue.service import Charging
from ballast_queue.settings import Name
from ballast_queue.upkeep import Upkeep
from ballast_queue.work import Working


class Queue(TakingIn, Jobs, Working, Charging, Upkeep, Auditing):
    """One queue in Redis or Valkey 7+. Threads may share it; a method is one round trip, or few.

    Every method raises `QueueUnavailable` where the server cannot be reached.
    """

    @classmethod
    def connect(
        cls,
        url: str,
        name: str,
        *,
        username: str | None = None,
        password: str | None = None,
        socket_timeout: float = 5.0,
    ) -> Self:
        """Connect to `redis://`, `rediss://` (TLS) or `unix://` and have the function library loaded.

        `username` and `password` go before those of the URL.

        Raises:
            InvalidAddress, InvalidJob: the URL or the queue's name is malformed.
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses.
        """
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            raise InvalidJob(
                f"queue: found {describe(name)}, wanted letters, digits, '.', '_', '/' and '-', "
                "with a letter or digit at both ends"
            ) from None
        connection = Connection.open(url, username=username, password=password, socket_timeout=socket_timeout)
        return cls(connection, name)

    @property
    def where(self) -> str:
        """Host and port (or path) of the server, for messages."""
        return self._connection.where

    def close(self) -> None:
        """Close the sockets. A call afterwards opens new ones."""
        self._connection.close()

    def now(self) -> float:
        """Give the server's clock, Unix seconds; also the cheapest way to see whether it answers."""
        return float(self._run(self._functions.now()))

    def check_server(self) -> list[str]:
        """Say what is wrong with the server, as sentences; those that only warn begin with `warning:`."""
        fitness = inspect(self._connection)
        return [*fitness.problems, *(f"warning: {text}" for text in fitness.warnings)]

    def require_fit(self) -> list[str]:
        """Give the warnings of `check_server`.

        Raises:
            ServerUnfit: the server may lose or refuse work.
        """
        fitness = inspect(self._connection)
        if fitness.problems:
            raise ServerUnfit(fitness.problems)
        return list(fitness.warnings)
