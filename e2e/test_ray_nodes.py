"""Workers on Ray on three nodes, by the tests of plain pods. See `test_ray.py`."""

# ruff: noqa: F401, F811 - pytest finds imported tests and fixtures by their names
from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from on_ray import kuberay_on, on_ray, started
from test_nodes import (
    RESOURCE,
    idle_node,
    once,
    test_a_drained_node_loses_no_request_and_no_attempt,
    test_a_node_that_loses_power_loses_no_item_and_its_worker_starts_elsewhere,
    test_a_worker_that_is_cut_off_drops_its_items_and_returns_without_a_second_result,
    test_workers_spread_over_the_zones,
    zones,
)


@pytest.fixture(scope="module")
def spread(cluster: Cluster, namespace: str, ray: str, zones: dict[str, str]) -> Iterator[str]:
    """Run a worker on each of three nodes."""
    assert len(set(zones.values())) == 3
    with kuberay_on(cluster, ray):
        yield from started(cluster, on_ray(RESOURCE, ray), namespace)
