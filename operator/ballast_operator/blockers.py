"""The reasons for which the children of an InferenceDeployment must not change. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.sections import MOST_CHARACTERS, is_model_name
from ballast_operator.children.redis_users import has_malformed_url
from ballast_operator.conditions.given import ConditionValue, on_hold
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import RAY_SERVICE
from ballast_operator.queue_rules import queue_conflict, queue_refusal
from ballast_operator.sharing import Sharing
from ballast_queue.address import FORMS


def blocked(resource: InferenceDeployment, context: OperatorContext, others: Sharing) -> ConditionValue | None:
    """Return the first reason for which the children of a resource must not change."""
    return (
        _has_no_name(resource)
        or _is_not_permitted(resource, context)
        or _lacks_image(resource, context)
        or _lacks_kuberay(resource, context)
        or queue_refusal(resource.queue_name, resource.metadata.namespace, context=context, others=others)
        or _lacks_redis(resource, context)
        or _lacks_user(resource, context)
        or queue_conflict(resource, context, others)
    )


def _lacks_user(resource: InferenceDeployment, context: OperatorContext) -> ConditionValue | None:
    if not context.refuses_users or context.redis is None or resource.spec.redis is not None:
        return None
    assert context.redis_key is not None, "a Secret that was read has a name"
    message = (
        f"the user in the operator's own Redis Secret {context.redis_key.name} may not create users in Redis, or this "
        "Redis has no ACL command, so this resource must name a Secret in spec.redis, or this user needs the right"
    )
    return on_hold(ConditionReason.NO_REDIS_USER, message)


def _has_no_name(resource: InferenceDeployment) -> ConditionValue | None:
    """Refuse a location whose last part is no name. The schema accepts it, because `model.servedName` replaces it."""
    if is_model_name(resource.spec.served_name):
        return None
    message = (
        "the last part of model.uri cannot be the name of the model for clients: a name has at most "
        f"{MOST_CHARACTERS} letters, digits and the characters . _ / : -, and begins and ends with a letter or digit. "
        "Set model.servedName"
    )
    return on_hold(ConditionReason.INVALID_SPEC, message)


def _is_not_permitted(resource: InferenceDeployment, context: OperatorContext) -> ConditionValue | None:
    found = "; ".join(context.rules.violations(resource))
    if not found:
        return None
    message = f"{found}. Change the resource, or ask the owner of the cluster for the setting of the operator"
    return on_hold(ConditionReason.NOT_PERMITTED, message)


def _lacks_image(resource: InferenceDeployment, context: OperatorContext) -> ConditionValue | None:
    if resource.spec.template.image or context.image_of(resource):
        return None
    is_vllm, on_ray = resource.spec.backend == "vllm", resource.spec.runtime.ray is not None
    image = ("a worker with vLLM" if is_vllm else "a native worker") + (" and Ray" if on_ray else "")
    value = {(True, False): "vllmWorker", (False, True): "rayWorker", (True, True): "rayVllmWorker"}[is_vllm, on_ray]
    message = f"the operator knows no image of {image}. Set template.image, or the value image.{value} of the chart"
    return on_hold(ConditionReason.IMAGE_PULL, message)


def _lacks_kuberay(resource: InferenceDeployment, context: OperatorContext) -> ConditionValue | None:
    if resource.spec.runtime.ray is None or RAY_SERVICE.name in context.kinds:
        return None
    message = (
        "spec.runtime.ray needs KubeRay, and the operator finds no kind RayService (ray.io/v1) in the cluster. Install "
        "KubeRay, or remove the section"
    )
    return on_hold(ConditionReason.NO_KUBERAY, message)


def _lacks_redis(resource: InferenceDeployment, context: OperatorContext) -> ConditionValue | None:
    if resource.spec.redis is not None or not (context.lacks_redis or has_malformed_url(context)):
        return None
    secret = context.redis_key
    assert secret is not None, "a missing or malformed Secret has a name"
    what = (
        "does not exist, or lacks a key; create it"
        if context.lacks_redis
        else f"contains a malformed URL; write it as {FORMS}"
    )
    message = f"the operator's Secret {secret.namespace}/{secret.name} for Redis {what}"
    return on_hold(ConditionReason.NO_SECRET, message)
