"""How the operator reconciles an InferenceDeployment. PURE: the plan of an applied plan is empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from ballast_api.conditions import ConditionType
from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment, Metadata
from ballast_api.names import (
    CONFIG_HASH,
    HTTP_PORT,
    KIND,
    WORKER,
    config_map,
    gcs_redis,
    redis_secret,
    selector,
)
from ballast_api.status import MOST_FORMER_QUEUES, ClassSlots, Condition, ResourceStatus, ScalingStatus, Status
from ballast_api.worker_config import content_hash
from ballast_operator.blockers import blocked
from ballast_operator.children.config import (
    REDIS_HASH,
    VERSION,
    config_manifest,
    config_texts,
    file_name,
    redis_of,
    version_of,
    version_of_file,
    worker_config,
)
from ballast_operator.children.gcs import PASSWORD, gcs_children, gcs_secret, is_needed
from ballast_operator.children.monitoring import prometheus_rule, service_monitor
from ballast_operator.children.pods import deployment
from ballast_operator.children.ray import (
    head_policy,
    is_ray_pod,
    is_ready,
    placement,
    ray_service,
    resize,
    services_of_kuberay,
)
from ballast_operator.children.redis_users import (
    kept_users,
    redis_secrets,
    redis_users,
    secrets_hash,
    secrets_of_users,
)
from ballast_operator.children.service import budget, network_policy, service
from ballast_operator.conditions import Given, conditions, knows_versions, ray_parts, ray_progress, reported_lack
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    INFERENCE_DEPLOYMENT,
    NETWORK_POLICY,
    POD,
    RAY_SERVICE,
    RULE,
    SECRET,
    SERVICE,
    SERVICE_MONITOR,
    STATEFUL_SET,
    Body,
    Key,
    Kind,
    key_of,
)
from ballast_operator.named_secrets import named_secrets
from ballast_operator.plan import (
    Annotate,
    Apply,
    ChildrenPlan,
    ClusterSnapshot,
    changes,
    deletions,
    held,
    is_live,
    is_owned,
)
from ballast_operator.poll_result import FRESH_SECONDS, PollResult, QueueSource
from ballast_operator.queue_rules import own_queue, queue_of
from ballast_operator.ray_status import num_pods
from ballast_operator.report import is_same_reason
from ballast_operator.resource_type import ResourceType
from ballast_operator.retention import is_kept
from ballast_queue.status import WorkerStatus

ON_RAY = ""
"""The version of pods on Ray, which have no annotation of it: a replica gets its configuration from Serve."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MOST_COST = 2**31 - 1
CHILDREN = (CONFIG_MAP, NETWORK_POLICY, SERVICE, BUDGET, DEPLOYMENT, STATEFUL_SET, RAY_SERVICE, SERVICE_MONITOR, RULE)
"""In the order of application: the Deployment follows the objects that a pod needs when it starts."""


