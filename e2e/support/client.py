"""A user inside the cluster: a pod with `ballast` and `openai` installed, but without the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, restricted_pod
from images import CLIENT
from release import Release

NAMESPACE = "client"
POD = "client"
SCRIPTS = Path(__file__).parents[1] / "client"
AUDIT = Path(__file__).parents[2] / "tests" / "support" / "queue_audit.py"

CONTAINER = {"image": CLIENT.name, "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}}}


def client_pod(name: str, **labels: str) -> dict[str, Any]:
    """Return a pod with the image of the user."""
    pod = restricted_pod(name, CONTAINER, mounts={"/tmp": {"emptyDir": {}}})
    return pod | {"metadata": {"name": name, "labels": labels}}


@dataclass
class Client:
    """The pod of the user."""

    cluster: Cluster
    release: Release
    ca: str = ""
    """The content of the file of authorities in the pod."""

    @classmethod
    def start(cls, cluster: Cluster, release: Release) -> Client:
        """Create the pod again."""
        # On the node that no test stops.
        pod = client_pod(POD, **{"ballast.dev/queue-client": "true"})
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cluster.provider.nodes()[0]}
        cluster.start_pods(pod, namespace=NAMESPACE)
        return cls(cluster, release)

    @property
    def redis(self) -> tuple[str, str, str]:
        """Return URL, password and authorities of the queue's server, as arguments of a script."""
        return self.release.redis_url, self.release.redis_password, self.release.redis_ca

    def script(self, name: str, *arguments: str, seconds: float = 120) -> Any:
        """Run one of the scripts in e2e/client; return its last line, decoded from JSON."""
        return self._run((SCRIPTS / name).read_text(), *arguments, seconds=seconds)

    def differences(self, queue: str) -> Any:
        """Return the differences between the values that a queue stores twice."""
        return self._run(AUDIT.read_text(), queue, *self.redis)

    def _run(self, text: str, *arguments: str, seconds: float = 120) -> Any:
        done = self.cluster.exec(POD, "python3", "-", *arguments, namespace=NAMESPACE, stdin=text, seconds=seconds)
        return json.loads(done.stdout.splitlines()[-1])

    def ballast(
        self, *arguments: str, queue: str, stdin: str | None = None, seconds: float = 120, check: bool = True
    ) -> str:
        """Run the `ballast` command. The password is only in the environment."""
        url, password, ca = self.redis
        if ca != self.ca:
            self.cluster.exec(POD, "sh", "-c", "cat > /tmp/ca.crt", namespace=NAMESPACE, stdin=ca)
            self.ca = ca
        place = [f"BALLAST_REDIS_URL={url}", f"BALLAST_REDIS_PASSWORD={password}", f"BALLAST_QUEUE={queue}"]
        place += ["BALLAST_REDIS_CA_FILE=/tmp/ca.crt"] if ca else []
        words = ["env", *place, "ballast", *arguments]
        done = self.cluster.exec(POD, *words, namespace=NAMESPACE, stdin=stdin, seconds=seconds, check=check)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def submit(self, lines: Iterable[Mapping[str, Any]], *, queue: str, options: tuple[str, ...] = ()) -> str:
        """Submit a job with `ballast submit`, and return its id."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        said = json.loads(self.ballast("submit", "-", "--json", *options, queue=queue, stdin=text))
        return str(said["job_id"])

    def job(self, job: str, *, queue: str) -> dict[str, Any]:
        """Return the output of `ballast job`."""
        found: dict[str, Any] = json.loads(self.ballast("job", job, "--json", queue=queue))["job"]
        return found

    def results(self, job: str, *, queue: str) -> list[dict[str, Any]]:
        """Return the lines of the job's results."""
        text = self.ballast("results", job, queue=queue)
        return [json.loads(line) for line in text.splitlines()]

    def state_of_queues(self) -> str:
        """Return the jobs and the workers of every queue in Valkey."""
        keys = self.release.valkey("--scan", "--pattern", "ballast:*:totals", check=False).split()
        parts = [self.release.valkey("info", "clients", check=False)]
        for key in keys:
            queue = key.partition("{")[2].partition("}")[0]
            parts.append(f"=== {queue}\n{self.release.valkey('hgetall', key, check=False)}")
            parts.append(self.ballast("jobs", queue=queue, check=False))
        return "\n".join(parts)[-8000:]
