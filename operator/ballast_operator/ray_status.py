"""The state of a RayService and its pods, in the terms of a Deployment and in sentences. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ballast_api.serve_config import APPLICATION, without_traceback
from ballast_operator.children.ray import GROUP, is_ready
from ballast_operator.kinds import Body
from ballast_queue.status import WorkerStatus

UNPLACED = "to be scheduled"
"""A part of Ray's sentence about replicas that wait for more than half a minute."""
FAILED = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})


def as_deployment(ray: Body, pods: Sequence[Body], statuses: Mapping[str, WorkerStatus], config: str) -> Body:
    """Return a RayService as a Deployment.

    Args:
        ray: The RayService.
        pods: The live worker pods, which may be of two Ray clusters, or of a Deployment that is being replaced.
        statuses: The status that each pod published.
        config: Hash of the configuration that all workers should have.
    """
    wanted = num_pods(ray)
    ready = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
    updated = [name for name in ready if name in statuses and statuses[name].config_hash == config]
    # A worker over several pods has one that is ready: the pod with its HTTP server.
    total = len(pods) if len(pods) > wanted else len(ready)
    return {
        "metadata": ray["metadata"],
        "status": {
            "observedGeneration": (ray.get("status") or {}).get("observedGeneration", 0),
            "replicas": max(total, len(ready)),
            "readyReplicas": len(ready),
            "availableReplicas": len(ready),
            "updatedReplicas": len(updated),
            "unavailableReplicas": len(pods) - len(ready),
        },
    }


def num_pods(ray: Body) -> int:
    """Return the number of worker pods that a RayService asks for."""
    groups = ray["spec"]["rayClusterConfig"].get("workerGroupSpecs") or ()  # another writer may have changed them
    return sum(int(group.get("replicas") or 0) for group in groups if group.get("groupName") == GROUP)


def failure(ray: Body) -> str | None:
    """Return why Serve does not run the application, as a sentence; None if it does."""
    for application in _applications(ray):
        if application.get("status") in FAILED:
            deployments = (application.get("serveDeploymentStatuses") or {}).values()
            why = next((each["message"] for each in deployments if each.get("message")), application.get("message", ""))
            return f"Ray Serve reports {application['status']}: {without_traceback(why) or 'no reason'}"
    return None


def refusal(ray: Body) -> str | None:
    """Return why KubeRay cannot make a pod, as a sentence; None if it makes all of them.

    KubeRay writes this state of a Ray cluster only together with another change of the RayService, so it may be old.
    """
    status = ray.get("status") or {}
    for name in ("pendingServiceStatus", "activeServiceStatus"):
        for entry in ((status.get(name) or {}).get("rayClusterStatus") or {}).get("conditions") or ():
            if (entry.get("type"), entry.get("status")) == ("ReplicaFailure", "True"):
                return f"KubeRay reports {' '.join(str(entry.get('message') or entry.get('reason')).split())}"
    return None


def is_fault_tolerant(ray: Body) -> bool:
    """Return whether a Redis keeps the state of the head."""
    return "gcsFaultToleranceOptions" in ray["spec"]["rayClusterConfig"]


def pending(ray: Body) -> str | None:
    """Return the sentence of Ray about replicas for which it finds no place; None if there are none."""
    for application in _applications(ray):
        for each in (application.get("serveDeploymentStatuses") or {}).values():
            message = str(each.get("message") or "")
            if UNPLACED in message:
                return message.strip()
    return None


def serving_cluster(ray: Body) -> str | None:
    """Return the name of the Ray cluster that serves."""
    status = (ray.get("status") or {}).get("activeServiceStatus") or {}
    name: str | None = status.get("rayClusterName")
    return name


def starting_cluster(ray: Body) -> str | None:
    """Return the name of the Ray cluster that does not serve yet."""
    name: str | None = ((ray.get("status") or {}).get("pendingServiceStatus") or {}).get("rayClusterName")
    return name or None


def is_settled(ray: Body) -> bool:
    """Return whether the Ray cluster of the present spec serves, and KubeRay starts no other."""
    status = ray.get("status") or {}
    is_current = (status.get("observedGeneration") or 0) >= ray["metadata"].get("generation", 0)
    return is_current and serving_cluster(ray) is not None and starting_cluster(ray) is None


def upgrade(ray: Body) -> str:
    """Return what KubeRay does if it replaces the Ray cluster; empty if it does not."""
    new, old = starting_cluster(ray), serving_cluster(ray)
    if not new or not old:
        return ""
    return f"KubeRay starts the Ray cluster {new} beside {old}, which takes the GPUs of all workers a second time"


def _applications(ray: Body) -> Iterator[Body]:
    """Yield the state of the application in the new Ray cluster, and in the one that serves."""
    status = ray.get("status") or {}
    for name in ("pendingServiceStatus", "activeServiceStatus"):
        yield ((status.get(name) or {}).get("applicationStatuses") or {}).get(APPLICATION) or {}
