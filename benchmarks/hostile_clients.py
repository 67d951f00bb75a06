"""What hostile clients cost others: `/health` and the TTFT of another client under each attack, and the memory.

python benchmarks/hostile_clients.py                  each attack for 5 s
python benchmarks/hostile_clients.py --seconds 60
python benchmarks/hostile_clients.py --only bodies

The worker is a process of its own on loopback, with the small model and without API keys. The attacker is another one.
The client that is measured asks for 8 tokens, and for `/health`, on a fresh connection each time. Other targets than a
worker that the benchmark started are not possible.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from replay import percentile
from replay.worker import HOST, worker

BODY = {"model": "tiny", "prompt": "The method returns", "max_tokens": 8, "temperature": 0, "stream": True}
LARGE = 4 * 2**20 - 200


def post(url: str, body: bytes, *, size: int | None = None) -> bytes:
    """Return a request. `size` is the announced length of the body."""
    return f"POST {url} HTTP/1.1\r\nhost: a\r\ncontent-length: {size or len(body)}\r\n\r\n".encode() + body


def hold(port: int, count: int, data: bytes, *, drip: bytes = b"") -> None:
    """Keep `count` connections open that have sent `data` and send `drip` each second."""
    held: list[socket.socket] = []
    while True:
        while len(held) < count:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((HOST, port), timeout=5))
                held[-1].sendall(data)
        time.sleep(1)
        held = [each for each in held if is_open(each, drip)]


def is_open(connection: socket.socket, drip: bytes) -> bool:
    """Send a byte more, and return whether the server still has the connection."""
    try:
        connection.setblocking(False)  # noqa: FBT003 -- the name of its parameter is `flag`
        if drip:
            connection.send(drip)
        return bool(connection.recv(65536))
    except BlockingIOError:
        return True
    except OSError:
        connection.close()
        return False


def flood(port: int, threads: int, request: bytes) -> None:
    """Send the request again and again on `threads` connections at a time."""

    def send(_: int) -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=30) as raw:
                raw.sendall(request)
                raw.recv(65536)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(send, range(threads)))


def endless_header(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=30) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
            while True:
                raw.sendall(b"a" * 65536)


def bodies(port: int) -> None:
    flood(port, 313, post("/v1/completions", json.dumps(BODY | {"metadata": {"a": "b" * LARGE}}).encode()))


def prompts(port: int) -> None:
    flood(port, 7, post("/v1/completions", json.dumps(BODY | {"prompt": "a b " * (LARGE // 4 - 100)}).encode()))


def chats(port: int) -> None:
    messages = [{"role": "user", "content": ""}] * 115_000
    flood(port, 8, post("/v1/chat/completions", json.dumps({"model": "tiny", "messages": messages}).encode()))


def idle(port: int) -> None:
    hold(port, 1000, b"")


def slow_headers(port: int) -> None:
    hold(port, 300, b"GET /health HTTP/1.1\r\n", drip=b"x: a\r\n")


def half_bodies(port: int) -> None:
    hold(port, 200, post("/v1/completions", b"{" + b" " * 65536, size=LARGE), drip=b" ")


ATTACKS: dict[str, Callable[[int], None] | None] = {
    "none": None,
    "bodies": bodies,
    "endless_header": endless_header,
    "idle": idle,
    "slow_headers": slow_headers,
    "half_bodies": half_bodies,
    "prompts": prompts,
    "chats": chats,
}


def ask(port: int, method: str, path: str, body: bytes | None) -> float | None:
    """Return the seconds to the first byte of the answer's body; None if the request failed."""
    begin = time.perf_counter()
    client = http.client.HTTPConnection(HOST, port, timeout=30)
    try:
        client.request(method, path, body)
        response = client.getresponse()
        response.read(1)
        seconds = time.perf_counter() - begin
        response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        client.close()
    return seconds if response.status == 200 else None


def measure(port: int, seconds: float) -> tuple[list[float], list[float], int]:
    """Return the times of `/health`, the times to first tokens, and the requests that failed."""
    health: list[float | None] = []
    ttft: list[float | None] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        health.append(ask(port, "GET", "/health", None))
        ttft.append(ask(port, "POST", "/v1/completions", json.dumps(BODY).encode()))
        time.sleep(0.01)
    failed = sum(found is None for found in [*health, *ttft])
    return [found for found in health if found], [found for found in ttft if found], failed


def p99(values: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * percentile(values, 99) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="duration of each attack")
    parser.add_argument("--only", choices=ATTACKS, nargs="+", default=list(ATTACKS))
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print("attack           /health p99  TTFT p50  TTFT p99  failed  asked  RSS after    peak")
    print("                          ms        ms        ms                       MiB     MiB")
    for name in options.only:
        with worker() as running:
            measure(running.port, 1)
            attack = ATTACKS[name]
            attacker = spawn.Process(target=attack, args=(running.port,), daemon=True) if attack else None
            if attacker is not None:
                attacker.start()
                time.sleep(1)
            health, ttft, failed = measure(running.port, options.seconds)
            if attacker is not None:
                attacker.kill()
                attacker.join()
            middle = 1000 * statistics.median(ttft) if ttft else float("nan")
            asked = len(health) + len(ttft) + failed
            print(
                f"{name:<16} {p99(health):11.1f} {middle:9.1f} {p99(ttft):9.1f} {failed:7} {asked:6} "
                f"{running.mebibytes():10.0f} {running.mebibytes('VmHWM'):7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
