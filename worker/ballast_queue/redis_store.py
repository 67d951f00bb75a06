"""The queue as submitters, workers and the operator use it."""

from __future__ import annotations

from typing import Self

from ballast_queue.claimable import Claimable
from ballast_queue.connection import Connection
from ballast_queue.errors import ServerUnfit
from ballast_queue.fitness import inspect
from ballast_queue.inbox import InboxReader
from ballast_queue.jobs import Jobs
from ballast_queue.leases import Leases
from ballast_queue.ledger import SharedLedger
from ballast_queue.records import readable, stats_of
from ballast_queue.results import Results
from ballast_queue.settings import check_name
from ballast_queue.settings_store import SettingsStore
from ballast_queue.status import QueueStats
from ballast_queue.store import Store
from ballast_queue.submissions import Submissions
from ballast_queue.timers import Timers
from ballast_queue.workers import Workers


class Queue:
    """One queue in Redis or Valkey 7+. Threads may share it. Each method needs one round trip, or a few.

    Every method raises `QueueUnavailable` if the server is unreachable.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self.store = Store(connection, name)
        self.settings = SettingsStore(self.store)
        self.submissions = Submissions(self.store, self.settings)
        self.inbox = InboxReader(self.store, self.settings)
        self.jobs = Jobs(self.store)
        self.results = Results(self.store, self.jobs)
        self.claimable = Claimable(self.store)
        self.leases = Leases(self.store)
        self.ledger = SharedLedger(self.store)
        self.timers = Timers(self.store)
        self.workers = Workers(self.store)

    @classmethod
    def connect(
        cls,
        url: str,
        name: str,
        *,
        password: str | None = None,
        socket_timeout: float = 5.0,
        loads_functions: bool = False,
        ca: str | None = None,
    ) -> Self:
        """Connect to `redis://`, `rediss://` (TLS) or `unix://`.

        `password` is for a URL without one. Only an administrator's connection `loads_functions`.

        Raises:
            InvalidAddress, InvalidJob: the URL or the queue's name is malformed.
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses the user.
            LibraryUnfit: the server lacks the functions of this version.
        """
        check_name("queue", name)
        connection = Connection.open(
            url,
            password=password,
            socket_timeout=socket_timeout,
            loads_functions=loads_functions,
            ca=ca,
        )
        return cls(connection, name)

    def close(self) -> None:
        """Close the sockets. A later call opens new ones."""
        self.store.connection.close()

    @readable("the time")
    def now(self) -> float:
        """Return the server's time in Unix seconds. This is also the cheapest check that the server answers."""
        return float(self.store.call(self.store.functions.now()))

    def stats(self) -> QueueStats:
        """Return the figures of the whole queue."""
        return stats_of(self.store.call(self.store.functions.stats(self.settings.tenants())))

    def is_read_only(self) -> bool:
        """Return whether the server is a replica that accepts no writes."""
        return self.store.connection.is_read_only()

    def check_server(self) -> list[str]:
        """Return the problems of the server as sentences. Mere warnings start with `warning:`."""
        problems, warnings = inspect(self.store.connection)
        return [*problems, *(f"warning: {text}" for text in warnings)]

    def require_fit(self) -> list[str]:
        """Return the warnings of `check_server`.

        Raises:
            ServerUnfit: the server may lose or refuse work.
        """
        problems, warnings = inspect(self.store.connection)
        if problems:
            raise ServerUnfit(problems)
        return warnings
