"""`Ready`: whether enough workers serve, and what keeps the others from it. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason
from ballast_api.names import KUEUE
from ballast_operator.conditions.given import ConditionValue, Given
from ballast_operator.pod_problem import scheduling_gates


def _is_scaled_to_zero(given: Given) -> ConditionValue | None:
    is_made = given.deployment is not None or given.resource.spec.runtime.ray is not None
    if given.resource.spec.replicas == 0 and is_made:
        return ConditionValue("True", ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0")
    return None


def _is_ready_enough(given: Given) -> ConditionValue | None:
    wanted, ready = given.resource.spec.replicas, given.count("availableReplicas")
    if ready < max(1, wanted - given.resource.spec.rollout.max_unavailable):
        return None
    figures = f"{ready} of {wanted} workers are ready"
    if _found_no_gpu(given):
        return ConditionValue(
            "True",
            ConditionReason.SERVING_ON_CPU,
            f"{figures} and run on the CPU although spec.gpu requests a GPU: the image of a worker has vLLM for CPUs. "
            "Name one with vLLM for GPUs, or set spec.gpu.count to 0",
        )
    held = held_back(given)
    return ConditionValue("True", ConditionReason.SERVING, f"{figures}; {held}" if held else figures)


def _found_no_gpu(given: Given) -> bool:
    if given.resource.spec.gpu.count == 0:
        return False
    return any(status.device == "cpu" for status in given.poll.by_pod(given.live).values())


def _is_held_back(given: Given) -> ConditionValue | None:
    held, wanted, ready = held_back(given), given.resource.spec.replicas, given.count("availableReplicas")
    if not held:
        return None
    return ConditionValue("False", ConditionReason.SCHEDULING_GATED, f"{ready} of {wanted} workers are ready; {held}")


def held_back(given: Given) -> str:
    """Return which pods the scheduler may not place yet, and what they wait for; empty without such a pod."""
    gates = {pod["metadata"]["name"]: found for pod in given.live if (found := scheduling_gates(pod))}
    if not gates:
        return ""
    name, found = min(gates.items())
    pods, it = (f"pod {name} waits", "it") if len(gates) == 1 else (f"{len(gates)} pods wait, such as {name},", "them")
    if any(gate.startswith(KUEUE) for gate in found):
        namespace = given.resource.metadata.namespace
        return f"{pods} until Kueue admits {it} within its quota: see kubectl get workloads -n {namespace}"
    return f"{pods} until the scheduling gate {', '.join(found)} is removed"


def _is_not_ready(given: Given) -> ConditionValue | None:
    wanted, ready = given.resource.spec.replicas, given.count("availableReplicas")
    is_starting = not ready and given.count("updatedReplicas") <= given.count("unavailableReplicas")
    reason = ConditionReason.STARTING if is_starting else ConditionReason.NOT_ENOUGH_READY
    return ConditionValue("False", reason, f"{ready} of {wanted} workers are ready")


READY = (_is_scaled_to_zero, _is_ready_enough, _is_held_back, _is_not_ready)
