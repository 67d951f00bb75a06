"""The same on a Kubernetes cluster: random kills of every component, with jobs and online requests.

It uses parts of `e2e/`: the cluster of PROVIDER, the images of the Dockerfiles, the chart, and a client pod. It needs
what `make e2e` needs, and installs the release again. One node is enough.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "e2e" / "support"))

import jobs  # noqa: E402  found in e2e/support
from children import wait_tidy  # noqa: E402
from client import Client  # noqa: E402
from cluster import Cluster, is_ready, until  # noqa: E402
from endpoints import Record, recorded  # noqa: E402
from online import loop  # noqa: E402
from providers import Local, chosen  # noqa: E402
from release import NAME, NAMESPACE, Release, install  # noqa: E402

RESOURCE = "laptop"
SLOTS = 4
"""Of each worker. With few slots, there is work during most faults."""
ITEMS, TOKENS = 400, 64
BACKLOG = 200
READY_SECONDS = 400
"""The kubelet waits up to five minutes before it starts a container again that has often ended."""
SETTLE_SECONDS = 3600
NOTICED_SECONDS = 5
"""The Service sends requests to a killed container until the kubelet notices."""
PARTS_OF_ANY_NODE = ("kubelet", "apiserver", "etcd")
"""Components that each provider can restart."""
PARTS_OF_LOCAL = ("controller-manager", "scheduler", "proxy", "coredns")


def run_on_cluster(options: argparse.Namespace) -> int:
    """Install, break things, check; return 1 if a check failed."""
    provider = chosen()
    was_up = provider.is_up()
    if not was_up:
        provider.up()
    try:
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(provider, Path(folder))
            release = install(cluster, provider.build())
            chaos = ClusterChaos(cluster, release, Client.start(cluster, release), options)
            problems = chaos.run()
    finally:
        if not was_up:
            provider.down()
    chaos.print_table(problems)
    return 1 if problems else 0


@dataclass
class ClusterChaos:
    """One run on a cluster."""

    cluster: Cluster
    release: Release
    client: Client
    options: argparse.Namespace
    namespace: str = field(default_factory=lambda: f"chaos-{uuid4().hex[:4]}")
    kills: Counter[str] = field(default_factory=Counter)
    submitted: list[jobs.Submitted] = field(default_factory=list)
    online: dict[str, Any] = field(default_factory=dict)
    excused: int = 0
    killed_at: list[float] = field(default_factory=list)
    """Unix times at which a worker was killed."""
    broken: list[tuple[float, float, str]] = field(default_factory=list)
    """Begin and end of each fault in Unix time, with its name."""
    endpoints: Record = field(default_factory=Record)
    """The ready endpoints of the Service during the run."""

    @property
    def queue(self) -> str:
        """Return the queue of the resource."""
        return f"{self.namespace}/{RESOURCE}"

    def run(self) -> list[str]:
        """Run to the end, and return the problems found."""
        rng = random.Random(self.options.seed)
        print(f"seed {self.options.seed}, namespace {self.namespace}", flush=True)
        self.cluster.make_namespace(self.namespace)
        manifest = yaml.safe_load((ROOT / "docs" / "samples" / "laptop.yaml").read_text())
        # Each kill of a worker spends an attempt of the items that it holds.
        manifest["spec"] |= {"slots": SLOTS, "offline": {"maxAttempts": 100}}
        self.cluster.apply(manifest, namespace=self.namespace)
        self.cluster.wait_ready(RESOURCE, namespace=self.namespace)
        self.cluster.wait_pods(RESOURCE, 2, namespace=self.namespace)
        longest = 60 * self.options.minutes + SETTLE_SECONDS
        # The address of the Service, because a restart of the cluster's DNS is no fault of Ballast.
        address = self.cluster.get("service", RESOURCE, namespace=self.namespace)["spec"]["clusterIP"]
        with (
            recorded(self.cluster, RESOURCE, namespace=self.namespace, is_patient=True) as self.endpoints,
            loop(self.client, self.namespace, RESOURCE, host=address, longest=longest) as online,
        ):
            self._break_things(rng)
            problems = self._settle()
            self.online = online.stop()
        problems += self._lost_requests(self.online["failures"])
        return problems + self._check()

    def _break_things(self, rng: random.Random) -> None:
        until_at = time.monotonic() + 60 * self.options.minutes
        faults = self._faults(rng)
        while time.monotonic() < until_at and (not self.options.kills or self.kills.total() < self.options.kills):
            self._submit()
            name = rng.choice(sorted(faults))
            began = time.time()
            faults[name]()
            self.broken.append((began, time.time(), name))
            self.kills[name] += 1
            print(f"{self.kills.total():5} {name}, {len(self.submitted)} jobs", flush=True)
            until(self._answers, seconds=READY_SECONDS, said=f"the cluster answers after {name}")
            time.sleep(rng.expovariate(1 / self.options.pause))

    def _faults(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        """Return the faults by name."""
        cluster = self.cluster
        parts = PARTS_OF_ANY_NODE + (PARTS_OF_LOCAL if isinstance(cluster.provider, Local) else ())
        return {
            "container of a worker killed": lambda: self._kill_worker(rng),
            "pod of a worker deleted by force": lambda: self._delete_worker(rng),
            "Valkey killed": lambda: cluster.kill(f"{NAME}-valkey-0", namespace=NAMESPACE),
            "pod of Valkey deleted": lambda: self._delete(f"{NAME}-valkey-0", NAMESPACE),
            "an operator killed": lambda: cluster.kill(self._operator(rng), namespace=NAMESPACE),
            "pod of an operator deleted": lambda: self._delete(self._operator(rng), NAMESPACE),
            **{f"{part} restarted": (lambda part=part: cluster.provider.restart(part)) for part in parts},
        }

    def _kill_worker(self, rng: random.Random) -> None:
        pod = self._one_of_two(rng)
        self.killed_at.append(time.time())
        self.cluster.kill(pod, namespace=self.namespace)

    def _delete_worker(self, rng: random.Random) -> None:
        pod = self._one_of_two(rng)
        self.killed_at.append(time.time())
        self._delete(pod, self.namespace)

    def _one_of_two(self, rng: random.Random) -> str:
        """Wait until both workers serve, so that a request has somewhere to go, and return the name of one."""
        pods = self.cluster.wait_pods(RESOURCE, 2, namespace=self.namespace, seconds=READY_SECONDS)
        return str(rng.choice(pods)["metadata"]["name"])

    def _operator(self, rng: random.Random) -> str:
        """Wait until an operator runs, and return the name of one."""

        def running() -> list[str]:
            return sorted(pod["metadata"]["name"] for pod in self.release.pods("operator") if is_ready(pod))

        return rng.choice(until(running, seconds=READY_SECONDS, said="an operator runs"))

    def _delete(self, pod: str, namespace: str) -> None:
        self.cluster.kubectl("delete", "pod", pod, "-n", namespace, "--force", "--grace-period=0", "--wait=false")

    def _answers(self) -> bool:
        """Return whether the API server, the queue and the operators' pods are there again."""
        if self.cluster.kubectl("get", "--raw", "/readyz", check=False).returncode:
            return False
        try:
            return self.release.valkey("ping", check=False) == "PONG" and bool(self.release.pods("operator"))
        except AssertionError:  # kubectl found the API server away again
            return False

    def _submit(self) -> None:
        """Submit a job while few items wait. Valkey may be away: then the next round does."""
        try:
            waiting = self.submitted[-1].counts["waiting"] if self.submitted else 0
            if waiting < BACKLOG:
                name = f"job-{len(self.submitted)}"
                self.submitted.append(jobs.submit(self.client, self.queue, ITEMS, most=TOKENS, name=name))
        except AssertionError as error:
            print(f"      no job submitted: {str(error)[:200]}", flush=True)

    def _settle(self) -> list[str]:
        """Wait until everything runs again."""
        self.cluster.wait_pods(RESOURCE, 2, namespace=self.namespace, seconds=READY_SECONDS)
        rollout = ("rollout", "status", f"deployment/{NAME}-operator", "-n", NAMESPACE, "--timeout=180s")
        self.cluster.kubectl(*rollout, seconds=200)
        self.cluster.wait_ready(RESOURCE, namespace=self.namespace, seconds=READY_SECONDS)
        problems = []
        for job in self.submitted:
            try:
                job.finish(seconds=900, compared=2)
            except AssertionError as error:
                problems.append(f"{job.name}: {error}")
        return problems

    def _lost_requests(self, failures: list[dict[str, Any]]) -> list[str]:
        """Return the failures of requests that no killed worker had."""
        unexcused = [
            failure
            for failure in failures
            if not any(
                failure["at"] - NOTICED_SECONDS <= at <= failure["at"] + failure["seconds"] + 1 for at in self.killed_at
            )
        ]
        self.excused = len(failures) - len(unexcused)
        self._print_timeline(failures, unexcused)
        return [f"online request failed: {failure}" for failure in unexcused]

    def _print_timeline(self, failures: list[dict[str, Any]], unexcused: list[dict[str, Any]]) -> None:
        """Print the faults, the ready endpoints and the failed requests in the order of time."""
        lines = [(began, f"{name} (until {clock(ended)})") for began, ended, name in self.broken]
        states = zip(self.endpoints.times, self.endpoints.ready, strict=True)
        lines += [(at, f"    {ready} endpoints ready") for at, ready in states]
        for failure in failures:
            mark = "FAILED" if failure in unexcused else "excused"
            lines.append((failure["at"], f"    {mark} {failure['seconds']:.1f} s: {failure['failure']}"))
        for at, text in sorted(lines):
            print(f"{clock(at)} {text}")

    def _check(self) -> list[str]:
        """Return what leaked: leases, slots, blocks, children, rights."""
        problems = []
        for pod in self.cluster.pods(RESOURCE, namespace=self.namespace):
            for name, value in self.cluster.metrics(pod).items():
                is_held = name.startswith(("ballast_leases", "ballast_slots{", "ballast_requests_waiting"))
                if value and (is_held or name == 'ballast_kv_blocks{state="used"}'):
                    problems.append(f"{pod['metadata']['name']}: {name} is {value:g} without any work")
        problems += self.client.script("integrity.py", self.queue, *self.client.redis)
        try:
            wait_tidy(self.cluster, self.namespace)
            self.release.check_rights()
            self.cluster.drop_namespace(self.namespace)
        except AssertionError as error:
            problems.append(str(error))
        return problems

    def print_table(self, problems: list[str]) -> None:
        """Print what was broken, and what came of it."""
        rows = [
            ("seed", self.options.seed),
            *sorted(self.kills.items()),
            ("all", self.kills.total()),
            ("jobs", len(self.submitted)),
            ("items with one result each", sum(job.count for job in self.submitted)),
            ("online requests", self.online.get("sent", 0)),
            ("of these, lost with a killed worker", self.excused),
            ("problems", len(problems)),
        ]
        for name, value in rows:
            print(f"| {name:<40} | {value!s:>10} |")
        for problem in problems:
            print(f"PROBLEM: {problem}")
        print(json.dumps({"seed": self.options.seed, "kills": self.kills, "problems": len(problems)}))


def clock(at: float) -> str:
    """Return a Unix time as hours, minutes and seconds in UTC."""
    return f"{time.strftime('%H:%M:%S', time.gmtime(at))}.{int(10 * at) % 10}"
