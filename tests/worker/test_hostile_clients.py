"""Clients that send too much, too slowly, or too many things at once, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_http import post
from starlette.applications import Starlette
from starlette.routing import Mount
from streamed import BODY, ENDLESS, begun
from tls import LOOPBACK

from ballast_engine.tokenizer import Tokenizer
from ballast_worker.bodies import FREE_BYTES, LONG_BYTES, MOST_WAITING, SHORT_BYTES, BodyReaders
from ballast_worker.errors import Refused
from ballast_worker.http_connection import Closed, Connections, HttpLimits
from ballast_worker.http_exchange import HttpExchange
from ballast_worker.http_server import HttpServer
from ballast_worker.prompt_length import longest_token_bytes
from ballast_worker.tls import Certificate, EventLoop

tokenizer_of = cache(Tokenizer)
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = HEALTH.replace(b"host", b"connection: close\r\nhost")


def read_all(raw: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    parts = []
    try:
        while part := raw.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"RESET")
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def code_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def send_until_closed(raw: socket.socket, part: bytes, limit: int) -> int:
    """Send the part again and again, at most `limit` bytes; returns how many the server took before it closed."""
    sent = 0
    try:
        while sent < limit:
            raw.sendall(part)
            sent += len(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        pytest.param(b"GET /health HTTP/1.1\r\nx: ", b"a" * 65536, id="one endless header"),
        pytest.param(b"GET /health HTTP/1.1\r\n", b"x: a\r\n" * 1000, id="headers without end"),
        pytest.param(b"GET /", b"a" * 65536, id="an endless path"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
            b"a" * 65536,
            id="an endless trailer",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1;",
            b"a" * 65536,
            id="an endless chunk extension",
        ),
    ],
)
def test_headers_without_end_close_the_connection(serving, eventually, begin, part) -> None:
    before = serving.worker.connections.closed[Closed.HEAD_SIZE]
    with serving.connect() as raw:
        raw.sendall(begin)
        sent = send_until_closed(raw, part, 256 * 2**20)

    assert sent < 256 * 2**20
    eventually(lambda: serving.worker.connections.closed[Closed.HEAD_SIZE] == before + 1, "the count")


def test_a_length_with_thousands_of_zeros_is_a_number(serving) -> None:
    length = f"content-length: {len(RAW_BODY)}".encode()
    with serving.connect() as raw:
        raw.sendall(post(RAW_BODY, "connection: close").replace(length, length.replace(b": ", b": " + b"0" * 5000)))
        answer = read_all(raw)

    assert status_of(answer) == 200


def test_a_body_in_chunks_of_a_byte_is_read(serving) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b" " * 60_000 + json.dumps(BODY).encode()
    with serving.connect() as raw:
        raw.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        answer = read_all(raw)

    assert status_of(answer) == 200


@pytest.mark.parametrize("trailer", [b"x-ballast-class: none", b"x-request-id: mine"])
def test_a_trailer_is_no_header(serving, trailer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with serving.connect() as raw:
        raw.sendall(head + b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(RAW_BODY), RAW_BODY, trailer))
        answer = read_all(raw)

    assert status_of(answer) == 200
    assert b"mine" not in answer


def test_a_connection_reads_few_bytes_of_requests_that_wait(serving, eventually) -> None:
    with serving.connect() as raw:
        raw.sendall(post(json.dumps(ENDLESS).encode()))
        raw.recv(1000)
        (connection,) = (each for each in serving.server.server_state.connections if each.client == raw.getsockname())
        raw.setblocking(False)
        raw.send(post(b"", f"x: {'a' * 60_000}") * HttpLimits().pipelined)
        eventually(lambda: connection.flow.read_paused, "the end of reading")
        num_waiting = len(connection.pipeline)

    assert 0 < num_waiting < HttpLimits().pipelined
    eventually(serving.is_idle, "the end of the request")


OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
RAW_BODY = json.dumps(BODY).encode()


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        pytest.param(post(RAW_BODY, *OFFER) + LAST, [200, 200], id="a body"),
        pytest.param(
            post(RAW_BODY, "transfer-encoding: chunked", *OFFER)
            .replace(f"content-length: {len(RAW_BODY)}\r\n".encode(), b"")
            .replace(RAW_BODY, b"%x\r\n%b\r\n0\r\n\r\n" % (len(RAW_BODY), RAW_BODY))
            + LAST,
            [200, 200],
            id="a body in chunks",
        ),
        pytest.param(post(RAW_BODY, *OFFER).replace(b"HTTP/1.1", b"HTTP/1.0"), [200], id="HTTP/1.0"),
        pytest.param(post(RAW_BODY, "connection: close, Upgrade", "upgrade: h2c"), [200], id="the last request"),
        pytest.param(
            b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" + LAST,
            [200, 200],
            id="a web socket",
        ),
        pytest.param(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n" + LAST, [400], id="a tunnel"),
        pytest.param(b"CONNECT / HTTP/1.1\r\nhost: a\r\n\r\n" + LAST, [400], id="a tunnel to a path"),
    ],
)
@pytest.mark.parametrize("size", [1, 65536], ids=["bytes", "whole"])
def test_a_client_that_offers_another_protocol_is_answered_in_http_1_1(serving, request_bytes, statuses, size) -> None:
    with serving.connect() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for start in range(0, len(request_bytes), size):
                raw.sendall(request_bytes[start : start + size])
        answer = read_all(raw)

    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)] == statuses


def test_large_headers_get_a_431(serving, eventually) -> None:
    with serving.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n")
        answer = read_all(raw)
        eventually(lambda: not serving.worker.connections.by_phase["closing"], "the server to wait no longer")

    assert status_of(answer) == 431
    assert b"\r\nx-request-id: " in answer
    assert code_of(answer) == "headers_too_large"


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        pytest.param(b"", 0, id="nothing"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost:", 408, id="half of the headers"),
        pytest.param(post(b"a" * 100)[:-50], 408, id="half of the body"),
        pytest.param(post(b"a" * 100, "authorization: Bearer x")[:-100], 408, id="no body"),
        pytest.param(HEALTH, 200, id="no second request"),
        pytest.param(b"PUT /health HTTP/1.1\r\ncontent-length: 9\r\n\r\n", 405, id="no body of a refused request"),
    ],
)
def test_a_client_that_takes_too_long_is_closed(serve, make_config, begin, status) -> None:
    limits = HttpLimits(head_seconds=2, body_seconds=0.2, idle_seconds=2)
    with serve(make_config(), http_limits=limits) as serving, serving.connect() as raw:
        raw.sendall(begin)
        answer = read_all(raw)

    assert status_of(answer) == status


def test_many_waiting_connections_do_not_keep_others_out(serve, make_config) -> None:
    with (
        serve(make_config(), http_limits=HttpLimits(connections=20)) as serving,
        serving.client() as client,
        ExitStack() as stack,
    ):
        lines = stack.enter_context(begun(client))
        idle = [stack.enter_context(serving.connect()) for _ in range(100)]
        for number, raw in enumerate(idle):
            raw.sendall([b"", b"GET /", post(b"a" * 100)[:-50]][number % 3])
        with serving.connect() as raw:
            raw.sendall(HEALTH)
            answer = raw.recv(65536)
            assert sum(serving.worker.connections.by_phase.values()) <= 20, "none lingers"
        closed = serving.worker.connections.closed[Closed.CROWDED]
        goes_on = next(line for line in lines if line)

    assert status_of(answer) == 200
    assert closed >= 80
    assert goes_on.startswith("data: ")


def test_a_client_that_does_not_read_its_answers_is_closed(serve, make_config, eventually) -> None:
    with serve(make_config(), http_limits=HttpLimits(write_seconds=0.2)) as serving, socket.socket() as raw:
        connections = serving.worker.connections
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(serving.url)
        raw.connect((address.hostname, address.port))
        num_sent = 0

        def ends_or_is_closed() -> bool:
            return connections.closed[Closed.WRITE_TIME] == 1 or serving.num_answers == num_sent

        while not connections.closed[Closed.WRITE_TIME]:  # until the buffers of the kernel are full
            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n")
            num_sent += 1
            eventually(ends_or_is_closed, "an answer that is sent, or a closed connection")
        eventually(lambda: sum(connections.by_phase.values()) == 0, "no open connection")

        assert connections.closed == dict.fromkeys(Closed, 0) | {Closed.WRITE_TIME: 1}


async def large_answer(scope, receive, send) -> None:
    """Answer as the routes do, with many times what the buffers of a server hold."""
    await HttpExchange(scope, receive, send).answer(200, bytes(32 * 2**20))


async def large_stream(scope, receive, send) -> None:
    """Answer with more than the buffers hold, and then with nothing for a long time."""
    exchange = HttpExchange(scope, receive, send)
    await exchange.start_events()
    for _ in range(16):
        await exchange.event(bytes(2**20))
    await exchange.gone()


@contextlib.asynccontextmanager
async def slow_client(app, connections: Connections, tls: ssl.SSLContext | None = None):
    """Yield reader and writer of a client with a small buffer, and the server."""
    server = HttpServer(Starlette(routes=[Mount("/", app)]), connections, tls=tls)
    server.config.timeout_keep_alive = 0
    listener, raw = socket.create_server(("127.0.0.1", 0)), socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    raw.connect(listener.getsockname())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    trusts = {"ssl": ssl.create_default_context(cafile=LOOPBACK), "server_hostname": "localhost"}
    reader, writer = await asyncio.open_connection(sock=raw, **({} if tls is None else trusts))
    yield reader, writer, server
    writer.transport.abort()
    server.should_exit = True
    await serving


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["HTTP", "HTTPS"])
def test_a_client_is_closed_if_it_does_not_read_on_not_if_its_answer_takes_long(is_encrypted) -> None:
    limits = HttpLimits(head_seconds=1, idle_seconds=1, write_seconds=1000)
    connections, kept = Connections(limits), []

    async def run() -> None:
        tls, loop = Certificate(LOOPBACK, LOOPBACK).context if is_encrypted else None, asyncio.get_running_loop()
        async with slow_client(large_answer, connections, tls) as (reader, writer, server):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HT")
            await reader.readexactly(1)
            (connection,) = server.server_state.connections
            with contextlib.suppress(asyncio.IncompleteReadError):
                for _ in range(5):
                    now = loop.time()
                    await reader.readexactly(4 * 2**20)
                    connections.sweep(now + limits.write_seconds)
                    kept.append(not connection.transport.is_closing())
                while not connection.flow.write_paused:  # noqa: ASYNC110 -- until all buffers are full
                    await asyncio.sleep(0.005)
            connections.sweep(loop.time() + limits.write_seconds)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())

    assert kept == [True] * 5
    assert connections.closed == dict.fromkeys(Closed, 0) | {Closed.WRITE_TIME: 1}


def test_a_client_that_read_all_so_far_is_not_closed_however_slow_it_was_before() -> None:
    connections = Connections(HttpLimits(write_seconds=1000))

    async def run() -> None:
        async with slow_client(large_stream, connections) as (reader, writer, server):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readexactly(1)
            (connection,) = server.server_state.connections
            while not connection.flow.write_paused:  # noqa: ASYNC110 -- until all buffers are full
                await asyncio.sleep(0.005)
            await reader.readexactly(16 * 2**20)
            while connection.flow.write_paused:
                await reader.read(2**16)
            connections.sweep(asyncio.get_running_loop().time() + connections.limits.write_seconds)
            assert not connection.transport.is_closing()

    asyncio.run(run())


def test_a_client_that_pipelines_and_leaves_is_no_error(serve, make_config, eventually, caplog) -> None:
    with serve(make_config()) as serving:
        with serving.connect() as raw:
            raw.sendall(HEALTH + post(json.dumps(ENDLESS).encode()) + HEALTH)
            with raw.makefile("rb") as lines:
                assert any(line.startswith(b"data:") for line in lines)
        eventually(serving.is_idle, "the end of the request")
        metrics = serving.worker.metrics.render().decode()

    assert 'ballast_requests_total{class="online",outcome="aborted"} 1.0' in metrics
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_health_is_answered_many_times_while_a_flood_of_large_bodies_is_read(serving, eventually) -> None:
    """If the event loop read the bodies, it would answer about once for each of them."""
    flood = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": ""}] * 115_000}).encode()
    request = post(flood, url="/v1/chat/completions")
    bodies, num_answers = serving.worker.bodies, 0
    with serving.client() as client, ThreadPoolExecutor(8) as pool, ExitStack() as stack:

        def answer(raw: socket.socket) -> int:
            raw.sendall(request)
            return status_of(raw.recv(65536))

        answers = [pool.submit(answer, stack.enter_context(serving.connect())) for _ in range(8)]
        eventually(lambda: bodies.used > 0, "the flood")
        while not all(each.done() for each in answers):
            num_answers += client.get("/health").status_code == 200
        statuses = {each.result() for each in answers}

    assert statuses == {400}
    assert num_answers > 2 * len(answers), "an event loop that reads the bodies answers about once for each"


def test_connections_that_all_wait_for_answers_make_a_new_one_a_503(serve, make_config) -> None:
    with serve(make_config(), http_limits=HttpLimits(connections=2)) as serving, ExitStack() as stack:
        for _ in range(2):
            raw = stack.enter_context(serving.connect())
            raw.sendall(post(json.dumps(ENDLESS).encode()))
            assert status_of(raw.recv(1000)) == 200
        with serving.connect() as raw:
            answer = read_all(raw)

    assert status_of(answer) == 503
    assert b"retry-after: 1" in answer
    assert code_of(answer) == "too_many_connections"


def test_large_bodies_beyond_the_memory_are_a_429_and_usual_requests_are_served(serving, eventually) -> None:
    worker = serving.worker
    large = json.dumps(BODY | {"user": "x", "metadata": {"a": "b" * 1_000_000}}).encode()
    limit, worker.bodies.limit = worker.bodies.limit, 1_500_000
    try:
        with serving.client() as client, serving.connect() as half:
            half.sendall(post(large)[:-1])
            received = len(large) - 1 - FREE_BYTES
            eventually(lambda: worker.bodies.used == received, "the first body to be received")
            refused = client.post("/v1/completions", content=large)
            worker.bodies.limit = received
            usual = client.post("/v1/completions", json=BODY)
            worker.bodies.limit = 1_500_000
            half.sendall(large[-1:])
            first = half.recv(65536)
            eventually(lambda: worker.bodies.used == 0, "the memory to be free")
            later = client.post("/v1/completions", content=large)
    finally:
        worker.bodies.limit = limit

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "too_many_bytes"
    assert usual.status_code == 200
    assert status_of(first) == 200
    assert later.status_code == 200


def test_bodies_that_wait_to_be_read_leave_connections_to_others() -> None:
    async def enter(readers: BodyReaders) -> None:
        async with readers.reader(SHORT_BYTES + 1):
            await asyncio.Event().wait()

    async def fill() -> Refused:
        readers = BodyReaders()
        tasks = [asyncio.create_task(enter(readers)) for _ in range(1 + MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            async with readers.reader(LONG_BYTES + 1):
                pass
        async with readers.reader(SHORT_BYTES):  # needs no thread
            pass
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with readers.reader(SHORT_BYTES + 1):  # nothing waits any more
            readers.close()
        return caught.value

    refused = asyncio.run(fill())

    assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "too_many_bodies", "1")
    assert "512 request bodies wait" in refused.message
    assert HttpLimits().connections > MOST_WAITING


def test_a_client_that_sends_on_still_receives_why_it_is_refused(serving) -> None:
    body = b"a" * (8 * 2**20)
    with serving.connect() as raw:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            raw.sendall(post(body))
        answer = read_all(raw)

    assert status_of(answer) == 413
    assert code_of(answer) == "request_too_large"


def test_a_flood_of_pipelined_requests_closes_the_connection(serving, eventually) -> None:
    before = serving.worker.connections.closed[Closed.PIPELINED]
    with serving.connect() as raw:
        raw.sendall(post(json.dumps(ENDLESS).encode()) + HEALTH * 5000)
        answer = read_all(raw)

    assert b"too_many_pipelined" not in answer, "the client would take it for the answer to the first request"
    assert serving.worker.connections.closed[Closed.PIPELINED] == before + 1
    eventually(serving.is_idle, "the endless answer to end")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(serving) -> None:
    served = serving.worker.served
    limit = served.max_model_len * served.longest_token_bytes
    with serving.client() as client:
        prompt = client.post("/v1/completions", json=BODY | {"prompt": "a" * (limit + 1)})
        messages = [{"role": "user", "content": "a" * (limit + 1)}]
        chat = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        tokens = client.post("/v1/completions", json=BODY | {"prompt": [1] * (served.max_model_len + 1)})
        empty = [{"role": "user", "content": ""}] * 115_000
        many = client.post("/v1/chat/completions", json={"model": "tiny", "messages": empty})

    for response, said in (
        (prompt, f"{limit + 1} bytes"),
        (chat, "bytes"),
        (tokens, "token ids"),
        (many, "115000 mess"),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert said in response.json()["error"]["message"]


@given(text=st.text() | st.text(alphabet=" \n\ta<|>endoftext"))
def test_no_token_stands_for_more_bytes_than_the_longest(model_dir, text) -> None:
    longest = longest_token_bytes(model_dir / "tokenizer.json")
    tokenizer = tokenizer_of(model_dir)

    assert longest is not None
    assert len(text.encode()) <= longest * len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"normalizer": {"type": "Strip"}}, id="a normalizer that drops text"),
        pytest.param({"normalizer": {"type": "NFKC"}}, id="a normalizer without a known ratio"),
        pytest.param({"pre_tokenizer": {"type": "Whitespace"}}, id="blanks that are dropped"),
        pytest.param(
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
                }
            },
            id="a split that drops text",
        ),
        pytest.param({"added_tokens": [{"content": "<m>", "lstrip": True}]}, id="a token that takes in blanks"),
        pytest.param({"model": {"type": "WordPiece", "vocab": {"a": 1}}}, id="a token for all unknown words"),
        pytest.param({"model": {"type": "BPE", "vocab": {"a": 1}}}, id="bytes that no token has"),
    ],
)
def test_a_tokenizer_that_may_drop_text_sets_no_limit(model_dir, tmp_path, change) -> None:
    found = json.loads((model_dir / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(found | change))

    assert longest_token_bytes(tmp_path / "tokenizer.json") is None
