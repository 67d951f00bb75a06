"""Why a pod does not come up, in one word and its own sentence. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from ballast_api.conditions import Reason
from ballast_operator.children.pods import FETCH
from ballast_operator.kinds import Body
from ballast_operator.load import Trouble

IMAGE_REASONS = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
NOT_SERVED_EXIT = 78
"""The worker's exit code for a configuration that asks for what it cannot do, such as a model that is not there."""


def pod_trouble(pod: Body) -> Trouble | None:
    """What is wrong with a pod; None where nothing is, or nothing is known yet."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Trouble(Reason.UNSCHEDULABLE, condition.get("message", "no node has room"))
    for container in _containers(status):
        found = _container_trouble(container)
        if found is not None:
            return found
    return None


def _containers(status: Body) -> Iterator[Body]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _container_trouble(container: Body) -> Trouble | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in IMAGE_REASONS:
        return Trouble(Reason.IMAGE_PULL, f"image {container.get('image', '')}: {message or reason}")
    if reason == "CreateContainerConfigError":
        kind = Reason.NO_SECRET if "secret" in message.lower() else Reason.INVALID_POD
        return Trouble(kind, message)
    if reason in {"CreateContainerError", "RunContainerError"}:
        return Trouble(Reason.INVALID_POD, message)
    ended = _last_end(container)
    if ended is None or container.get("ready"):
        return None
    return _why_it_ended(container, ended)


def _last_end(container: Body) -> Body | None:
    """How it ended last, where that was no success."""
    for state in ("state", "lastState"):
        ended: Body | None = (container.get(state) or {}).get("terminated")
        if ended is not None and ended.get("exitCode") != 0:
            return ended
    return None


def _why_it_ended(container: Body, ended: Body) -> Trouble:
    code, said = ended.get("exitCode"), str(ended.get("message") or "").strip()
    last = said.splitlines()[-1] if said else ""
    restarts = container.get("restartCount", 0)
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            Reason.OUT_OF_MEMORY, f"killed for its memory limit, {restarts} restarts: raise it or lower slots"
        )
    if container.get("name") == FETCH:
        return Trouble(Reason.MODEL_NOT_FOUND, last or f"fetching the model ended with exit code {code}")
    if code == NOT_SERVED_EXIT and "model" in said:
        return Trouble(Reason.MODEL_NOT_FOUND, last)
    return Trouble(Reason.CRASHING, f"exit code {code}, {restarts} restarts" + (f": {last}" if last else ""))