def plan(
    resource: InferenceDeployment,
    snapshot: ClusterSnapshot,
    context: OperatorContext,
    poll: PollResult | None = None,
) -> ChildrenPlan:
    """Compare the resource with the cluster and return what must be written.

    Args:
        resource: the wanted state.
        snapshot: the present state. If it is outdated, the next reconciliation corrects the result.
        context: image, Redis and optional kinds.
        poll: the load of each pod, which decides which pods a smaller Deployment loses first.
    """
    config = worker_config(resource, own_keys=context.redis_keys)
    texts = config_texts(config, _files(resource, snapshot), _running(resource, snapshot))
    version = version_of(config)
    files = {each: content_hash(text) for each, text in texts.items()}
    if resource.spec.runtime.ray is not None:
        files[ON_RAY] = files[version]
    copied = _copied(resource, snapshot, context)
    wanted = list(_wanted(resource, snapshot, context, texts, copied, version=version))
    changed = changes(wanted, snapshot)
    return ChildrenPlan(
        costs=tuple(_costs(resource, snapshot, poll)),
        apply=(
            *_redis_secrets(resource, snapshot, context, copied),
            *_gcs_secret(resource, snapshot, context),
            *changed,
        ),
        resize=tuple(resize(resource, snapshot)),
        delete=tuple(
            gone
            for gone in deletions(wanted, snapshot)
            # An optional kind of which a child exists is missing only until its discovery succeeds.
            if (not gone.key.kind.is_optional or gone.key.kind.name in context.kinds)
            and not is_kept(gone.key, resource, snapshot, changed)
        ),
        annotate=tuple(_annotations(resource, snapshot, files, copied)),
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


def _copied(resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext) -> str:
    """Return the hash of the Redis Secrets that are wanted now; empty if there are none.

    Until Redis accepted a user, Secrets that exist stay as they are, because workers may use them.
    """
    wanted, written = secrets_hash(resource, context), _written(resource, snapshot)
    return written if wanted and written is not None and context.refuses_users is None else wanted


def _written(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> str | None:
    """Return the hash of the Redis Secrets that were written, or None if there are none."""
    found = _config_map(resource, snapshot)
    if found is None or not is_owned(found, snapshot.uid):
        return None
    return (found["metadata"].get("annotations") or {}).get(REDIS_HASH) or None


def _outdated_users(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, written: Mapping[Key, str]
) -> frozenset[str]:
    is_recorded = _written(resource, snapshot) in {None, secrets_hash(resource, context)}
    if is_recorded and not snapshot.lost:
        return frozenset()
    return frozenset(
        user
        for user, secret, marker in secrets_of_users(resource, context)
        if secret in snapshot.lost or not (is_recorded or written.get(secret) == marker)
    )


def _redis_secrets(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext, copied: str
) -> Iterator[Apply]:
    """Yield the Secrets with users of the operator's own Redis if they are outdated.

    An annotation of the ConfigMap records which data was written. The cache holds no Secrets, because the operator
    would need the permission to read all of them.
    """
    if not copied:
        return
    is_written = _written(resource, snapshot) == copied
    for body in redis_secrets(resource, context):
        key = key_of(SECRET, body)
        if not is_written or key in snapshot.lost:
            because = f"Wrote the Redis Secret {key.name}"
            is_for_others = key.name != redis_secret(resource.metadata.name)
            yield Apply(key, body, uid=None, because=because, is_for_others=is_for_others)


def _gcs_secret(resource: InferenceDeployment, snapshot: ClusterSnapshot, context: OperatorContext) -> Iterator[Apply]:
    """Yield the Secret of a head's Redis if it is missing. Its password is made when it is created, and then kept."""
    if not is_needed(resource, context):
        return
    body = gcs_secret(resource)
    key = key_of(SECRET, body)
    if key in snapshot.lost or snapshot.child(STATEFUL_SET, resource.metadata, key.name) is None:
        yield Apply(key, body, uid=None, because=f"Wrote the Secret {key.name}", generates=PASSWORD)


def _annotations(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, files: Mapping[str, str], copied: str
) -> Iterator[Annotate]:
    """Yield pods whose configuration or Redis Secret changed: a new annotation makes the kubelet update the files."""
    found = _config_map(resource, snapshot)
    changed = _changed_at(found) if found is not None else None
    for pod in snapshot.pods:
        metadata = pod["metadata"]
        annotations = metadata.get("annotations") or {}
        config = files.get(annotations.get(VERSION, "")) if not is_ray_pod(pod) else None
        if config is None or not is_live(pod):
            continue
        wanted = {CONFIG_HASH: config} | ({REDIS_HASH: copied} if copied else {})
        is_younger = changed is None or metadata["creationTimestamp"] > changed
        started_with = _started_with(found, annotations[VERSION], wanted) if is_younger else {}
        old = [name for name, value in wanted.items() if annotations.get(name, started_with.get(name)) != value]
        if old:
            what = "configuration" if CONFIG_HASH in old else "Redis address"
            yield Annotate(key_of(POD, pod), wanted, f"Updated the {what} of pod {metadata['name']}")


def _started_with(found: Body | None, version: str, wanted: Mapping[str, str]) -> Mapping[str, str | None]:
    """Return the hashes that a pod read if it is younger than the last change; `wanted` if that is unknown."""
    text = ((found or {}).get("data") or {}).get(file_name(version))
    if found is None or text is None:
        return wanted
    return {CONFIG_HASH: content_hash(text), REDIS_HASH: (found["metadata"].get("annotations") or {}).get(REDIS_HASH)}


def _changed_at(config: Body) -> str | None:
    """Return when the data last changed after its creation, on the API server's clock like the pods' creation times."""
    created = config["metadata"].get("creationTimestamp", "")
    times = [entry["time"] for entry in config["metadata"].get("managedFields") or () if entry.get("time")]
    newest = max(times, default=created)
    return newest if newest > created else None


def _costs(resource: InferenceDeployment, snapshot: ClusterSnapshot, poll: PollResult | None) -> Iterator[Annotate]:
    """Yield deletion costs before a Deployment loses replicas: the pods with the least load are deleted first."""
    found = snapshot.child(DEPLOYMENT, resource.metadata)
    pods = tuple(pod for pod in snapshot.pods if is_live(pod))
    if poll is None or found is None or not 0 < resource.spec.replicas < found["spec"].get("replicas", 1):
        return
    statuses = poll.by_pod(pods)
    for pod in pods:
        name = pod["metadata"]["name"]
        # A ready pod that has not reported may be full. Any other serves no requests yet, or does not work.
        cost = str(_load(statuses[name]) if name in statuses else MOST_COST if is_ready(pod) else -1)
        if (pod["metadata"].get("annotations") or {}).get(DELETION_COST) != cost:
            yield Annotate(key_of(POD, pod), {DELETION_COST: cost}, f"Set the deletion cost of pod {name} to {cost}")


def _load(status: WorkerStatus) -> int:
    """Return the load of a worker. Online work counts more: offline items return to the queue and lose nothing."""
    online, offline = status.online, status.offline
    load = 1000 * (online.running + online.parked + online.waiting) + offline.running + offline.parked
    return min(load, MOST_COST)


def _config_map(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> Body | None:
    return snapshot.child(CONFIG_MAP, resource.metadata, config_map(resource.metadata.name))


def _files(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> dict[str, str]:
    """Return the present configuration files by version."""
    data: Mapping[str, str] = (_config_map(resource, snapshot) or {}).get("data") or {}
    return {version: text for name, text in data.items() if (version := version_of_file(name)) is not None}


def _running(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> frozenset[str]:
    """Return the versions of the pods and of the Deployment, whose newest pods may not be in the cache yet."""
    made = snapshot.child(DEPLOYMENT, resource.metadata)
    sources = [*snapshot.pods, *([made["spec"]["template"]] if made is not None else [])]
    return frozenset((source["metadata"].get("annotations") or {}).get(VERSION, "") for source in sources)


def status(given: Given, reported: tuple[Condition, ...], scaling: ScalingStatus | None) -> Status:
    """Return the status to report. It equals the present status if nothing is new."""
    resource = given.resource
    metadata = resource.metadata
    return Status(
        observed_generation=metadata.generation,
        updated_replicas=resource.status.updated_replicas,
        selector=",".join(f"{name}={value}" for name, value in selector(metadata.name).items()),
        served_name=resource.spec.served_name,
        endpoint=_endpoint(resource),
        queue=resource.queue_name,
        former_queues=_former_queues(resource, None if given.has_older_pods else given.poll),
        config_hash=given.plan.files.get(given.plan.version, ""),
        slots=_slots(given),
        scaling=_scaling(scaling, resource.status.scaling),
        conditions=reported,
    ).model_copy(update=_counts(given))


def _counts(given: Given) -> Mapping[str, object]:
    """Return the fields of the status that count workers, without those that are unknown."""
    ready = given.count("readyReplicas")
    found = {
        "replicas": given.count("replicas"),
        "ready_replicas": ready,
        "updated_replicas": given.count("updatedReplicas"),
        "workers": f"{ready}/{given.resource.spec.replicas}",
    }
    if not knows_versions(given):
        del found["updated_replicas"]
    return found


def _read_counted(body: Body) -> InferenceDeployment:
    """Read the fields that `Ready` and the counts depend on, each if it is valid. The others have defaults."""
    bare: Body = {"metadata": {"name": "counted"}, "spec": {"model": {"uri": "file:///"}}}
    found = InferenceDeployment.read(bare, "counted")
    for name in ("replicas", "rollout", "runtime"):
        wider = bare | {"spec": bare["spec"] | {name: (body.get("spec") or {}).get(name)}}
        with suppress(InvalidConfig):
            found, bare = InferenceDeployment.read(wider, "counted"), wider
    return found.model_copy(update={"metadata": Metadata.model_validate(body["metadata"])})


def _endpoint(resource: InferenceDeployment) -> str:
    scheme = "http" if resource.spec.network.tls_secret is None else "https"
    return f"{scheme}://{resource.metadata.name}.{resource.metadata.namespace}.svc:{HTTP_PORT}"


def _former_queues(resource: InferenceDeployment, poll: PollResult | None) -> tuple[str, ...]:
    """Return the queues that the resource left, without those that the poll found to be finished."""
    before = (*resource.status.former_queues, resource.status.queue)
    done = {queue.name for queue in poll.former if queue.is_over} if poll is not None else set()
    left = (name for name in dict.fromkeys(before) if name and name != resource.queue_name and name not in done)
    return tuple(left)[-MOST_FORMER_QUEUES:]


def _slots(given: Given) -> ClassSlots | None:
    """Return the configured slots of the workers. If none reports, the slots stay while workers may exist."""
    poll, spec, status = given.poll, given.resource.spec, given.resource.status
    if poll is None or not poll.workers:
        has_polled = poll is not None and poll.problem is None and given.now - poll.at <= FRESH_SECONDS
        is_gone = given.count("readyReplicas") == 0 and (spec.replicas == 0 or has_polled)
        return None if is_gone else status.slots
    offline = sum(worker.offline_reserved for worker in poll.workers)
    return ClassSlots(online=max(0, sum(worker.slots for worker in poll.workers) - offline), offline=offline)


def _awaits_poll(given: Given, wanted: ResourceStatus) -> bool:
    """Return whether the resource becomes ready before a worker has reported its slots."""
    before = given.resource.status.condition(ConditionType.READY)
    after = wanted.condition(ConditionType.READY)
    becomes_ready = after is not None and after.status == "True" and (before is None or before.status != "True")
    has_workers = given.count("readyReplicas") > 0 and given.poll is not None and given.poll.problem is None
    return becomes_ready and has_workers and isinstance(wanted, Status) and wanted.slots is None


def _scaling(wanted: ScalingStatus | None, reported: ScalingStatus | None) -> ScalingStatus | None:
    """Return the reported decision while its replicas and its reason stay the same: new figures are not reported."""
    if wanted is None or reported is None or wanted.replicas != reported.replicas:
        return wanted
    return reported if is_same_reason(wanted.because, reported.because) else wanted


def _made_replicas(given: Given) -> int:
    ray, found = given.resource.spec.runtime.ray, given.snapshot.child(DEPLOYMENT, given.resource.metadata)
    if given.ray_service is not None:
        return num_pods(given.ray_service) // (ray.nodes if ray is not None else 1)
    return int(found["spec"].get("replicas", 1)) if found is not None else 0


def _secrets(resource: InferenceDeployment, context: OperatorContext) -> tuple[Key, ...]:
    own = (gcs_secret(resource),) if is_needed(resource, context) else ()
    return tuple(key_of(SECRET, body) for body in (*redis_secrets(resource, context), *own))


def _source(resource: InferenceDeployment, context: OperatorContext) -> QueueSource:
    own = context.redis if resource.spec.redis is None else None
    owner = f"{resource.metadata.namespace}/{resource.metadata.name}"
    redis = redis_of(resource, own_keys=context.redis_keys)
    is_scaled = resource.spec.scaling is not None
    return QueueSource(redis, resource.queue_name, owner, _former_queues(resource, None), is_scaled, own)


RESOURCE_TYPE = ResourceType(
    kind=INFERENCE_DEPLOYMENT,
    children=CHILDREN,
    label=WORKER,
    read=lambda body: InferenceDeployment.read(body, f"{KIND} {body['metadata']['name']}", is_stored=True),
    read_status=Status.model_validate,
    plan=plan,
    conditions=conditions,
    status=status,
    blocked=blocked,
    named_secrets=named_secrets,
    secrets=_secrets,
    redis_users=redis_users,
    outdated_users=_outdated_users,
    kept_users=kept_users,
    read_counted=_read_counted,
    counts=_counts,
    parts=ray_parts,
    queue_of=queue_of,
    own_queue=own_queue,
    written_with=services_of_kuberay,
    source=_source,
    progress=ray_progress,
    reported_lack=reported_lack,
    awaits_poll=_awaits_poll,
    scaling=lambda resource: resource.spec.scaling,
    made_replicas=_made_replicas,
    startup_seconds=lambda resource: resource.spec.startup_seconds,
    slots=lambda resource: resource.spec.slots,
)
