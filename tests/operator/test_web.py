"""Clients of the operator's port: none holds up the event loop, or keeps the kubelet out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from ballast_api.scrape_budget import MOST_SECONDS, SHARE, ScrapeBudget
from ballast_operator import web
from ballast_operator.metrics import Metrics


class SlowMetrics(Metrics):
    """Takes some time on its own clocks, and calls `meanwhile`."""

    def __init__(self, takes: float, meanwhile: Callable[[], object] = lambda: None, *, waits: float = 0.0) -> None:
        super().__init__()
        self.now, self.computed, self.rendered = 0.0, 0.0, 0
        self._takes, self._waits, self._meanwhile = takes, waits, meanwhile

    def text(self) -> bytes:
        self._meanwhile()
        self.now += self._takes + self._waits
        self.computed += self._takes
        self.rendered += 1
        return super().text()


def make_web(metrics: SlowMetrics) -> web.Web:
    return web.Web(
        metrics,
        is_alive=lambda: True,
        unready=lambda: "",
        refresh=lambda: None,
        seconds=lambda: metrics.now,
        computed=lambda: metrics.computed,
    )


async def get(port: int, path: str) -> bytes:
    """Return the answer to a request. The connection ends with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def test_scrapes_share_a_part_of_the_time() -> None:
    budget, spent, takes = ScrapeBudget(), 0.0, 0.05
    for milliseconds in range(60_000):
        if budget.has_left(milliseconds / 1000):
            budget.spend(takes)
            spent += takes

    assert SHARE * 60 <= spent <= SHARE * 60 + MOST_SECONDS + takes


@pytest.mark.parametrize(("takes", "waits", "rendered"), [(2 * MOST_SECONDS, 0.0, 2), (0.0, 2 * MOST_SECONDS, 6)])
def test_many_scrapes_get_the_text_of_one_if_each_takes_long(takes: float, waits: float, rendered: int) -> None:
    """A scrape that waits for other threads of a busy process takes nothing from them."""
    metrics = SlowMetrics(takes, waits=waits)

    async def scrape() -> set[bytes]:
        served = make_web(metrics)
        port = await served.start("127.0.0.1", 0)
        found = {(await get(port, "/metrics")).partition(b"\r\n\r\n")[2] for _ in range(5)}
        metrics.now += 60
        await get(port, "/metrics")
        await served.stop()
        return found

    (text,) = asyncio.run(scrape())

    assert b"ballast_operator_active" in text
    assert metrics.rendered == rendered


def test_the_event_loop_goes_on_while_metrics_are_rendered() -> None:
    begun, may_end, waited = threading.Event(), threading.Event(), list[bool]()

    def render() -> None:
        begun.set()
        waited.append(may_end.wait(10))

    async def scrape() -> bytes:
        served = make_web(SlowMetrics(0.0, render))
        port = await served.start("127.0.0.1", 0)
        scraping = asyncio.create_task(get(port, "/metrics"))
        await asyncio.to_thread(begun.wait, 10)
        answer = await get(port, "/healthz")
        may_end.set()
        await scraping
        await served.stop()
        return answer

    assert asyncio.run(scrape()).endswith(b"ok\n")
    assert waited == [True]


def test_a_new_client_is_served_while_others_keep_all_connections_open() -> None:
    async def crowd() -> tuple[list[bytes], list[bool]]:
        served = make_web(SlowMetrics(0.0))
        port = await served.start("127.0.0.1", 0)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * web.MOST_CONNECTIONS)]
        answers = [await get(port, path) for path in ("/healthz", "/readyz")]
        ended = []
        for number, (reader, _) in enumerate(idle):
            if number < 2 * web.MOST_CONNECTIONS:
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
            ended.append(reader.at_eof() or reader.exception() is not None)
        for _, writer in idle:
            writer.close()
        await served.stop()
        return answers, ended

    answers, ended = asyncio.run(crowd())

    assert all(answer.endswith(b"ok\n") for answer in answers)
    assert (ended[: 2 * web.MOST_CONNECTIONS], ended[-1]) == ([True] * 2 * web.MOST_CONNECTIONS, False)


@pytest.mark.parametrize("num_addresses", [1, 6])
def test_a_flood_closes_no_connection_of_another_address(num_addresses: int) -> None:
    async def flood() -> bytes:
        served = make_web(SlowMetrics(0.0))
        port = await served.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0))
        others = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{1 + number % num_addresses}", 0))
            for number in range(3 * web.MOST_CONNECTIONS)
        ]
        await get(port, "/healthz")
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read()
        for _, other in (*others, (reader, writer)):
            other.close()
        await served.stop()
        return answer

    assert asyncio.run(flood()).endswith(b"ok\n")


def test_a_client_that_sends_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same timer ends the connection of a client that reads nothing."""
    monkeypatch.setattr(web, "CONNECTION_SECONDS", 0.0)

    async def wait() -> None:
        served = make_web(SlowMetrics(0.0))
        port = await served.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        await served.stop()

    asyncio.run(wait())
