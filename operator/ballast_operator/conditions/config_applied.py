"""`ConfigApplied`: whether every worker that runs has the hot fields of the spec in force. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_api.conditions import ConditionReason
from ballast_operator.children.config import VERSION, seconds_of
from ballast_operator.children.ray import is_ray_pod, is_ready
from ballast_operator.conditions.given import ConditionValue, Given, is_unknown, no_worker
from ballast_operator.kinds import Body
from ballast_queue.status import WorkerStatus


def _queue_follows_another(given: Given) -> ConditionValue | None:
    settings, metadata = given.poll.settings, given.resource.metadata
    if settings is None or not settings.owner:
        return None
    if settings.owner != f"{metadata.namespace}/{metadata.name}":
        others = "another resource: that of its name, or an older one"
    elif settings[1:] > (seconds_of(metadata.creation_timestamp), metadata.generation):
        others = (
            f"generation {settings.generation:.0f} of this resource, which this cluster does not have: the resource "
            "was restored from a backup, or another cluster has a resource of this name. They end five minutes after "
            "the last worker of that generation"
        )
    else:
        return None
    message = (
        f"the queue {given.resource.queue_name} follows the settings of {others}. Tenants, models, attempts and times "
        "of this resource do not apply to its jobs"
    )
    return ConditionValue("False", ConditionReason.OTHER_SETTINGS, message)


def _has_config(given: Given) -> ConditionValue:
    statuses = given.poll.by_pod(given.live)
    workers = [pod for pod in given.live if _is_worker(pod, statuses)]
    if not workers:
        return ConditionValue("Unknown", ConditionReason.NO_WORKERS, "only workers that are ending have reported")
    total = len(workers)
    invalid = [
        name for pod in workers if (name := pod["metadata"]["name"]) in statuses and statuses[name].has_invalid_file
    ]
    if invalid:
        message = (
            f"{len(invalid)} of {total} workers found an invalid or missing file, such as that of API keys: see the "
            f"log of {invalid[0]}, and the Secrets of the resource. The earlier file stays in force, with its API keys"
        )
        return ConditionValue("False", ConditionReason.INVALID_FILE, message)
    behind = []
    for pod in workers:
        name = pod["metadata"]["name"]
        wanted = given.plan.files.get((pod["metadata"].get("annotations") or {}).get(VERSION, ""))
        if name not in statuses or statuses[name].config_hash != wanted:
            behind.append(name)
    if behind:
        message = f"{total - len(behind)} of {total} workers use the newest settings; {behind[0]} does not yet"
        return ConditionValue("False", ConditionReason.PENDING, message)
    users = "the worker uses" if total == 1 else f"all {total} workers use"
    message = f"{users} the settings of generation {given.resource.metadata.generation}"
    if given.poll.has_newer_functions:
        message += "; the functions in Redis are those of a newer version of Ballast: upgrade the release"
        return ConditionValue("True", ConditionReason.NEWER_FUNCTIONS, message)
    return ConditionValue("True", ConditionReason.APPLIED, message)


def _is_worker(pod: Body, statuses: Mapping[str, WorkerStatus]) -> bool:
    """Return whether a pod is a worker that has started. A pod that starts later reads the newest settings.

    Of a worker over several Ray pods, only one is ever ready and reports. Nothing else distinguishes these pods before
    that: Serve decides which of them gets the HTTP server.
    """
    has_started = is_ready(pod) if is_ray_pod(pod) else (pod.get("status") or {}).get("phase") != "Pending"
    return has_started or pod["metadata"]["name"] in statuses


CONFIG_APPLIED = (is_unknown, _queue_follows_another, no_worker, _has_config)
