"""Finds the reason why a pod is not created or does not start, or why one pod after another fails. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ballast_api.conditions import ConditionReason
from ballast_operator.children.pods import FETCH, WORKER
from ballast_operator.children.ray import is_ready
from ballast_operator.kinds import Body
from ballast_operator.plan import is_live
from ballast_operator.poll_result import Problem

IMAGE_REASONS = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
NOT_SERVED_EXIT = 78
"""The worker's exit code for a configuration that it cannot serve, such as a missing model."""
PROGRAMS = ("ballast-worker: ", "ballast-vllm: ", "ballast: ")
"""How the programs of a pod begin the line that states why they end."""
BAD_ARGUMENTS_EXIT = 64
"""The worker's exit code for `engine.vllm.args` that vLLM refuses."""
TEMPLATE_HASH = "pod-template-hash"
"""Label of a Deployment's pods: their version."""
SUCCESSOR_TIME = timedelta(minutes=2)
"""A pod that was created within this time after the failure of another took its place."""
CLOCK_SKEW = timedelta(seconds=10)
"""The time of a failure is from the node's clock, which may be ahead of the API server's by this time."""
SIZE_LIMIT = 'EmptyDir volume "models"'
"""A part of the kubelet's sentence about a pod that exceeds `model.sizeLimitGibibytes`."""


def pod_problem(pod: Body) -> Problem | None:
    """Return the problem of a pod; None if no problem is known."""
    status = pod.get("status") or {}
    unscheduled = _unscheduled(pod)
    if unscheduled is not None:
        return Problem(ConditionReason.UNSCHEDULABLE, unscheduled.get("message", "no node fits the pod"))
    for container in _containers(status):
        found = _container_problem(container)
        if found is not None:
            return found
    return None


def creation_reason(message: str) -> ConditionReason:
    """Return the reason if the API server refuses to create pods with this message."""
    return ConditionReason.QUOTA if "quota" in message else ConditionReason.INVALID_POD


def lacks_node(pod: Body) -> bool:
    """Return whether no node fits a pod."""
    return _unscheduled(pod) is not None


def fetches(pod: Body) -> bool:
    """Return whether a pod fetches its model for the first time. A fetch that failed may fail again and again."""
    inits = (pod.get("status") or {}).get("initContainerStatuses") or ()
    running = (each for each in inits if "running" in (each.get("state") or {}))
    return any(_name(each).startswith(FETCH) and not each.get("restartCount") for each in running)


def _unscheduled(pod: Body) -> Body | None:
    conditions: list[Body] = (pod.get("status") or {}).get("conditions") or []
    found = (c for c in conditions if c.get("type") == "PodScheduled" and c.get("reason") == "Unschedulable")
    return next(found, None)


def repeated_failure(pods: Sequence[Body]) -> Problem | None:
    """Return why one pod of the present version after another fails, such as by eviction; None if they do not.

    A pod that fails alone is no problem, because another takes its place. It is one if that pod has failed too, and the
    next is not ready either. Kubernetes keeps failed pods, so old failures do not count.
    """
    if not any(_has_failed(pod) for pod in pods):
        return None
    newest = max(pods, key=_created)
    present = [pod for pod in pods if _version(pod) == _version(newest)]
    failed = [pod for pod in present if _has_failed(pod)]
    last = max(failed, key=_ended, default=newest)
    if not any(_replaces(last, other) for other in failed if other is not last):
        return None
    next_pods = (pod for pod in present if is_live(pod) and not is_ready(pod))
    if not _has_failed(newest) and not any(_replaces(pod, last) for pod in next_pods):
        return None
    status = last["status"]
    why = f"{status['reason']}: {str(status.get('message') or '').strip().rstrip('.') or 'no message'}"
    advice = "; raise spec.model.sizeLimitGibibytes" if SIZE_LIMIT in why else ""
    message = f"{len(failed)} pods of this version have failed, the last one with {why}{advice}"
    return Problem(ConditionReason.PODS_FAILING, message)


