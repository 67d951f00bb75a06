"""Fixtures: one cluster, one release and one client for the whole run, and a namespace for each test file.

The files run in the order in which a user does these things. If a test fails, events, resources, pods, logs and queues
are printed. No test is repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

# In importlib mode pytest does not change sys.path. All files share the modules in this folder.
# Some files import tests of others, to run them with fixtures of their own.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "support"))

from client import Client
from cluster import INFD, Cluster, keep_up
from images import RAY_WORKER, Image
from providers import chosen
from release import Release, install

pytest.register_assert_rewrite(*(file.stem for file in Path(__file__).parent.glob("test_*.py")))

STEPS = ("install", "apply", "serve", "batch", "ray", "ray_nodes", "vllm", "tenants", "tutorial", "backfill", "break",
         "break_parts", "fence", "change", "scale", "network", "nodes", "alerts", "prometheus_operator", "kueue",
         "releases", "upgrade")  # fmt: skip
"""The files in the order of a user's path; the last one removes the release."""
SAMPLES = Path(__file__).parents[1] / "docs" / "samples"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files: install first, then apply, and so on. The short run has no Ray, so its tests run on pods only."""
    for item in items:
        if item.path.stem.startswith("test_ray"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "short"]
    items.sort(key=lambda item: STEPS.index(item.path.stem.removeprefix("test_")))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a running cluster. One that runs already is left running; else one is created, and removed at the end."""
    provider = chosen()
    was_up = provider.is_up()
    if not was_up:
        provider.up()
    try:
        yield Cluster(provider, tmp_path_factory.mktemp("cluster"))
    finally:
        if not was_up and not keep_up():
            provider.down()


@pytest.fixture(scope="session")
def images(cluster: Cluster, request: pytest.FixtureRequest) -> dict[Image, str]:
    """Build every image from its Dockerfile and load it into the cluster. Return the id of each image."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return cluster.provider.build()


@pytest.fixture(scope="session")
def release(cluster: Cluster, images: dict[Image, str]) -> Release:
    """Package the chart and install it."""
    for resource in cluster.get(INFD) if cluster.get("crd", INFD) else ():
        cluster.kubectl("delete", INFD, resource["metadata"]["name"], "-n", resource["metadata"]["namespace"])
    return install(cluster, images)


@pytest.fixture(scope="module", autouse=True)
def rights(release: Release) -> Iterator[None]:
    """Check at the end of each file that the API server refused nothing to the operator."""
    yield
    release.check_rights()


@pytest.fixture(scope="session")
def client(cluster: Cluster, release: Release) -> Client:
    """Start the pod of a user inside the cluster."""
    return Client.start(cluster, release)


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, cluster: Cluster, release: Release) -> Iterator[str]:
    """Create a namespace for this file that admits only restricted pods."""
    stem = Path(str(request.node.path)).stem.removeprefix("test_").replace("_", "-")
    name = f"{stem}-{uuid4().hex[:4]}"
    cluster.make_namespace(name)
    yield name
    if not keep_up():
        cluster.drop_namespace(name)


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> list[str]:
    """Return the nodes. The first one carries the control plane."""
    found = cluster.provider.nodes()
    if len(found) < 3:
        pytest.skip("this needs a cluster of three nodes: see e2e/README.md")
    return found


@pytest.fixture(scope="module")
def first(request: pytest.FixtureRequest, cluster: Cluster, namespace: str) -> str:
    """Apply docs/samples/laptop.yaml and wait for its two workers. Return the name of the resource.

    A file with SLOTS sets the slots of its workers. With few slots, a job outlasts a fault on a fast machine, too.
    DRAIN_SECONDS leaves time for the answers of a pod that ends on a slow machine.
    """
    sample = SAMPLES / "laptop.yaml"
    slots, drain = (getattr(request.module, name, None) for name in ("SLOTS", "DRAIN_SECONDS"))
    if slots is None:
        cluster.apply(sample, namespace=namespace)
    else:
        manifest = yaml.safe_load(sample.read_text())
        manifest["spec"] |= {"slots": slots} | ({"rollout": {"drainSeconds": drain}} if drain else {})
        cluster.apply(manifest, namespace=namespace)
    cluster.wait_ready("laptop", namespace=namespace)
    cluster.wait_pods("laptop", 2, namespace=namespace)
    return "laptop"


@pytest.fixture(scope="module")
def queue(namespace: str, first: str) -> str:
    """Return the name of the queue of the first resource."""
    return f"{namespace}/{first}"


@pytest.fixture(scope="module")
def ray(cluster: Cluster, release: Release) -> Iterator[str]:
    """Install KubeRay, unless the cluster has it, and load the image with Ray. Return the node for the heads."""
    with cluster.addon("kuberay", "rayservices.ray.io"):
        cluster.provider.add(RAY_WORKER, everywhere=True)
        yield cluster.provider.nodes()[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a failure."""
    report = yield
    if report.failed and hasattr(item, "funcargs"):
        cluster, client = (item.funcargs.get(name) for name in ("cluster", "client"))
        if isinstance(cluster, Cluster):
            report.sections.append(("cluster", stated(cluster.report)))
        if isinstance(client, Client):
            report.sections.append(("queues", stated(client.state_of_queues)))
    return report


def stated(state: Callable[[], str]) -> str:
    """Return a state for the report of a failure, or why it cannot be read."""
    try:
        return state()
    except AssertionError as error:  # the API server or Valkey is down, or the release is gone
        return f"not available: {error}"
