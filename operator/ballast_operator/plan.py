"""Compares wanted children with the cluster: what must be written, and why. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast_api.metadata import Metadata
from ballast_api.names import SPEC_HASH
from ballast_operator.children.manifest import hash_of
from ballast_operator.content import CHILD_MEBIBYTES, MOST_LEVELS, is_too_large, is_whole
from ballast_operator.drift import drift, without_additions
from ballast_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    RAY_SERVICE,
    RULE,
    SECRET,
    SERVICE_MONITOR,
    STATEFUL_SET,
    Body,
    Key,
    Kind,
    key_of,
)

MOST_PATHS = 4
"""Drifted fields that a message names."""
KEEP_ADDITIONS = frozenset({SERVICE_MONITOR, RULE})
"""Kinds of which only changed fields are restored. They run no code."""
MOUNTED = frozenset({SECRET, CONFIG_MAP})
"""Kinds of children that pods mount by name."""
NEEDED = MOUNTED | {NETWORK_POLICY}
"""Kinds of children without which no pod may start. Without its policy, a pod is open to all."""
MAKE_PODS = frozenset({DEPLOYMENT, STATEFUL_SET, RAY_SERVICE})
"""Kinds of children of which controllers make pods."""


class Tolerated(NamedTuple):
    """The fields of a child that the cluster changes after each write, as a webhook does."""

    shape: str
    """The `shape` of the manifest that was written."""
    paths: frozenset[str]


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The objects in the cluster that belong to one resource."""

    uid: str
    """The uid of the resource, which the owner references of its children contain."""
    children: Mapping[Key, Body] = field(default_factory=dict)
    pods: tuple[Body, ...] = ()
    """The worker pods."""
    tolerated: Mapping[Key, Tolerated] = field(default_factory=dict)
    """Fields of the children that are not restored."""
    lost: frozenset[Key] = frozenset()
    """Secrets of the resource that are missing or were changed by others. The cache holds no Secrets."""
    heads: tuple[Body, ...] = ()
    """The heads of its Ray clusters."""

    def child(self, kind: Kind, owner: Metadata, name: str | None = None) -> Body | None:
        """Return a child, which is named like its owner unless `name` is given.

        Return None if the resource owns none, or if the child is too large to be read.
        """
        found = self.children.get(Key(kind, owner.namespace, name or owner.name))
        return found if found is not None and is_owned(found, self.uid) and is_whole(found) else None


@dataclass(frozen=True, slots=True)
class Apply:
    """Make an object match a manifest."""

    key: Key
    manifest: Body
    uid: str | None
    """The uid of the resource's own object. None: create the object."""
    because: str
    is_repair: bool = False
    """Another writer changed the object after it was applied."""
    patch: Body | None = None
    """The merge patch that also removes what another writer added, which an apply would keep."""
    generates: str = ""
    """The key of a Secret that gets a random value when it is created. A Secret that exists is kept."""
    is_for_others: bool = False
    """No pod of the resource mounts the object."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid."""

    key: Key
    uid: str
    because: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """Set annotations of a pod."""

    key: Key
    annotations: Mapping[str, str]
    because: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Set the number of worker pods of a Ray cluster, unless it has changed since KubeRay reported it."""

    key: Key
    owner: str
    """The uid of the RayService that must own the Ray cluster."""
    replicas: int
    leaving: tuple[str, ...]
    """The pods that go."""
    because: str


@dataclass(frozen=True, slots=True)
class ChildrenPlan:
    """The writes of a reconciliation, in this order: costs, apply, resize, delete, annotate."""

    costs: tuple[Annotate, ...] = ()
    """Deletion costs of pods, which must be set before a Deployment loses replicas."""
    apply: tuple[Apply, ...] = ()
    resize: tuple[Resize, ...] = ()
    delete: tuple[Delete, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Hash of each version's configuration file, which the workers of that version should use."""
    version: str = ""
    """The version that pods should run."""
    held: tuple[str, ...] = ()
    """A sentence for each wanted child that is being deleted. It is created again after that."""

    def __bool__(self) -> bool:
        return bool(self.costs or self.apply or self.resize or self.delete or self.annotate)

    @property
    def because(self) -> tuple[str, ...]:
        """Return one sentence for each write."""
        steps: tuple[Apply | Resize | Delete | Annotate, ...]
        steps = (*self.costs, *self.apply, *self.resize, *self.delete, *self.annotate)
        return tuple(step.because for step in steps)


def changes(wanted: Sequence[tuple[Kind, Body]], snapshot: ClusterSnapshot) -> tuple[Apply, ...]:
    """Return the manifests of `wanted` that must be applied."""
    return tuple(
        step
        for kind, body in wanted
        if not _cannot_change(key_of(kind, body), body, snapshot)
        and (step := _change(key_of(kind, body), body, snapshot)) is not None
    )


def without_needed(wanted: Sequence[tuple[Kind, Body]], snapshot: ClusterSnapshot) -> frozenset[Key]:
    """Return the children that wait for one before them without which no pod may start, and that cannot change now.

    A pod would wait for a file that is not there, or would be open to all.
    """
    waiting: set[Key] = set()
    lacks_policy = False
    for number, (kind, body) in enumerate(wanted):
        key = key_of(kind, body)
        if lacks_policy and makes_pods(kind, body):
            waiting.add(key)
        if kind in NEEDED and _cannot_change(key, body, snapshot):
            if kind in MOUNTED:
                return frozenset(key_of(*each) for each in wanted[number:])
            lacks_policy = lacks_policy or not _is_in_force(snapshot.children[key], snapshot)
    return frozenset(waiting)