def _has_failed(pod: Body) -> bool:
    """Return whether Kubernetes ended a pod and states why. A container that ends is started again in its pod."""
    status = pod.get("status") or {}
    return status.get("phase") == "Failed" and bool(status.get("reason"))


def _version(pod: Body) -> str:
    return str((pod["metadata"].get("labels") or {}).get(TEMPLATE_HASH, ""))


def _created(pod: Body) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _ended(pod: Body) -> str:
    """Return the last time in the status of a failed pod. All times have the same format."""
    status = pod["status"]
    ended = ((each.get("state") or {}).get("terminated") or {} for each in _containers(status))
    times = [each.get("lastTransitionTime") for each in status.get("conditions") or ()]
    times += [_created(pod), status.get("startTime"), *(each.get("finishedAt") for each in ended)]
    return max(str(time) for time in times if time is not None)


def _replaces(pod: Body, failed: Body) -> bool:
    """Return whether a pod was created soon after another failed."""
    created, ended = _created(pod), _ended(failed)
    if not created:
        return False
    return -CLOCK_SKEW <= datetime.fromisoformat(created) - datetime.fromisoformat(ended) <= SUCCESSOR_TIME


def scheduling_gates(pod: Body) -> tuple[str, ...]:
    """Return the names of the gates that keep the scheduler from placing a pod, such as that of Kueue."""
    return tuple(str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def _containers(status: Body) -> Iterator[Body]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _container_problem(container: Body) -> Problem | None:
    """Return the problem of a container. Its message names a container that is not the worker, such as a sidecar."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    name = _name(container)
    prefix = "" if name == WORKER else f"container {name}: "
    if reason in IMAGE_REASONS:
        return Problem(ConditionReason.IMAGE_PULL, f"{prefix}image {container.get('image', '')}: {message or reason}")
    if reason == "CreateContainerConfigError":
        kind = ConditionReason.NO_SECRET if "secret" in message.lower() else ConditionReason.INVALID_POD
        return Problem(kind, f"{prefix}{message}")
    if reason in {"CreateContainerError", "RunContainerError"}:
        return Problem(ConditionReason.INVALID_POD, f"{prefix}{message}")
    ended = _last_failure(container)
    if ended is None or container.get("ready"):
        return None
    found = _failure_problem(container, ended)
    return replace(found, message=f"{prefix}{found.message}")


def _name(container: Body) -> str:
    return str(container.get("name") or WORKER)


def _last_failure(container: Body) -> Body | None:
    """Return the last termination of a container that was no success."""
    for state in ("state", "lastState"):
        ended: Body | None = (container.get(state) or {}).get("terminated")
        if ended is not None and ended.get("exitCode") != 0:
            return ended
    return None


def _failure_problem(container: Body, ended: Body) -> Problem:
    code, output = ended.get("exitCode"), str(ended.get("message") or "").strip()
    last, is_worker = _last_line(output), _name(container) == WORKER
    restarts = container.get("restartCount", 0)
    if ended.get("reason") == "OOMKilled":
        advice = "raise the limit or lower spec.slots" if is_worker else "raise the limit"
        return Problem(ConditionReason.OUT_OF_MEMORY, f"memory limit exceeded ({restarts} restarts); {advice}")
    if _name(container).startswith(FETCH):
        return Problem(ConditionReason.MODEL_NOT_FOUND, last or f"exit code {code}")
    if code == BAD_ARGUMENTS_EXIT and is_worker:
        return Problem(ConditionReason.INVALID_SPEC, last)
    if code == NOT_SERVED_EXIT and is_worker and "model" in output:
        return Problem(ConditionReason.MODEL_NOT_FOUND, last)
    return Problem(ConditionReason.CRASHING, f"exit code {code}, {restarts} restarts" + (f": {last}" if last else ""))


def _last_line(output: str) -> str:
    """Return the last line of Ballast's own programs, or the last line at all: libraries may write more as they end."""
    lines = output.splitlines()
    own = [line for line in lines if line.startswith(PROGRAMS)]
    return (own or lines or [""])[-1]
