"""A pod in a namespace of its own, which tries whether it can reach an address."""

from __future__ import annotations

from dataclasses import dataclass

from client import client_pod
from cluster import Cluster

POD = "prober"
TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=4).close()
    print("open")
except OSError:
    print("denied")
"""


@dataclass(frozen=True)
class Prober:
    """The pod."""

    cluster: Cluster
    namespace: str

    @classmethod
    def start(cls, cluster: Cluster, namespace: str, **labels: str) -> Prober:
        """Create namespace and pod, and wait for it."""
        cluster.start_pods(client_pod(POD, **labels), namespace=namespace)
        return cls(cluster, namespace)

    def reach(self, host: str, port: int) -> str:
        """Return `open` if a connection opens, else `denied`."""
        done = self.cluster.exec(POD, "python3", "-c", TRY, host, str(port), namespace=self.namespace)
        return done.stdout.strip()
