"""What the pods of resources may use, as the owner of the cluster permits it. PURE.

An account that may create resources may lack the right to create pods. The operator creates the pods for it, so these
rules limit what such an account can choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from posixpath import normpath
from typing import Any

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import RAY_HEAD_LABEL, RAY_LABEL
from ballast_operator.children.files import CACHE_VOLUME, sources

VOLUME_KINDS = (
    "configMap",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""The kinds of volumes that the Pod Security level `restricted` admits, without `csi`.

The driver of a `csi` volume may read Secrets and issue certificates by attributes of its own, or act as the
ServiceAccount `default`. A claim of such a driver is a `persistentVolumeClaim`.
"""
TOKENS = ("podCertificate", "serviceAccountToken")
"""Sources of a projected volume that give a container the identity of the pod's ServiceAccount."""


@dataclass(frozen=True, slots=True)
class PodRules:
    """What resources may name. Patterns contain `*`, which stands for any characters."""

    images: tuple[str, ...] = ("*",)
    """Patterns of `template.image`."""
    service_accounts: tuple[str, ...] = ()
    """Patterns of `template.serviceAccountName`, as `NAMESPACE/NAME`."""
    volumes: tuple[str, ...] = VOLUME_KINDS
    """Kinds of `template.volumes`, and of the volumes of models; `*` permits every kind but `hostPath`."""
    host_paths: tuple[str, ...] = ()
    """Directories of nodes for volumes of the kind `hostPath`, with what they contain."""
    cache_paths: tuple[str, ...] = ()
    """Directories of nodes for `model.cachePath`."""

    def violations(self, resource: InferenceDeployment) -> Iterator[str]:
        """Yield a sentence for each field of a resource that the rules do not permit."""
        template, namespace = resource.spec.template, resource.metadata.namespace
        if template.image is not None and not _matches(template.image, self.images):
            yield f"template.image {template.image} is not permitted (allowedImages)"
        account = template.service_account_name
        if account is not None and not _matches(f"{namespace}/{account}", self.service_accounts):
            yield f"template.serviceAccountName {account} is not permitted (allowedServiceAccounts)"
        for name in sorted(template.labels):
            if name in {RAY_LABEL, RAY_HEAD_LABEL} or name.startswith("ray.io/"):
                yield f"template.labels has {name}, by which a pod would belong to the Ray cluster of another resource"
        if resource.spec.model.cache_path is not None:
            yield from self._cache_path(resource.spec.model.cache_path, template.volume_mounts)
        for field, kind in _volumes_of_files(resource):
            if not _matches(kind, self.volumes):
                yield f"{field}: a volume of the kind {kind} is not permitted (allowedVolumes)"
        for volume in (each.manifest() for each in template.volumes):
            for kind in sorted(volume.keys() - {"name"}):
                if kind == "hostPath":
                    source = volume[kind]
                    path = source.get("path", "") if isinstance(source, dict) else ""
                    yield from self._host_path(f"volume {volume.get('name')}", str(path))
                elif not _matches(kind, self.volumes):
                    yield f"volume {volume.get('name')}: the kind {kind} is not permitted (allowedVolumes)"
                elif kind == "csi" and (foreign := _namespaces_of_secrets(volume[kind]) - {namespace}):
                    yield (
                        f"volume {volume.get('name')}: it names a Secret in the namespace {min(foreign)}, and only "
                        f"{namespace} is permitted"
                    )
                elif kind == "projected" and account is None and (token := _token_in(volume[kind])):
                    yield (
                        f"volume {volume.get('name')}: {token} needs template.serviceAccountName, which must be "
                        "permitted (allowedServiceAccounts)"
                    )

    def _cache_path(self, path: str, mounts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        # A path inside of a cache could be the part of another namespace.
        if normpath(path) not in map(normpath, self.cache_paths):
            yield f"model.cachePath: the path {path} of the node is not permitted (allowedCachePaths)"
        if any(mount.get("name") == CACHE_VOLUME for mount in mounts):
            yield "template.volumeMounts names the volume of model.cachePath, which has the parts of all namespaces"

    def _host_path(self, field: str, path: str) -> Iterator[str]:
        if not any(_contains(root, path) for root in self.host_paths):
            yield f"{field}: the path {path} of the node is not permitted (allowedHostPaths)"
        elif any(_contains(root, path) or _contains(path, root) for root in self.cache_paths):
            yield f"{field}: the path {path} of the node has caches of models (allowedCachePaths)"


def _volumes_of_files(resource: InferenceDeployment) -> Iterator[tuple[str, str]]:
    """Yield each location and cache of files that is a volume, and its kind."""
    for source in sources(resource):
        if source.claim is not None:
            yield source.uri, "persistentVolumeClaim"
    cache = resource.spec.model.cache
    if cache is not None:
        yield "model.cache", "ephemeral" if cache.persistent_volume_claim is None else "persistentVolumeClaim"


def _token_in(projected: Any) -> str | None:
    """Return the first source of a projected volume that is a token, by default of the account `default`."""
    sources = projected.get("sources") if isinstance(projected, dict) else None
    found = (name for source in sources or () if isinstance(source, dict) for name in TOKENS if name in source)
    return next(found, None)


def _namespaces_of_secrets(csi: Any) -> set[str]:
    """Return the namespaces that the attributes of a CSI volume name for Secrets. Drivers ignore the case."""
    attributes = csi.get("volumeAttributes") if isinstance(csi, dict) else None
    found = attributes.items() if isinstance(attributes, dict) else ()
    return {
        str(value) for name, value in found if value and all(part in name.lower() for part in ("secret", "namespace"))
    }


def _contains(directory: str, path: str) -> bool:
    return f"{_plain(path)}/".startswith(f"{_plain(directory).rstrip('/')}/")


def _plain(path: str) -> str:
    """Return the normal form of a path. `normpath` keeps two slashes at the beginning, which mean one on Linux."""
    return re.sub("^//+", "/", normpath(path))


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
