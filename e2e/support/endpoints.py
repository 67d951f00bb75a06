"""A recorder of a Service's ready endpoints. It sees every state that the API server announces, because it watches."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from cluster import Cluster, until


@dataclass
class Record:
    """The recorded states."""

    ready: list[int] = field(default_factory=list)
    """How many endpoints were ready after each event."""
    times: list[float] = field(default_factory=list)
    """The Unix time of each event."""
    uids: set[str] = field(default_factory=set)
    """The addresses of every pod that was ready at some time."""
    slices: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The endpoints of each slice, as they were last."""

    def take(self, event: dict[str, Any]) -> None:
        """Record one event of a watch."""
        found = event["object"]
        gone = event["type"] == "DELETED"
        self.slices[found["metadata"]["name"]] = [] if gone else found.get("endpoints") or []
        known = [each for endpoints in self.slices.values() for each in endpoints]
        ready = [each for each in known if each["conditions"].get("ready")]
        self.ready.append(len(ready))
        self.times.append(time.time())
        self.uids |= {str(each["targetRef"]["uid"]) for each in ready}


@contextmanager
def recorded(cluster: Cluster, service: str, *, namespace: str, is_patient: bool = False) -> Iterator[Record]:
    """Record while the block runs. The state before the block is recorded when it begins.

    A patient recorder watches again if the API server ends the watch. Otherwise an end fails the block.
    """
    provider, record, stopped = cluster.provider, Record(), Event()
    words = ["get", "endpointslices", "-n", namespace, "-l", f"kubernetes.io/service-name={service}",
             "--watch", "--output-watch-events", "-o", "json"]  # fmt: skip
    command = [provider.program("kubectl"), "--kubeconfig", str(provider.kubeconfig), *words]
    watches: list[subprocess.Popen[str]] = []

    def watch() -> None:
        while not stopped.is_set() and (is_patient or not watches):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                watches.append(process)
                if stopped.is_set():
                    process.terminate()
                assert process.stdout is not None
                for line in process.stdout:
                    record.take(json.loads(line))
            stopped.wait(0.2)

    reader = Thread(target=watch, daemon=True)
    reader.start()
    try:
        until(lambda: record.ready, seconds=30, said="the first state of the endpoints")
        yield record
        assert is_patient or watches[0].poll() is None, "the watch ended, and later changes were not recorded"
    finally:
        stopped.set()
        watches[-1].terminate()
        reader.join(10)
