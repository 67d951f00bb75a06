"""The configuration that the pods run with: its versions, and how each pod gets a change of it. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import CONFIG_HASH, config_map
from ballast_api.worker_config import content_hash
from ballast_operator.children.config import REDIS_HASH, VERSION, file_name, version_of_file
from ballast_operator.children.ray import is_ray_pod
from ballast_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, Body, key_of
from ballast_operator.plan import Annotate, ClusterSnapshot, is_live


def config_map_of(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> Body | None:
    """Return the ConfigMap of a resource; None if there is none yet."""
    return snapshot.child(CONFIG_MAP, resource.metadata, config_map(resource.metadata.name))


def present_files(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> dict[str, str]:
    """Return the present configuration files by version."""
    data: Mapping[str, str] = (config_map_of(resource, snapshot) or {}).get("data") or {}
    return {version: text for name, text in data.items() if (version := version_of_file(name)) is not None}


def running_versions(resource: InferenceDeployment, snapshot: ClusterSnapshot) -> frozenset[str]:
    """Return the versions of the pods and of the Deployment, whose newest pods may not be in the cache yet."""
    made = snapshot.child(DEPLOYMENT, resource.metadata)
    sources = [*snapshot.pods, *([made["spec"]["template"]] if made is not None else [])]
    return frozenset((source["metadata"].get("annotations") or {}).get(VERSION, "") for source in sources)


def outdated_pods(
    resource: InferenceDeployment, snapshot: ClusterSnapshot, files: Mapping[str, str], copied: str
) -> Iterator[Annotate]:
    """Yield pods whose configuration or Redis Secret changed: a new annotation makes the kubelet update the files."""
    found = config_map_of(resource, snapshot)
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
