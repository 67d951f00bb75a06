"""From (resource, snapshot) to what must be written. PURE: `plan` of what `plan` produced is empty."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import CONFIG_HASH, COPY_OF, SPEC_HASH, config_map, redis_secret
from ballast_operator.children.config import (
    REDIS_HASH,
    VERSION,
    config_manifest,
    config_texts,
    content_hash,
    file_name,
    version_of,
    version_of_file,
    worker_config,
)
from ballast_operator.children.manifest import manifest
from ballast_operator.children.monitoring import prometheus_rule, service_monitor
from ballast_operator.children.pods import deployment
from ballast_operator.children.service import budget, network_policy, service
from ballast_operator.drift import drift
from ballast_operator.kinds import (
    BUDGET,
    CHILDREN,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    RULE,
    SECRET,
    SERVICE,
    SERVICE_MONITOR,
    Body,
    Key,
    Kind,
    key_of,
)
from ballast_operator.load import Load
from ballast_queue.status import WorkerStatus

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MOST_PATHS = 4
"""Of drift, named in a sentence."""

ChildName = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for every resource."""

    image: str
    """Of workers that name none."""
    kinds: frozenset[str] = frozenset()
    """Optional kinds that this cluster has."""
    redis: Mapping[str, str] | None = None
    """Data of the operator's own Redis Secret, as the API gives it; None: there is none."""
    redis_key: Key | None = None
    """Where that Secret is."""
    runbooks: str | None = None
    """Base URL of the runbook pages that alerts link to."""

    @property
    def lacks_redis(self) -> bool:
        """There is to be a Secret, and it is not there or not whole: what it says is unknown, and not "no Redis"."""
        return self.redis_key is not None and "url" not in self.redis_keys

    @property
    def redis_keys(self) -> frozenset[str]:
        """Keys of that Secret; empty where there is none."""
        return frozenset(self.redis or ())

    @property
    def redis_hash(self) -> str:
        """Names that data; empty where there is none."""
        if self.redis is None:
            return ""
        return hashlib.sha256(json.dumps(dict(self.redis), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What of one resource stands in the cluster."""

    uid: str
    """Of the resource: what it owns names it."""
    children: Mapping[ChildName, Body] = field(default_factory=dict)
    pods: tuple[Body, ...] = ()
    tolerated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By the hash of a manifest: paths at which the cluster changes it whatever is applied, as a webhook does."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make an object what the manifest says; with `force`, where others own its fields."""

    kind: Kind
    manifest: Body
    force: bool
    because: str
    is_repair: bool = False
    """The object differs from what was applied, so somebody else wrote it."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this very object."""

    kind: Kind
    key: Key
    uid: str
    because: str


@dataclass(frozen=True, slots=True)
class Touch:
    """Set annotations of a pod."""

    key: Key
    annotations: Mapping[str, str]
    because: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, in this order: costs, applications, deletions, touches."""

    costs: tuple[Touch, ...] = ()
    apply: tuple[Apply, ...] = ()
    delete: tuple[Delete, ...] = ()
    touch: tuple[Touch, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Hash of the configuration file of each version, which workers of that version should have in force."""
    version: str = ""
    """The version that pods should run."""

    def __bool__(self) -> bool:
        return bool(self.costs or self.apply or self.delete or self.touch)

    @property
    def because(self) -> tuple[str, ...]:
        """Why, one sentence for each thing to write."""
        steps: tuple[Apply | Delete | Touch, ...] = (*self.costs, *self.apply, *self.delete, *self.touch)
        return tuple(step.because for step in steps)


def plan(
    resource: InferenceDeployment, snapshot: Snapshot, surroundings: Surroundings, load: Load | None = None
) -> Plan:
    """Compare what is wanted with what is there.

    Args:
        resource: what is wanted.
        snapshot: assumed to be what is there now; where it was not, the next turn sees that.
        surroundings: image, Redis and kinds that this cluster has.
        load: tells which pods to lose first.
    """
    config = worker_config(resource, own_keys=surroundings.redis_keys)
    texts = config_texts(config, _files(resource, snapshot), _running(resource, snapshot))
    files = {version: content_hash(text) for version, text in texts.items()}
    copied = surroundings.redis_hash if resource.spec.redis is None else ""
    wanted = list(_wanted(resource, surroundings, texts, version_of(config), copied))
    return Plan(
        costs=tuple(_costs(resource, snapshot, load)),
        apply=(
            *_redis_copy(resource, snapshot, surroundings),
            *(step for kind, body in wanted if (step := _application(kind, body, snapshot)) is not None),
        ),
        delete=tuple(_deletions(wanted, snapshot)),
        touch=tuple(_touches(resource, snapshot, files, copied)),
        files=files,
        version=version_of(config),
    )


def _wanted(
    resource: InferenceDeployment, surroundings: Surroundings, texts: Mapping[str, str], version: str, copied: str
) -> Iterator[tuple[Kind, Body]]:
    """Children in the order of application: what a pod needs at its start stands before the Deployment."""
    yield CONFIG_MAP, config_manifest(resource, texts, copied)
    policy = network_policy(resource)
    if policy is not None:
        yield NETWORK_POLICY, policy
    yield SERVICE, service(resource)
    yield BUDGET, budget(resource)
    yield DEPLOYMENT, deployment(resource, version, image=surroundings.image, own_keys=surroundings.redis_keys)
    for kind, body in (
        (SERVICE_MONITOR, service_monitor(resource)),
        (RULE, prometheus_rule(resource, runbooks=surroundings.runbooks)),
    ):
        if body is not None and kind.name in surroundings.kinds:
            yield kind, body


def _application(kind: Kind, wanted: Body, snapshot: Snapshot) -> Apply | None:
    name = key_of(wanted).name
    found = snapshot.children.get((kind.name, name))
    if found is None:
        return Apply(kind, wanted, force=False, because=f"Created {kind.name} {name}")
    if found["metadata"].get("deletionTimestamp"):
        return None  # the next turn, when it is gone, makes a new one
    if not _is_owned(found, snapshot.uid):
        return Apply(kind, wanted, force=True, because=f"Took over {kind.name} {name} of a deleted resource")
    marker = wanted["metadata"]["annotations"][SPEC_HASH]
    if (found["metadata"].get("annotations") or {}).get(SPEC_HASH) != marker:
        return Apply(kind, wanted, force=True, because=f"Updated {kind.name} {name}")
    paths = [path for path in drift(wanted, found) if path not in snapshot.tolerated.get(marker, ())]
    if paths:
        named = ", ".join(paths[:MOST_PATHS]) + (" ..." if len(paths) > MOST_PATHS else "")
        said = f"Restored {kind.name} {name}, where somebody changed {named}"
        return Apply(kind, wanted, force=True, because=said, is_repair=True)
    return None


def _redis_copy(resource: InferenceDeployment, snapshot: Snapshot, surroundings: Surroundings) -> Iterator[Apply]:
    """No cache holds Secrets (that would need the right to read all of them): the ConfigMap says what was copied."""
    if surroundings.redis is None or resource.spec.redis is not None:
        return
    found = snapshot.children.get((CONFIG_MAP.name, config_map(resource.metadata.name)))
    copied = (found["metadata"].get("annotations") or {}).get(REDIS_HASH) if found is not None else None
    if found is not None and _is_owned(found, snapshot.uid) and copied == surroundings.redis_hash:
        return
    name = redis_secret(resource.metadata.name)
    source = {COPY_OF: str(surroundings.redis_key)}
    content: Body = {"type": "Opaque", "data": dict(surroundings.redis)}
    body = manifest(SECRET, resource, content, name=name, annotations=source)
    yield Apply(SECRET, body, force=True, because=f"Copied the Redis Secret to {name}")


def _deletions(wanted: list[tuple[Kind, Body]], snapshot: Snapshot) -> Iterator[Delete]:
    names = {(kind.name, key_of(body).name) for kind, body in wanted}
    kinds = {kind.name: kind for kind in CHILDREN}
    for (kind, name), found in sorted(snapshot.children.items()):
        metadata = found["metadata"]
        if (kind, name) in names or metadata.get("deletionTimestamp") or not _is_owned(found, snapshot.uid):
            continue
        yield Delete(
            kinds[kind], key_of(found), metadata["uid"], f"Deleted {kind} {name}, which is not wanted any more"
        )


def _touches(
    resource: InferenceDeployment, snapshot: Snapshot, files: Mapping[str, str], copied: str
) -> Iterator[Touch]:
    """Pods under which a file changed, of configuration or Redis: an annotation makes the kubelet bring it at once."""
    found = snapshot.children.get((CONFIG_MAP.name, config_map(resource.metadata.name)))
    changed = _changed_at(found) if found is not None else None
    for pod in snapshot.pods:
        metadata = pod["metadata"]
        annotations = metadata.get("annotations") or {}
        config = files.get(annotations.get(VERSION, ""))
        if config is None or not is_live(pod):
            continue
        wanted = {CONFIG_HASH: config} | ({REDIS_HASH: copied} if copied else {})
        is_younger = changed is None or metadata["creationTimestamp"] > changed
        started_with = _started_with(found, annotations[VERSION], wanted) if is_younger else {}
        old = [name for name, value in wanted.items() if annotations.get(name, started_with.get(name)) != value]
        if old:
            said = "configuration" if CONFIG_HASH in old else "Redis address"
            yield Touch(key_of(pod), wanted, f"Told pod {metadata['name']} of its new {said}")


def _started_with(found: Body | None, version: str, wanted: Mapping[str, str]) -> Mapping[str, str | None]:
    """What a pod read that is younger than the last change of the ConfigMap; `wanted` where nobody knows."""
    text = ((found or {}).get("data") or {}).get(file_name(version))
    if found is None or text is None:
        return wanted
    return {CONFIG_HASH: content_hash(text), REDIS_HASH: (found["metadata"].get("annotations") or {}).get(REDIS_HASH)}


def _changed_at(config: Body) -> str | None:
    """When its data changed last after its creation, by the API server's clock, as pods' creation times are."""
    created = config["metadata"].get("creationTimestamp", "")
    times = [entry["time"] for entry in config["metadata"].get("managedFields") or () if entry.get("time")]
    newest = max(times, default=created)
    return newest if newest > created else None


def _costs(resource: InferenceDeployment, snapshot: Snapshot, load: Load | None) -> Iterator[Touch]:
    """Before replicas leave: the least loaded first. Nothing is written while none leaves."""
    found = snapshot.children.get((DEPLOYMENT.name, resource.metadata.name))
    pods = tuple(pod for pod in snapshot.pods if is_live(pod))
    if load is None or found is None or not 0 < resource.spec.replicas < found["spec"].get("replicas", 1):
        return
    statuses = load.of_pods(pods)
    for pod in pods:
        name = pod["metadata"]["name"]
        # A pod that has said nothing serves nobody yet, or is unwell.
        cost = str(_busy(statuses[name])) if name in statuses else "-1"
        if (pod["metadata"].get("annotations") or {}).get(DELETION_COST) != cost:
            yield Touch(key_of(pod), {DELETION_COST: cost}, f"Marked pod {name} with its load, {cost}")


def _busy(status: WorkerStatus) -> int:
    """Online work weighs more: offline items are given back and lose nothing."""
    online, offline = status.online, status.offline
    return 1000 * (online.running + online.parked + online.waiting) + offline.running + offline.parked


def _files(resource: InferenceDeployment, snapshot: Snapshot) -> dict[str, str]:
    """The configuration files that are there, by version."""
    found = snapshot.children.get((CONFIG_MAP.name, config_map(resource.metadata.name)))
    data: Mapping[str, str] = (found or {}).get("data") or {}
    return {version: text for name, text in data.items() if (version := version_of_file(name)) is not None}


def _running(resource: InferenceDeployment, snapshot: Snapshot) -> frozenset[str]:
    """Versions that pods run with, and that of the Deployment, whose newest pods the caches may not show yet."""
    made = snapshot.children.get((DEPLOYMENT.name, resource.metadata.name))
    sources = [*snapshot.pods, *([made["spec"]["template"]] if made is not None else [])]
    return frozenset((source["metadata"].get("annotations") or {}).get(VERSION, "") for source in sources)


def is_live(pod: Body) -> bool:
    """True for a pod that runs or will; what is being deleted or has ended counts no more."""
    return not pod["metadata"].get("deletionTimestamp") and pod.get("status", {}).get("phase") not in {
        "Succeeded",
        "Failed",
    }


def _is_owned(body: Body, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or ())
