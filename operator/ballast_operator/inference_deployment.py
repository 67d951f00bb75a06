"""How the operator reconciles an InferenceDeployment. PURE: the plan of an applied plan is empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import KIND, gcs_redis
from ballast_api.worker_config import content_hash
from ballast_operator.children.config import config_manifest, config_texts, redis_of, version_of, worker_config
from ballast_operator.children.gcs import gcs_children, is_needed
from ballast_operator.children.monitoring import prometheus_rule, service_monitor
from ballast_operator.children.pods import deployment
from ballast_operator.children.ray import head_policy, placement, ray_service, resize
from ballast_operator.children.service import budget, network_policy, service
from ballast_operator.conditions.given import Given
from ballast_operator.context import OperatorContext
from ballast_operator.deletion_costs import deletion_costs
from ballast_operator.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    RAY_SERVICE,
    RULE,
    SERVICE,
    SERVICE_MONITOR,
    STATEFUL_SET,
    Body,
    Kind,
)
from ballast_operator.own_secrets import copied_hash, gcs_secret_writes, redis_secret_writes
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot, changes, deletions, held, without_needed
from ballast_operator.poll_result import PollResult, QueueSource
from ballast_operator.ray_status import num_pods
from ballast_operator.resource_status import former_queues
from ballast_operator.retention import is_kept
from ballast_operator.running_config import outdated_pods, present_files, running_versions

ON_RAY = ""
"""The version of pods on Ray, which have no annotation of it: a replica gets its configuration from Serve."""


def read(body: Body) -> InferenceDeployment:
    """Read an object that the API server has admitted.

    Raises:
        InvalidConfig: the spec is invalid.
    """
    return InferenceDeployment.read(body, f"{KIND} {body['metadata']['name']}", is_stored=True)


def plan(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, poll: PollResult | None = None
) -> ChildrenPlan:
    """Compare the resource with the cluster and return what must be written.

    If the snapshot is outdated, the next reconciliation corrects the result. The poll decides which pods a smaller
    Deployment loses first.
    """
    config = worker_config(resource, own_keys=context.redis_keys)
    texts = config_texts(config, present_files(resource, snapshot), running_versions(resource, snapshot))
    version = version_of(config)
    files = {each: content_hash(text) for each, text in texts.items()}
    if resource.spec.runtime.ray is not None:
        files[ON_RAY] = files[version]
    copied = copied_hash(resource, snapshot, context)
    wanted = list(_wanted(resource, snapshot, context, texts, copied, version=version))
    changed, waiting = changes(wanted, snapshot), without_needed(wanted, snapshot)
    return ChildrenPlan(
        costs=tuple(deletion_costs(resource, snapshot, poll)),
        apply=(
            *redis_secret_writes(resource, snapshot, context, copied),
            *gcs_secret_writes(resource, snapshot, context),
            *(step for step in changed if step.key not in waiting),
        ),
        resize=tuple(step for step in resize(resource, snapshot) if step.leaving or not waiting),
        delete=tuple(
            gone
            for gone in deletions(wanted, snapshot)
            # An optional kind of which a child exists is missing only until its discovery succeeds.
            if (not gone.key.kind.is_optional or gone.key.kind.name in context.kinds)
            and not is_kept(gone.key, resource, snapshot, changed)
        ),
        annotate=tuple(outdated_pods(resource, snapshot, files, copied)),
        files=files,
        version=version,
        held=tuple(held(wanted, snapshot)),
    )


def _wanted(
    resource: InferenceDeployment,
    snapshot: ClusterSnapshot,
    context: OperatorContext,
    texts: Mapping[str, str],
    copied: str,
    *,
    version: str,
) -> Iterator[tuple[Kind, Body]]:
    """Yield the children in the order of `CHILDREN`."""
    yield CONFIG_MAP, config_manifest(resource, texts, copied)
    policy = network_policy(resource)
    if policy is not None:
        yield NETWORK_POLICY, policy
    yield SERVICE, service(resource)
    yield BUDGET, budget(resource)
    keys = context.redis_keys
    if resource.spec.runtime.ray is None:
        yield DEPLOYMENT, deployment(resource, version, image=context.image_of(resource), own_keys=keys)
    else:
        between = head_policy(resource)
        if between is not None:
            yield NETWORK_POLICY, between
        if is_needed(resource, context):
            found = snapshot.child(STATEFUL_SET, resource.metadata, gcs_redis(resource.metadata.name))
            yield from gcs_children(resource, context, placement(resource, resource.spec.runtime.ray), found)
        if resource.spec.replicas:  # Serve has no application without a replica
            yield RAY_SERVICE, ray_service(resource, texts[version], context)
    rule = prometheus_rule(resource, context)
    for kind, body in ((SERVICE_MONITOR, service_monitor(resource)), (RULE, rule)):
        if body is not None and kind.name in context.kinds:
            yield kind, body


def made_replicas(given: Given) -> int:
    """Return the replicas that the children have in their specs."""
    ray, found = given.resource.spec.runtime.ray, given.snapshot.child(DEPLOYMENT, given.resource.metadata)
    if given.ray_service is not None:
        return num_pods(given.ray_service) // (ray.nodes if ray is not None else 1)
    return int(found["spec"].get("replicas", 1)) if found is not None else 0


def queue_source(resource: InferenceDeployment, context: OperatorContext) -> QueueSource:
    """Return where the workers of a resource report."""
    own = context.redis if resource.spec.redis is None else None
    owner = f"{resource.metadata.namespace}/{resource.metadata.name}"
    redis = redis_of(resource, own_keys=context.redis_keys)
    is_scaled = resource.spec.scaling is not None
    return QueueSource(redis, resource.queue_name, owner, former_queues(resource, None), is_scaled, own)
