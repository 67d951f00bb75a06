"""A client that requests one completion after the other during a test, and records every failure.

It runs in the background of the client's pod, so that it continues while the API server is down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from client import NAMESPACE, POD, SCRIPTS, Client
from cluster import Cluster, until
from jobs import MODEL

LANES = ("fresh", "kept-0", "kept-1", "kept-2")


@dataclass(frozen=True)
class Loop:
    """The client and the files that it writes."""

    cluster: Cluster
    stem: str

    def samples(self) -> list[dict[str, Any]]:
        """Return the result of each request so far."""
        text = self.shell(f"cat {self.stem}.jsonl 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines()]

    def wait_more(self, count: int = 4, *, seconds: float = 60) -> None:
        """Wait until each lane has `count` more answers."""

        def had() -> list[int]:
            samples = self.samples()
            return [sum(sample["lane"] == lane for sample in samples) for lane in LANES]

        before = had()

        def enough() -> bool:
            return all(now >= then + count for now, then in zip(had(), before, strict=True))

        until(enough, seconds=seconds, said=f"{count} more online answers in each lane")

    def stop(self) -> dict[str, Any]:
        """Stop the client. Return the number of requests, the failures, and the longest latency in seconds."""
        self.shell(f"touch {self.stem}.stop")
        until(lambda: "yes" in self.shell(f"test -e {self.stem}.end && echo yes || true"), seconds=150, said="its end")
        samples = self.samples()
        found = {
            "sent": len(samples),
            "failures": [sample for sample in samples if sample["failure"]],
            "longest": round(max(sample["seconds"] for sample in samples), 2),
        }
        print(json.dumps(found))
        return found

    def shell(self, text: str, *, stdin: str | None = None) -> str:
        """Run shell commands in the client's pod."""
        return self.cluster.exec(POD, "sh", "-c", text, namespace=NAMESPACE, stdin=stdin).stdout


@contextmanager
def loop(
    client: Client, namespace: str, name: str, *, host: str = "", answer: float = 120, longest: float = 900
) -> Iterator[Loop]:
    """Send requests to the Service of a resource while the block runs. The block begins after the first answers.

    Args:
        client: The pod of the user.
        namespace: Namespace of the resource.
        name: Name of the resource.
        host: The address of one worker, in place of the Service.
        answer: Seconds after which a request without a whole answer failed.
        longest: Seconds after which the client stops.
    """
    found = Loop(client.cluster, f"/tmp/loop-{uuid4().hex[:6]}")
    place = f"{host or f'{name}.{namespace}.svc'} 8000 {MODEL} {found.stem} {longest:g} {answer:g}"
    found.shell(
        f"cat > {found.stem}.py; setsid python3 {found.stem}.py {place} >{found.stem}.log 2>&1 </dev/null &",
        stdin=(SCRIPTS / "loop.py").read_text(),
    )
    try:
        found.wait_more(2)
        yield found
    finally:
        found.shell(f"touch {found.stem}.stop; cat {found.stem}.log")
