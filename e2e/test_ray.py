"""Workers on Ray: the promises of plain pods, by the same tests, and those about the head of a Ray cluster.

Imported tests run with the fixtures of this file, which make the same resources with `spec.runtime.ray`.
"""

# ruff: noqa: F401, F811 - pytest finds imported tests and fixtures by their names
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import yaml
from children import wait_tidy
from client import Client
from cluster import INFD, Cluster, is_ready, until
from on_ray import START_SECONDS, on_ray, started, wait_gone
from online import loop
from test_apply import test_all_is_well_and_configured
from test_batch import (
    test_a_line_that_cannot_be_served_is_an_error_result_beside_the_others,
    test_items_of_any_redis_client_with_the_least_of_rights_are_served_as_well,
)
from test_break import (
    DRAIN_SECONDS,
    Held,
    holding,
    once,
    test_a_pod_that_is_deleted_gives_its_items_back_and_no_token_is_computed_twice,
    test_answers_that_run_on_a_pod_in_deletion_end_whole,
    test_force_deletion_of_the_pod_loses_nothing,
    test_sigkill_of_the_container_loses_nothing,
)
from test_change import (
    WELL,
    conditions,
    job,
    test_a_hot_patch_of_the_reservation_reaches_the_same_pods,
    uids,
)
from test_serve import (
    test_a_wrong_model_name_is_refused_with_the_name_that_is_served,
    test_chat_is_answered_whole,
    test_streamed_greedy_text_is_what_transformers_gives,
    test_the_service_spreads_requests_over_every_worker,
    url,
)

LAPTOP = Path(__file__).parents[1] / "docs" / "samples" / "laptop.yaml"
SLOTS, MORE_SLOTS = 4, 6
"""Of each worker. With few slots, a job outlasts a fault on a fast machine, too."""
ITEMS, TOKENS = 5000, 128
"""Of a job that has long to go when the pods of the resource change."""


@pytest.fixture(scope="module")
def first(cluster: Cluster, namespace: str, ray: str) -> Iterator[str]:
    """Run docs/samples/laptop.yaml on Ray."""
    manifest = yaml.safe_load(LAPTOP.read_text())
    manifest["spec"] |= {"slots": SLOTS, "rollout": {"drainSeconds": DRAIN_SECONDS}}
    yield from started(cluster, on_ray(manifest, ray), namespace)


