"""Online requests to the Service: every worker answers some, and the answers are those of the model."""

from __future__ import annotations

import pytest
from client import Client
from cluster import Cluster
from reference import greedy

PROMPTS = ("The queue module implements", "Chapter 7.", "def main(", "Once there was a ship that", "Note that the")
MODEL = "ballast-tiny"


@pytest.fixture(scope="module")
def url(cluster: Cluster, namespace: str, first: str) -> str:
    status = cluster.get("infd", first, namespace=namespace)["status"]
    return f"{status['endpoint']}/v1"


@pytest.mark.short
def test_streamed_greedy_text_is_what_transformers_gives(client: Client, url: str) -> None:
    answers = client.script("stream.py", url, MODEL, "32", *PROMPTS)

    assert [answer["text"] for answer in answers] == [greedy(prompt, 32) for prompt in PROMPTS]
    # A slow client gets the tokens that wait for it in one event: on a busy machine, no more than this is certain.
    assert any(answer["pieces"] > 1 for answer in answers)


def test_chat_is_answered_whole(client: Client, url: str) -> None:
    answer = client.script("chat.py", url, MODEL, "What is a ship?")

    assert answer["model"] == MODEL
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["text"]


@pytest.mark.short
def test_the_service_spreads_requests_over_every_worker(
    client: Client, cluster: Cluster, namespace: str, url: str
) -> None:
    pods = cluster.pods("laptop", namespace=namespace)
    before = [answered(cluster, pod) for pod in pods]

    client.script("stream.py", url, MODEL, "8", *(f"Chapter {number}." for number in range(24)))

    gained = [answered(cluster, pod) - count for pod, count in zip(pods, before, strict=True)]
    assert len(pods) == 2
    assert sum(gained) == 24
    assert min(gained) > 0


@pytest.mark.short
def test_workers_use_prebuilt_kernels_because_their_image_has_no_compiler(
    cluster: Cluster, namespace: str, first: str
) -> None:
    search = "for name in cc gcc clang tcc as ld; do command -v $name; done; true"
    for pod in cluster.pods(first, namespace=namespace):
        name = pod["metadata"]["name"]
        found = cluster.exec(name, "sh", "-c", search, namespace=namespace).stdout
        log = cluster.kubectl("logs", "-n", namespace, name).stdout

        assert found == ""
        assert "/native/prebuilt_kernels/kernels-" in log
        assert "kernels not used" not in log


def test_a_wrong_model_name_is_refused_with_the_name_that_is_served(client: Client, url: str) -> None:
    said = client.script("refused.py", url, "gpt-4", "Hello")

    assert said["status"] == 404
    assert MODEL in said["message"]


def answered(cluster: Cluster, pod: dict) -> float:
    """Return the number of online requests that a worker has answered."""
    samples = cluster.metrics(pod)
    return sum(samples[f'ballast_requests_total{{class="online",outcome="{how}"}}'] for how in ("stop", "length"))
