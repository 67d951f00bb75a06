"""Faults between workers and Redis through toxiproxy: latency, cuts, slow readers."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from ports import free_port

PROGRAM = "toxiproxy-server"
MISSING = (
    f"{PROGRAM} was not found, so this run has NO network faults. Install toxiproxy, and put it on the PATH, or set "
    "TOXIPROXY to its path."
)


def program() -> str | None:
    """Return the path of toxiproxy: TOXIPROXY, the PATH, or the folder KUBEBUILDER_ASSETS."""
    if named := os.environ.get("TOXIPROXY"):
        return named
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    beside = Path(assets, PROGRAM) if assets else None
    return shutil.which(PROGRAM) or (str(beside) if beside is not None and beside.exists() else None)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one connection, as toxiproxy describes it."""

    name: str
    toxics: tuple[dict[str, object], ...] = ()
    """Empty: the proxy closes its connections and refuses new ones."""


def _toxic(kind: str, stream: str, **attributes: int) -> dict[str, object]:
    return {"type": kind, "stream": stream, "attributes": attributes}


FAULTS = (
    Fault("latency", (_toxic("latency", "downstream", latency=150, jitter=100),)),
    Fault("cut, refused", ()),
    Fault("cut, silent", (_toxic("timeout", "upstream", timeout=0), _toxic("timeout", "downstream", timeout=0))),
    Fault("reply lost", (_toxic("timeout", "downstream", timeout=0),)),
    Fault("cut in a reply", (_toxic("limit_data", "downstream", bytes=700),)),
    Fault("reset", (_toxic("reset_peer", "downstream", timeout=30),)),
    Fault("slow reader", (_toxic("bandwidth", "downstream", rate=2),)),
    Fault("slow writer", (_toxic("bandwidth", "upstream", rate=2),)),
)


class Link:
    """The proxied connection of one worker to Redis."""

    def __init__(self, api: httpx.Client, name: str) -> None:
        self._api = api
        self._name = name
        self.port = free_port()
        self._upstream: str | None = None
        """None: Redis is away, and the proxy refuses connections."""
        self._is_made = False

    def point_to(self, host_and_port: str | None) -> None:
        """Send connections to this address from now on, or refuse them."""
        if host_and_port == self._upstream:
            return
        self._upstream = host_and_port
        if host_and_port is None:
            self._api.post(f"/proxies/{self._name}", json={"enabled": False}).raise_for_status()
            return
        body = {"name": self._name, "listen": f"127.0.0.1:{self.port}", "upstream": host_and_port, "enabled": True}
        self._api.post(f"/proxies/{self._name}" if self._is_made else "/proxies", json=body).raise_for_status()
        self._is_made = True

    def spoil(self, fault: Fault) -> None:
        """Begin a fault."""
        if self._upstream is None:
            return
        if not fault.toxics:
            self._api.post(f"/proxies/{self._name}", json={"enabled": False}).raise_for_status()
        for number, toxic in enumerate(fault.toxics):
            body = toxic | {"name": f"{number}", "toxicity": 1.0}
            self._api.post(f"/proxies/{self._name}/toxics", json=body)

    def heal(self) -> None:
        """End all faults."""
        if not self._is_made:
            return
        for toxic in self._api.get(f"/proxies/{self._name}/toxics").json():
            self._api.delete(f"/proxies/{self._name}/toxics/{toxic['name']}")
        self._api.post(f"/proxies/{self._name}", json={"enabled": self._upstream is not None}).raise_for_status()


@contextmanager
def toxiproxy(path: str) -> Iterator[httpx.Client]:
    """Run toxiproxy, and return a client of its API."""
    port = free_port()
    process = subprocess.Popen(
        [path, "-host", "127.0.0.1", "-port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as api:
            _wait_for(api)
            yield api
    finally:
        process.kill()
        process.wait()


def _wait_for(api: httpx.Client, *, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            api.get("/version").raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def draw(rng: random.Random) -> tuple[Fault, float]:
    """Return a fault and its duration in seconds."""
    return rng.choice(FAULTS), rng.uniform(0.3, 8.0)
