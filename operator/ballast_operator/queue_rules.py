"""Which queue a resource may use. PURE.

A queue belongs to the namespace with which its name begins. A resource of that namespace can grant it to others, so
that the grant needs no rights beyond those on the resource itself, and ends with the resource.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.children.config import redis_of
from ballast_operator.conditions.given import ConditionValue, on_hold
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import Body
from ballast_operator.sharing import Sharing, age, redis_secret_of


def queue_refusal(queue: str, mine: str, *, context: OperatorContext, others: Sharing) -> ConditionValue | None:
    """Return why a resource of namespace `mine` may not use a queue, as the value of `Degraded`; None if it may.

    `others` are the resources of this queue.
    """
    owner = queue.partition("/")[0] if "/" in queue else ""
    if owner == mine or any(fnmatchcase(queue, pattern) for pattern in context.shared_queues):
        return None
    if owner and (owner, mine) in others.grants:
        return None
    if owner:
        remedy = (
            f"An InferenceDeployment in namespace {owner} that serves the queue can grant it with "
            f"spec.queueAccess.namespaces: [{mine}]"
        )
    else:
        remedy = f"Name it {mine}/{queue}, or set operator.settings.sharedQueues of the chart"
    message = f"the queue {queue} does not belong to namespace {mine}. {remedy}"
    return on_hold(ConditionReason.QUEUE_NOT_ALLOWED, message)


def queue_conflict(resource: InferenceDeployment, context: OperatorContext, others: Sharing) -> ConditionValue | None:
    """Return the conflict with an older resource that serves another model from the same queue.

    A queue accepts the models of one resource, so the jobs of the other one would be refused. A resource that may not
    use the queue serves nothing from it.
    """
    if redis_of(resource, own_keys=context.redis_keys) is None:
        return None
    namespace, redis = resource.metadata.namespace, resource.spec.redis
    mine = resource.metadata.creation_timestamp or "", namespace, resource.metadata.name
    for body, served in others.oldest.get(f"{namespace}/{redis.secret_name}" if redis is not None else "", ()):
        about = body["metadata"]
        if age(body) >= mine or served == resource.spec.served_name:
            continue
        if not _is_refused(about, resource.queue_name, context, others):
            message = (
                f"the queue {resource.queue_name} is the one of the older resource {about['namespace']}/{about['name']}"
                f", which serves the model {served}, and this one serves {resource.spec.served_name}. Set another "
                "spec.offline.queue, or the same spec.model.servedName"
            )
            return on_hold(ConditionReason.QUEUE_CONFLICT, message)
    return None


def _is_refused(about: Body, queue: str, context: OperatorContext, others: Sharing) -> bool:
    return queue_refusal(queue, about["namespace"], context=context, others=others) is not None


def queue_of(body: Body) -> str:
    """Return the name of the queue of a resource, in whichever Redis."""
    about, offline = body["metadata"], (body.get("spec") or {}).get("offline")
    queue = offline.get("queue") if isinstance(offline, dict) else None
    return queue if isinstance(queue, str) and queue else f"{about['namespace']}/{about['name']}"


def own_queue(body: Body) -> str | None:
    """Return the queue of a resource in the operator's own Redis; None if it names another Redis."""
    return None if redis_secret_of(body) else queue_of(body)
