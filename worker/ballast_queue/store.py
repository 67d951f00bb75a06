"""One queue on one connection: what every part of `Queue` shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ballast_queue.connection import Connection
from ballast_queue.function_library import Call
from ballast_queue.functions import Functions
from ballast_queue.keys import Keys
from ballast_queue.unreadable import Unreadable

Attempt = Callable[[Callable[[], Any]], Any]
"""Make a call of Redis, perhaps again and again, and return its result."""


class Store:
    """The connection, the name, the keys and the functions of one queue."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.keys = Keys(name)
        self.functions = Functions(self.keys)
        self.unreadable = connection.unreadable.setdefault(name, Unreadable())

    def call(self, call: Call) -> Any:
        """Run one function and return its reply."""
        return self.connection.call(*call)
