"""Servers that send bytes to every client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

MOST_SENT = 256 * 1024 * 1024


class Listener:
    """Sends the same bytes to each client once, and counts connections."""

    def __init__(self, sent: bytes = b"") -> None:
        self.accepted = 0
        self._sent = sent
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            with connection:
                connection.recv(1000)
                connection.sendall(self._sent)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def replying(reply: Callable[[], Iterable[bytes]]) -> Iterator[tuple[int, list[int]]]:
    """Answer each command of a client with the parts of a reply. Yield the port, and how many bytes were accepted."""
    sent = [0]

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.settimeout(5)
                try:
                    while sent[0] <= MOST_SENT and client.recv(65536):
                        for part in reply():
                            client.sendall(part)
                            sent[0] += len(part)
                            if sent[0] > MOST_SENT:
                                break
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], sent
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
