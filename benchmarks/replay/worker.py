"""A worker process with the small model, for benchmarks that reach it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ballast_cli.demo.polling import read_metrics
from replay import MODEL

HOST = "127.0.0.1"
START_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Running:
    """A worker process."""

    port: int
    pid: int
    path: Path
    """The file of its configuration."""
    config: dict[str, Any]

    def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics`."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=60) as answer:
            return read_metrics(answer.read().decode())

    def mebibytes(self, what: str = "VmRSS") -> float:
        """Return the resident memory (`VmRSS`) or its peak (`VmHWM`)."""
        found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0


@contextlib.contextmanager
def worker(**sections: Any) -> Iterator[Running]:
    """Start a worker with the small model and these sections of its configuration, on a free port."""
    with tempfile.TemporaryDirectory() as directory:
        path, log = Path(directory, "worker.yaml"), Path(directory, "log")
        config = {"model": {"uri": str(MODEL), "servedName": "tiny"}, "engine": {"threads": 1}, "slots": 16} | sections
        config["runtime"] = {"port": 0} | sections.get("runtime", {})
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "ballast_worker", "--config", str(path)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stderr=output, stdout=subprocess.DEVNULL)
        try:
            while (found := re.search(r"listening address=http://[^:]+:(\d+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"the worker did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield Running(int(found[1]), process.pid, path, config)
        finally:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server that the process runs accepts requests."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise SystemExit(f"{url} did not become ready")


async def stream(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], fields: dict[str, Any], header: bytes = b""
) -> tuple[float, float]:
    """Send a greedy completion over a connection, and return the seconds to its first token and to its end."""
    reader, writer = connection
    body = json.dumps(fields | {"temperature": 0, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-length: {len(body)}\r\n".encode()
    sent = time.perf_counter()
    writer.write(head + header + b"content-type: application/json\r\n\r\n" + body)
    first, seen = None, b""
    while b"data: [DONE]" not in seen:
        got = await reader.read(65536)
        assert got, seen
        if first is None and b"data: " in got:
            first = time.perf_counter() - sent
        seen = (seen + got)[-4096:]
    assert first is not None
    return first, time.perf_counter() - sent
