"""Which Secrets a resource names, and which Secrets it may name. PURE.

An account that may create resources may lack all rights on Secrets, but the operator and the pods of a resource
read the Secrets that it names. So a resource may name only Secrets with the label `ballast.dev/allow: "true"`. Whoever
labels a Secret has rights on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import ALLOW_LABEL
from ballast_operator.kinds import Body

OTHER_ATTRIBUTES = ("namespace", "providerclass")
"""The ends of attributes of a CSI volume that have `secret` in their names, and name another thing."""


def named_secrets(resource: InferenceDeployment) -> tuple[str, ...]:
    """Return the names of the Secrets that a resource names, sorted."""
    spec, template = resource.spec, resource.spec.template
    found = {spec.redis and spec.redis.secret_name, spec.api_keys and spec.api_keys.secret_name}
    found |= {spec.network.tls_secret, spec.model.credentials_secret, *template.image_pull_secrets}
    storage = spec.runtime.ray.gcs_redis if spec.runtime.ray is not None else None
    found.add(storage.password_secret if storage is not None else None)
    sources = (*(volume.manifest() for volume in template.volumes), *(env.value_from for env in template.env))
    found |= {name for each in sources for name in _names(each)}
    return tuple(sorted(name for name in found if name))


def _names(value: Any) -> Iterator[str]:
    """Yield the names of Secrets in a volume or a source of a variable.

    Kubernetes names a Secret by `secretName`, by `secret` in a projected volume, and by fields such as `secretRef`,
    `secretKeyRef` and `nodePublishSecretRef`. Each CSI driver has attributes of its own, and ignores their case.
    """
    if isinstance(value, list | tuple):
        for each in value:
            yield from _names(each)
    if not isinstance(value, dict):
        return
    for field, content in value.items():
        if field == "volumeAttributes" and isinstance(content, dict):
            attributes = ((name.lower(), str(value)) for name, value in content.items())
            yield from (value for name, value in attributes if "secret" in name and not name.endswith(OTHER_ATTRIBUTES))
        elif field == "secretName" and isinstance(content, str):
            yield content
        elif field == "secret" or field.lower().endswith(("secretref", "secretkeyref")):
            if isinstance(content, dict):
                yield from (str(content[key]) for key in ("name", "secretName") if key in content)
        else:
            yield from _names(content)


def is_allowed(body: Body) -> bool:
    """Return whether resources may name a Secret."""
    return ((body["metadata"].get("labels") or {}).get(ALLOW_LABEL)) == "true"