def makes_pods(kind: Kind, manifest: Body) -> bool:
    """Return whether a controller makes pods of a child. A Deployment without replicas only loses pods."""
    return kind in MAKE_PODS and manifest["spec"].get("replicas") != 0


def _is_in_force(policy: Body, snapshot: ClusterSnapshot) -> bool:
    """Return whether a policy protects the pods of the resource. It does so until it is gone, also while it is deleted.

    The operator does not know what a policy does that is too large, or that belongs to a deleted namesake.
    """
    return is_owned(policy, snapshot.uid) and not is_too_large(policy)


def _cannot_change(key: Key, wanted: Body, snapshot: ClusterSnapshot) -> bool:
    """Return whether an object is too large, or is being deleted, and is created again after that."""
    found = snapshot.children.get(key)
    if found is None:
        return False
    if found["metadata"].get("deletionTimestamp"):
        return True
    return is_too_large(found) if is_owned(found, snapshot.uid) else is_left_over(wanted, found)


def _change(key: Key, wanted: Body, snapshot: ClusterSnapshot) -> Apply | None:
    label = f"{key.kind.name} {key.name}"
    found = snapshot.children.get(key)
    if found is None:
        return Apply(key, wanted, uid=None, because=f"Created {label}")
    if not is_owned(found, snapshot.uid):
        return Apply(key, wanted, uid=None, because=f"Created {label}")
    uid, marker = found["metadata"]["uid"], wanted["metadata"]["annotations"][SPEC_HASH]
    if (found["metadata"].get("annotations") or {}).get(SPEC_HASH) != marker:
        return Apply(key, wanted, uid=uid, because=f"Updated {label}")
    known = snapshot.tolerated.get(key)
    tolerated = known.paths if known is not None and known.shape == shape(wanted) else frozenset()
    differences = drift(wanted, found)
    added = [path for path in differences.added if path not in tolerated and key.kind not in KEEP_ADDITIONS]
    paths = list(dict.fromkeys([*(path for path in differences.changed if path not in tolerated), *added]))
    if paths:
        named = ", ".join(paths[:MOST_PATHS]) + (" ..." if len(paths) > MOST_PATHS else "")
        because = f"Restored {label}, of which another writer changed {named}"
        patch = without_additions(wanted, found) if added else None
        return Apply(key, wanted, uid=uid, because=because, is_repair=True, patch=patch)
    return None


def held(wanted: Sequence[tuple[Kind, Body]], snapshot: ClusterSnapshot) -> Iterator[str]:
    """Yield a sentence for each wanted child to which no change is applied: it is being deleted, or too large."""
    for kind, body in wanted:
        found = snapshot.children.get(key_of(kind, body), {})
        metadata = found.get("metadata") or {}
        others = " and the other children" if kind in MOUNTED else ""
        if kind == NETWORK_POLICY and found and not _is_in_force(found, snapshot):
            others = " and the pods"
        if metadata.get("deletionTimestamp"):
            finalizers = ", ".join(metadata.get("finalizers") or ())
            waits = f" and waits for its finalizers ({finalizers})" if finalizers else ""
            yield (
                f"{kind.name} {metadata['name']} is being deleted{waits}. Until it is gone and created again, no "
                f"change of the resource reaches it{others}"
            )
        elif is_too_large(found) and is_owned(found, snapshot.uid):
            yield (
                f"another writer made {kind.name} {metadata['name']} take more than {CHILD_MEBIBYTES} MiB of the "
                f"operator's memory, or have more than {MOST_LEVELS} levels, so no change of the resource reaches "
                f"it{others}. Remove what was added, or delete it, and the operator creates it again"
            )


def shape(manifest: Body) -> str:
    """Return a hash of the content of a manifest without its replicas, which autoscalers change often."""
    content = {name: value for name, value in manifest.items() if name != "metadata"}
    if isinstance(content.get("spec"), dict):
        content["spec"] = {name: value for name, value in content["spec"].items() if name != "replicas"}
    return hash_of(content)


def deletions(wanted: Sequence[tuple[Kind, Body]], snapshot: ClusterSnapshot) -> Iterator[Delete]:
    """Yield the children that exist and are not in `wanted`."""
    keys = {key_of(kind, body) for kind, body in wanted}
    for key, found in sorted(snapshot.children.items(), key=lambda item: item[0]):
        metadata = found["metadata"]
        if key in keys or metadata.get("deletionTimestamp") or not is_owned(found, snapshot.uid):
            continue
        yield Delete(key, metadata["uid"], f"Deleted {key.kind.name} {key.name}, which is no longer needed")


def is_left_over(wanted: Body, found: Body) -> bool:
    """Return whether only deleted resources of the same kind and name own an object."""
    (mine,) = wanted["metadata"]["ownerReferences"]
    owners = found["metadata"].get("ownerReferences") or ()
    return bool(owners) and all(all(owner[part] == mine[part] for part in ("kind", "name")) for owner in owners)


def is_live(pod: Body) -> bool:
    """Return whether a pod runs or will run: it is not being deleted and has not ended."""
    return not has_ended(pod) and not pod["metadata"].get("deletionTimestamp")


def has_ended(pod: Body) -> bool:
    """Return whether all containers of a pod have ended for good. Kubernetes may keep such a pod."""
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def is_owned(body: Body, uid: str) -> bool:
    """Return whether the resource with this uid owns an object."""
    return any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or ())


def is_made_for(body: Body, child: Key) -> bool:
    """Return whether a controller made an object for a child, or for a former child of this name."""
    owners = body["metadata"].get("ownerReferences") or ()
    wanted = (child.kind.api_version, child.kind.name, child.name)
    return any((each.get("apiVersion"), each.get("kind"), each.get("name")) == wanted for each in owners)
