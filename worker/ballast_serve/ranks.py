"""The further nodes of a replica whose model spans several nodes.

Serve makes a placement group for the replica, with one bundle on each node. The replica has the first bundle. An actor
in each other bundle runs `ballast-vllm --node-rank` as a child process. Ray ends the actors with the replica.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import ray
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_vllm.arguments import NodeRank
from ballast_worker.errors import NotServed

log = Log(__name__)

POLL_SECONDS = 1.0
MOST_LINES = 50
"""Lines of the log of a node that ended, which go with it."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class EndedNode:
    """How a node ended."""

    why: str
    output: str = ""
    """The last lines of its log."""


class Rank:
    """The actor of a further node."""

    def __init__(self, text: str, rank: int, master: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-rank-")
        path = Path(self._directory.name) / "worker.yaml"
        path.write_text(text, encoding="utf-8")
        self._log = path.with_name("log")
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "ballast_vllm", "--config", path, "--node-rank", str(rank), "--master", master],
            stdout=self._log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_HOST_IP": get_node_ip_address()},
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - no other thread of the actor holds a lock
        )

    def ended(self) -> EndedNode | None:
        """Return the exit code of the process and the end of its log if it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES:]
        return EndedNode(f"exit code {code}: {lines[-1] if lines else 'no output'}", "\n".join(lines))


class Ranks:
    """The other nodes, as the replica sees them."""

    def __init__(self, config: WorkerConfig, path: Path) -> None:
        """Start an actor in each bundle but the first.

        Raises:
            NotServed: the placement group of the replica has too few bundles.
        """
        group = get_current_placement_group()
        found = 0 if group is None else len(group.bundle_specs)
        if found != config.runtime.nodes:
            raise NotServed(
                f"runtime.nodes is {config.runtime.nodes}, but the replica has {found} placement group bundles. Set "
                "placement_group_bundles of the deployment, one for each node"
            )
        self.failure: str | None = None
        """Why the model cannot be computed any longer."""
        self.has_started = False
        """Whether vLLM has started in this process."""
        self.has_killed = False
        """Whether `watch` has ended the start."""
        self._is_over = threading.Event()
        address = get_node_ip_address()
        self.first = NodeRank(0, address, _free_port())
        gpus = group.bundle_specs[0].get("GPU", 0)
        text = path.read_text(encoding="utf-8")
        self._actors = {
            rank: ray.remote(Rank)
            .options(
                num_cpus=1,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote(text, rank, f"{address}:{self.first.port}")
            for rank in range(1, config.runtime.nodes)
        }

    def watch(self) -> None:
        """Set `failure` when a node ended. This needs a thread: vLLM blocks the event loop while it starts.

        It would wait ten minutes for a node that ended. So end its engine, which ends the start.
        """
        while self.failure is None and not self._is_over.wait(POLL_SECONDS):
            for rank, actor in self._actors.items():
                try:
                    ended = ray.get(actor.ended.remote())
                except ray.exceptions.RayError as error:
                    ended = EndedNode(f"its node or its process is gone ({type(error).__name__})")
                if ended is not None and not self._is_over.is_set():
                    log.error("a node of the model ended", node=rank, because=ended.why, output=ended.output)
                    self.failure = f"Node {rank} of the model ended: {ended.why}"
        while not (self.has_started or self._is_over.wait(POLL_SECONDS)):
            for engine in multiprocessing.active_children():
                self.has_killed = True
                engine.kill()  # Ray ends its workers, which are in the process group of the replica

    def stop_watching(self) -> None:
        """Take the end of a node for intended from now on."""
        self._is_over.set()

    def end(self) -> None:
        """End all other nodes."""
        self.stop_watching()
        for actor in self._actors.values():
            ray.kill(actor)


@contextlib.contextmanager
def other_nodes(config: WorkerConfig, path: Path) -> Iterator[Ranks | None]:
    """Run the other nodes of the model; None if it has one node.

    Raises:
        NotServed: a node ended before vLLM has started in this process.
    """
    if config.runtime.nodes == 1:
        yield None
        return
    os.environ["VLLM_HOST_IP"] = get_node_ip_address()
    ranks = Ranks(config, path)
    threading.Thread(target=ranks.watch, name="other-nodes", daemon=True).start()
    try:
        yield ranks
    except Exception as error:
        if ranks.failure is None or ranks.has_started:
            raise
        # Without a kill, this node failed by itself, and the other one may have ended because of it.
        raise NotServed(ranks.failure if ranks.has_killed else f"{ranks.failure}. This node: {error}") from error
    finally:
        ranks.end()


def _free_port() -> int:
    with socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
