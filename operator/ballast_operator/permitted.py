"""What the pods of resources may use, as the owner of the cluster permits it. PURE.

An account that may create resources need not be allowed to create pods. The operator creates the pods for it, so these
rules limit what such an account can choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from posixpath import normpath

from ballast_api.inference_deployment import InferenceDeployment

VOLUME_KINDS = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""The kinds of volumes that the Pod Security level `restricted` admits."""


@dataclass(frozen=True, slots=True)
class PodRules:
    """What resources may name. Patterns contain `*`, which stands for any characters."""

    images: tuple[str, ...] = ("*",)
    """Patterns of `template.image`."""
    service_accounts: tuple[str, ...] = ()
    """Patterns of `template.serviceAccountName`, as `NAMESPACE/NAME`."""
    volumes: tuple[str, ...] = VOLUME_KINDS
    """Kinds of `template.volumes`; `*` permits every kind but `hostPath`."""
    host_paths: tuple[str, ...] = ()
    """Directories of nodes for `model.cachePath` and volumes of the kind `hostPath`, with what they contain."""

    def violations(self, resource: InferenceDeployment) -> Iterator[str]:
        """Yield a sentence for each field of a resource that the rules do not permit."""
        template, namespace = resource.spec.template, resource.metadata.namespace
        if template.image is not None and not _matches(template.image, self.images):
            yield f"template.image {template.image} is not permitted (allowedImages)"
        account = template.service_account_name
        if account is not None and not _matches(f"{namespace}/{account}", self.service_accounts):
            yield f"template.serviceAccountName {account} is not permitted (allowedServiceAccounts)"
        if resource.spec.model.cache_path is not None:
            yield from self._host_path("model.cachePath", resource.spec.model.cache_path)
        for volume in template.volumes:
            for kind in sorted(volume.keys() - {"name"}):
                if kind == "hostPath":
                    source = volume[kind]
                    path = source.get("path", "") if isinstance(source, dict) else ""
                    yield from self._host_path(f"volume {volume.get('name')}", str(path))
                elif not _matches(kind, self.volumes):
                    yield f"volume {volume.get('name')}: the kind {kind} is not permitted (allowedVolumes)"

    def _host_path(self, field: str, path: str) -> Iterator[str]:
        found = f"{normpath(path)}/"
        if not any(found.startswith(f"{normpath(root).rstrip('/')}/") for root in self.host_paths):
            yield f"{field}: the path {path} of the node is not permitted (allowedHostPaths)"


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