@pytest.fixture(params=["worker", "worker and head"])
def beside(cluster: Cluster, namespace: str, first: str, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Return the other pods that end at the same time: none, or the head, as if both were on a node that is drained."""
    yield [] if request.param == "worker" else names(heads(cluster, first, namespace))
    wait_head(cluster, first, namespace)


@pytest.mark.parametrize("part", ["head", "storage"])
def test_a_part_of_ray_that_dies_stops_no_request_and_no_item(
    cluster: Cluster,
    namespace: str,
    first: str,
    holding: Held,
    part: str,
) -> None:
    running, _ = holding
    before = uids(cluster, first, namespace)
    with loop(running.client, namespace, first) as online:
        if part == "head":
            (old,) = heads(cluster, first, namespace)
            name = old["metadata"]["name"]
            cluster.kubectl("delete", "pod", name, "-n", namespace, "--force", "--grace-period=0", "--wait=false")
            until(lambda: name not in names(heads(cluster, first, namespace)), seconds=60, said="the head is gone")
        else:
            cluster.kill(f"{first}-ballast-gcs-0", namespace=namespace)
            cluster.wait_restarted(f"{first}-ballast-gcs-0", 1, namespace=namespace)
        wait_head(cluster, first, namespace)
        online.wait_more()
        running.finish(seconds=900, compared=4)
        said = online.stop()

    assert said["failures"] == []
    assert uids(cluster, first, namespace) == before
    wait_well(cluster, first, namespace)
    cluster.hot_patch(first, {"slo": {"ttftMilliseconds": 900 if part == "head" else 800}}, namespace=namespace)
    assert uids(cluster, first, namespace) == before


def test_a_change_of_slots_restarts_the_workers_in_their_pods_and_no_request_fails(
    cluster: Cluster, namespace: str, first: str, client: Client
) -> None:
    before = uids(cluster, first, namespace)
    with loop(client, namespace, first) as online:
        cluster.patch(first, {"slots": MORE_SLOTS}, namespace=namespace)
        wanted = [MORE_SLOTS, MORE_SLOTS]
        until(lambda: slots(cluster, first, namespace) == wanted, seconds=START_SECONDS, said=f"slots are {wanted}")
        wait_well(cluster, first, namespace)
        online.wait_more()
        said = online.stop()

    assert said["failures"] == []
    assert uids(cluster, first, namespace) == before


def test_replicas_follow_the_resource_and_no_request_fails(
    cluster: Cluster,
    namespace: str,
    first: str,
    client: Client,
    queue: str,
) -> None:
    work = jobs.submit(client, queue, ITEMS, most=TOKENS)
    assert work.wait_leased() > 0
    with loop(client, namespace, first) as online:
        for replicas in (1, 2):
            cluster.kubectl("scale", f"infd/{first}", "-n", namespace, f"--replicas={replicas}")
            assert work.counts["succeeded"] < work.count, "the job was over before"
            cluster.wait_pods(first, replicas, namespace=namespace, seconds=START_SECONDS)
        work.finish(seconds=900, compared=3)
        said = online.stop()

    assert said["failures"] == []
    wait_tidy(cluster, namespace)


def test_a_change_of_the_pods_moves_to_a_second_ray_cluster_and_no_request_fails(
    cluster: Cluster, namespace: str, first: str, client: Client
) -> None:
    before = uids(cluster, first, namespace)
    with loop(client, namespace, first) as online:
        cluster.patch(first, {"template": {"annotations": {"team": "chat"}}}, namespace=namespace)
        until(
            lambda: not before & uids(cluster, first, namespace) and len(heads(cluster, first, namespace)) == 1,
            seconds=2 * START_SECONDS,
            said="the first Ray cluster is gone",
        )
        wait_well(cluster, first, namespace)
        online.wait_more()
        said = online.stop()

    assert said["failures"] == []


def test_a_resource_moves_to_plain_pods_and_back_without_losing_a_request_or_an_item(
    cluster: Cluster,
    namespace: str,
    first: str,
    client: Client,
    queue: str,
) -> None:
    there = cluster.get(INFD, first, namespace=namespace)["spec"]["runtime"]
    work = jobs.submit(client, queue, ITEMS, most=TOKENS)
    with loop(client, namespace, first) as online:
        for runtime, gone in ((None, "rayservice"), (there, "deployment")):
            cluster.patch(first, {"runtime": runtime}, namespace=namespace)
            until(
                lambda gone=gone: cluster.get(gone, first, namespace=namespace) is None,
                seconds=START_SECONDS,
                said=f"no {gone}",
            )
            cluster.wait_pods(first, 2, namespace=namespace, seconds=START_SECONDS)
        work.finish(seconds=900, compared=4)
        said = online.stop()

    assert said["failures"] == []
    wait_well(cluster, first, namespace)


def test_deletion_leaves_nothing_behind(cluster: Cluster, namespace: str, first: str, holding: Held) -> None:
    running, _ = holding
    cluster.kubectl("delete", "infd", first, "-n", namespace, "--timeout=60s", seconds=70)

    wait_gone(cluster, first, namespace)
    assert running.counts["leased"] == 0
    assert running.counts["waiting"] > 0
    assert running.client.differences(running.queue) == []


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["metadata"]["name"] for each in found]


def heads(cluster: Cluster, name: str, namespace: str) -> list[dict[str, Any]]:
    """Return the heads of a resource."""
    found: list[dict[str, Any]] = cluster.get("pods", namespace=namespace, selector=f"ballast.dev/ray-head={name}")
    return found


def wait_well(cluster: Cluster, name: str, namespace: str) -> None:
    """Wait until the conditions of a resource report no problem."""
    until(lambda: conditions(cluster, name, namespace) == WELL, seconds=120, said=f"conditions are {WELL}")


def wait_head(cluster: Cluster, name: str, namespace: str) -> None:
    """Wait until the only head is ready."""

    def ready() -> list[bool]:
        return [is_ready(pod) for pod in heads(cluster, name, namespace)]

    until(lambda: ready() == [True], seconds=START_SECONDS, said="one head is ready")


def slots(cluster: Cluster, name: str, namespace: str) -> list[float]:
    """Return the slots of each ready worker."""
    pods = cluster.ready_pods(name, namespace=namespace)
    return [cluster.metrics(pod)["ballast_slots_total"] for pod in pods]
