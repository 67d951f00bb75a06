"""`Degraded`: what does not work and needs a person. The first problem of the chain causes later ones. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason
from ballast_api.vllm_arguments import without_effect
from ballast_operator.conditions import ray
from ballast_operator.conditions.given import ConditionValue, Given, deployment_condition, old_version
from ballast_operator.conditions.progressing import deadline_passed
from ballast_operator.conditions.ready import held_back
from ballast_operator.plan import is_live
from ballast_operator.pod_problem import creation_reason, pod_problem, repeated_failure
from ballast_operator.ray_status import is_fault_tolerant


def _is_refused(given: Given) -> ConditionValue | None:
    return ConditionValue("True", given.refused.reason, given.refused.message) if given.refused else None


def _pod_has_problem(given: Given) -> ConditionValue | None:
    for pod in (*given.live, *filter(is_live, given.snapshot.heads)):
        found = pod_problem(pod)
        if found is not None:
            return ConditionValue(
                "True", found.reason, f"pod {pod['metadata']['name']}: {found.message}{old_version(given)}"
            )
    return None


def _pods_fail(given: Given) -> ConditionValue | None:
    if given.count("availableReplicas") >= given.resource.spec.replicas:
        return None
    found = repeated_failure(given.snapshot.pods)
    return ConditionValue("True", found.reason, f"{found.message}{old_version(given)}") if found else None


def _pods_cannot_be_created(given: Given) -> ConditionValue | None:
    found = deployment_condition(given, "ReplicaFailure")
    if not given.is_current or found is None or found.get("status") != "True":
        return None
    message = str(found.get("message", ""))
    return ConditionValue("True", creation_reason(message), message)


def _secret_is_missing(given: Given) -> ConditionValue | None:
    problem = given.poll.problem
    if problem is not None and problem.reason is ConditionReason.NO_SECRET:
        return ConditionValue("True", problem.reason, problem.message)
    return None


def _has_left_a_queue(given: Given) -> ConditionValue | None:
    for queue in given.poll.former:
        if queue.num_unfinished and not queue.is_served:
            return ConditionValue(
                "True",
                ConditionReason.QUEUE_LEFT,
                f"the queue {queue.name}, which the workers served before, has {queue.num_unfinished} unfinished "
                "items, and no worker serves it. Set spec.offline.queue back until they are done, or cancel their jobs",
            )
    return None


def _functions_are_older(given: Given) -> ConditionValue | None:
    if not given.poll.has_older_functions:
        return None
    return ConditionValue(
        "True",
        ConditionReason.OLDER_FUNCTIONS,
        "Redis has the functions of an older version of Ballast, and no memory for those of this one, so workers of "
        "this version take no offline work: raise maxmemory (valkey.maxMemory of the chart)",
    )


def _exceeds_deadline(given: Given) -> ConditionValue | None:
    if not deadline_passed(given) or held_back(given):
        return None
    seconds = given.resource.spec.startup_seconds
    return ConditionValue(
        "True",
        ConditionReason.ROLLOUT_STUCK,
        f"no progress within {seconds} s (rollout.startupSeconds){old_version(given)}",
    )


def _is_healthy(given: Given) -> ConditionValue:
    parts = ["no problem found"]
    if given.ray_service is not None and not is_fault_tolerant(given.ray_service):
        parts.append("no Redis keeps the state of Ray's head, so the workers end a minute after it")
    unused = without_effect(given.resource.spec.engine.vllm.args)
    return ConditionValue("False", ConditionReason.HEALTHY, "; ".join([*parts, unused] if unused else parts))


DEGRADED = (
    _is_refused,
    _pods_cannot_be_created,
    ray.storage_is_down,
    ray.head_is_down,
    ray.pods_cannot_be_created,
    ray.does_not_start,
    _pod_has_problem,  # without their head, workers fail one after the other
    _pods_fail,
    ray.has_failed,
    _secret_is_missing,
    _functions_are_older,
    _exceeds_deadline,
    _has_left_a_queue,
    _is_healthy,
)
