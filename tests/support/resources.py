"""Resources of which only some fields matter."""

from __future__ import annotations

from typing import Any

from ballast_api.inference_deployment import InferenceDeployment


def make_resource(
    name: str = "llm",
    namespace: str = "ns",
    *,
    about: dict[str, Any] | None = None,
    is_stored: bool = False,
    **spec: Any,
) -> InferenceDeployment:
    """Return a resource whose model is in its image, unless `spec` names another. `about` has more metadata."""
    metadata = {"name": name, "namespace": namespace, "uid": "u", "generation": 1} | (about or {})
    manifest = {"metadata": metadata, "spec": {"model": {"uri": "file:///m"}} | spec}
    return InferenceDeployment.read(manifest, "test", is_stored=is_stored)
