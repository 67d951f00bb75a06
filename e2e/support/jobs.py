"""Offline jobs of the tests, and the checks at the end of a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from client import Client
from cluster import Cluster, until
from reference import greedy

MODEL = "ballast-tiny"
OVER = {"completed", "failed", "expired", "cancelled"}


def prompt(number: int) -> str:
    """Return the prompt of an item."""
    subject = ("a ship", "the harbour", "the queue", "a storm", "the cargo")[number % 5]
    return f"Chapter {number}. This is the story of {subject}"


def lines(count: int, *, most: int = 16, name: str = "item") -> list[dict[str, Any]]:
    """Return the lines of a job with greedy items, each with at most `most` tokens."""
    return [
        {
            "custom_id": f"{name}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": prompt(number), "max_tokens": most, "temperature": 0},
        }
        for number in range(count)
    ]


@dataclass(frozen=True)
class Submitted:
    """A submitted job."""

    client: Client
    queue: str
    id: str
    count: int
    most: int
    name: str = "item"

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of items by state."""
        found: dict[str, int] = self.client.job(self.id, queue=self.queue)["counts"]
        return found

    def wait_leased(self, *, seconds: float = 60) -> int:
        """Wait until items are under lease, and return their number."""
        return until(lambda: self.counts["leased"], seconds=seconds, said=f"leases of {self.id}", pause=0.1)

    def finish(self, *, seconds: float, compared: int = 20) -> None:
        """Wait for the end of the job, and check its results (`check`)."""

        assert wait_over(self.client, self.id, queue=self.queue, seconds=seconds) == "completed"
        self.check(compared=compared)

    def check(self, *, compared: int) -> None:
        """Assert that every item has one result, the counters agree, and some texts equal those of transformers."""
        results = self.client.results(self.id, queue=self.queue)
        names = Counter(result["custom_id"] for result in results)
        counts = self.counts

        assert names == Counter(f"{self.name}-{number}" for number in range(self.count))
        assert (counts["total"], counts["succeeded"], counts["leased"]) == (self.count, self.count, 0)
        step = max(1, self.count // max(1, compared))
        numbers = range(0, self.count, step) if compared else ()
        texts = {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results}
        differing = [
            (number, texts[f"{self.name}-{number}"], wanted)
            for number in numbers
            if texts[f"{self.name}-{number}"] != (wanted := greedy(prompt(number), self.most))
        ]
        assert differing == []
        assert self.client.differences(self.queue) == []


def wait_over(client: Client, job: str, *, queue: str, seconds: float) -> str:
    """Wait until a job is over, and return its state."""

    def state() -> str:
        found = str(client.job(job, queue=queue)["state"])
        return found if found in OVER else ""

    return until(state, seconds=seconds, said=f"the end of {job}")


def results(
    client: Client, lines: list[dict[str, Any]], *, queue: str, options: tuple[str, ...] = (), seconds: float
) -> dict[str, Any]:
    """Run a job with these lines to its end, and return its results by custom_id."""
    job = client.submit(lines, queue=queue, options=options)
    wait_over(client, job, queue=queue, seconds=seconds)
    return {result["custom_id"]: result for result in client.results(job, queue=queue)}


def submit(client: Client, queue: str, count: int, *, most: int = 16, name: str = "item") -> Submitted:
    """Submit a job through the command line."""
    job = client.submit(lines(count, most=most, name=name), queue=queue, options=("--tenant", "research"))
    return Submitted(client, queue, job, count, most, name)


def leases(cluster: Cluster, pods: list[dict[str, Any]]) -> dict[str, float]:
    """Return the number of leases that each of these pods reports."""
    return {pod["metadata"]["name"]: cluster.leases(pod) for pod in pods}
