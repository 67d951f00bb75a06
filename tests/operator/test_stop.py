"""The operator stops when it is told to, whatever a Redis that a resource names does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import ControlPlane
from operated import Cluster, running
from waiting import WAIT_SECONDS

from ballast_queue.function_library import REVISION

pytestmark = pytest.mark.envtest

PAUSE_SECONDS = {b"INFO": 2.5, b"expire_leases": 0.5}
"""The time until the reply to the first command of a connection, and to each timer."""
NUM_TIMERS = 100
ANSWERS = {
    b"INFO": b"$17\r\ncluster_enabled:0\r\n",
    b"revision": b":%d\r\n" % REVISION,
    b"renew_settings": b"*3\r\n$0\r\n\r\n$1\r\n0\r\n$1\r\n0\r\n",
    b"statuses": b"*0\r\n",
    b"ballast1_due": b"*%d\r\n" % NUM_TIMERS + b"$7\r\nlease:a\r\n" * NUM_TIMERS,
    b"expire_leases": b":1\r\n",
}
"""The replies to commands that contain a word. There is always one more timer that is due."""


class SlowRedis:
    """Answers like a queue with endless work, each command after a moment."""

    def __init__(self) -> None:
        self.is_busy = threading.Event()
        """A poll has begun. It opens a connection, and then runs timers for far longer than a test waits."""
        self._closed = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            while (received := client.recv(65536)) and not self._closed.is_set():
                word = next((word for word in ANSWERS if word in received), b"")
                self.is_busy.set()
                self._closed.wait(PAUSE_SECONDS.get(word, 0))
                num_commands = received.count(b"\r\n*") + 1  # of a pipeline, only those without a reply of their own
                client.sendall(ANSWERS.get(word, b"+OK\r\n" * num_commands))

    def close(self) -> None:
        self._closed.set()
        self._socket.close()


@pytest.fixture
def slow() -> Iterator[SlowRedis]:
    found = SlowRedis()
    yield found
    found.close()


def test_a_slow_redis_does_not_delay_the_end_of_the_operator(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, slow: SlowRedis
) -> None:
    with running(controllers.kubeconfig, tmp_path) as operator:
        cluster.secret("slow", url=f"redis://127.0.0.1:{slow.port}")
        cluster.make(redis={"secretName": "slow"})
        assert slow.is_busy.wait(WAIT_SECONDS), operator.text()

        assert operator.stop() == 0, "the operator waited for the poll until it was killed"
