"""The pods that a smaller Deployment loses first: those with the least load. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.children.ray import is_ready
from ballast_operator.kinds import DEPLOYMENT, POD, key_of
from ballast_operator.plan import Annotate, ClusterSnapshot, is_live
from ballast_operator.poll_result import PollResult
from ballast_queue.status import WorkerStatus

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MOST_COST = 2**31 - 1


def deletion_costs(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, poll: PollResult | None
) -> Iterator[Annotate]:
    """Yield deletion costs before a Deployment loses replicas: the pods with the least load are deleted first."""
    found = snapshot.child(DEPLOYMENT, resource.metadata)
    pods = tuple(pod for pod in snapshot.pods if is_live(pod))
    if poll is None or found is None or not 0 < resource.spec.replicas < found["spec"].get("replicas", 1):
        return
    statuses = poll.by_pod(pods)
    for pod in pods:
        name = pod["metadata"]["name"]
        # A ready pod that has not reported may be full. Any other serves no requests yet, or does not work.
        cost = str(_load(statuses[name]) if name in statuses else MOST_COST if is_ready(pod) else -1)
        if (pod["metadata"].get("annotations") or {}).get(DELETION_COST) != cost:
            yield Annotate(key_of(POD, pod), {DELETION_COST: cost}, f"Set the deletion cost of pod {name} to {cost}")


def _load(status: WorkerStatus) -> int:
    """Return the load of a worker. Online work counts more: offline items return to the queue and lose nothing."""
    online, offline = status.online, status.offline
    load = 1000 * (online.running + online.parked + online.waiting) + offline.running + offline.parked
    return min(load, MOST_COST)
