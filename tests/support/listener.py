"""A server that sends bytes to whoever connects, and counts connections."""

from __future__ import annotations

import socket
import threading


class Listener:
    """Sends the same bytes to each client."""

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
