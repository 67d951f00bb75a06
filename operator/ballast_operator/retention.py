"""Which children stay although they are no longer wanted, because workers still need them. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.children.ray import cluster_of, is_ray_pod, is_ready, policy_name
from ballast_operator.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    RAY_SERVICE,
    SERVICE,
    STATEFUL_SET,
    Body,
    Key,
)
from ballast_operator.plan import Apply, ClusterSnapshot, is_live
from ballast_operator.ray_status import is_settled, serving_cluster

UNDELETED = frozenset({CONFIG_MAP, SERVICE, BUDGET})
"""Kinds that go only with the resource.

Pods of a former release mount its ConfigMap, which had another name. The operator may delete neither Services, such as
that of a head's Redis, nor PodDisruptionBudgets.
"""


def is_kept(
    child: Key, resource: InferenceDeployment, snapshot: ClusterSnapshot, changes: Sequence[Apply] = ()
) -> bool:
    """Return whether a child that is not wanted stays for now. `changes` is what this plan applies."""
    if child.kind in UNDELETED:
        return True
    on_ray = resource.spec.runtime.ray is not None
    if child.kind == STATEFUL_SET and on_ray:
        return _is_head_replaced(resource, snapshot, changes)
    if child.kind in {DEPLOYMENT, RAY_SERVICE, STATEFUL_SET}:
        return on_ray is (child.kind == DEPLOYMENT) and not _serves(resource, snapshot)
    if child.kind == NETWORK_POLICY and child.name == policy_name(resource):
        # Whoever reaches the ports of Ray can run code there.
        is_there = snapshot.child(RAY_SERVICE, resource.metadata) is not None
        return resource.spec.network.policy and (is_there or bool(_ray_pods(snapshot)))
    return False


def _serves(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> bool:
    """Return whether the workers of the wanted workload serve, so that the other one may go."""
    on_ray = resource.spec.runtime.ray is not None
    ready = sum(is_ray_pod(pod) is on_ray and is_live(pod) and is_ready(pod) for pod in snapshot.pods)
    return ready >= resource.spec.replicas


def _is_head_replaced(resource: InferenceDeployment, snapshot: ClusterSnapshot, changes: Sequence[Apply]) -> bool:
    """Return whether pods of a Ray cluster exist whose head has its state in the Redis that is no longer wanted."""
    found = snapshot.child(RAY_SERVICE, resource.metadata)
    if found is None:
        return bool(_ray_pods(snapshot))
    if any(change.key.kind == RAY_SERVICE for change in changes) or not is_settled(found):
        return True
    return any(cluster_of(pod) != serving_cluster(found) for pod in _ray_pods(snapshot))


def _ray_pods(snapshot: ClusterSnapshot) -> tuple[Body, ...]:
    return (*snapshot.heads, *filter(is_ray_pod, snapshot.pods))
