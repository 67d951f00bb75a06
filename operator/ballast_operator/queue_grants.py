"""Which queues a resource may name. PURE.

A queue belongs to the namespace with which its name begins. A resource of that namespace can grant it to others, so
that the grant needs no rights beyond those on the resource itself, and ends with the resource.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ballast_api.conditions import ConditionReason
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import Body
from ballast_operator.resource_type import ConditionValue


def queue_refusal(queue: str, mine: str, *, context: OperatorContext, others: Iterable[Body]) -> ConditionValue | None:
    """Return why a resource of namespace `mine` may not use a queue, as the value of `Degraded`; None if it may."""
    owner = queue.partition("/")[0] if "/" in queue else ""
    if owner == mine or any(fnmatchcase(queue, pattern) for pattern in context.shared_queues):
        return None
    if owner and any(_grants(body, queue, owner, mine) for body in others):
        return None
    if owner:
        remedy = (
            f"An InferenceDeployment in namespace {owner} that serves the queue can grant it with "
            f"spec.queueAccess.namespaces: [{mine}]"
        )
    else:
        remedy = f"Name it {mine}/{queue}, or set operator.settings.sharedQueues of the chart"
    message = (
        f"the queue {queue} does not belong to namespace {mine}. {remedy}. Until then, the children of this resource "
        "do not change"
    )
    return ConditionValue("True", ConditionReason.QUEUE_NOT_ALLOWED, message)


def _grants(body: Body, queue: str, owner: str, to: str) -> bool:
    """Return whether a resource serves a queue of its own namespace, and grants it to another namespace."""
    about, spec = body["metadata"], body.get("spec") or {}
    if about["namespace"] != owner or about.get("deletionTimestamp"):
        return False
    served = (spec.get("offline") or {}).get("queue") or f"{about['namespace']}/{about['name']}"
    return served == queue and to in ((spec.get("queueAccess") or {}).get("namespaces") or ())
