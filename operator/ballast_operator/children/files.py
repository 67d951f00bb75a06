"""The files that a worker reads: the model, its adapters, and the draft model, and their paths in the pod. PURE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.kinds import Body

MODEL_DIRECTORY = "/models"
CACHE_DIRECTORY = "/cache"
CACHE_VOLUME = "cache"
FETCHED_DIRECTORY = "/fetched"
"""Directory of fetched adapters if a claim is mounted at `MODEL_DIRECTORY`."""
CLAIMS_DIRECTORY = "/claims"
"""Directory of the claims of adapters and draft model."""
READ_ONLY = {"readOnly": True}


@dataclass(frozen=True, slots=True)
class FileSource:
    """Files in one location.

    Attributes:
        name: Unique in the pod.
        uri: Location.
        path: Directory inside the pod.
        is_adapter: Whether the files are a LoRA adapter.
    """

    name: str
    uri: str
    path: str
    is_adapter: bool = False

    @property
    def is_fetched(self) -> bool:
        """Return whether an init container fetches the files."""
        return self.uri.startswith(("hf://", "s3://"))

    @property
    def claim(self) -> str | None:
        """Return the name of the claim that contains the files, if there is one."""
        parts = urlsplit(self.uri)
        return parts.netloc if parts.scheme == "pvc" else None


def model_source(resource: InferenceDeployment) -> FileSource:
    """Return the source of the model."""
    uri = resource.spec.model.uri
    parts = urlsplit(uri)
    match parts.scheme:
        case "file":
            path = parts.path
        case "pvc":
            path = f"{MODEL_DIRECTORY}{parts.path.rstrip('/')}"
        case _:
            path = f"{MODEL_DIRECTORY}/model"  # a link, if pods share a cache
    return FileSource("model", uri, path)


def adapter_sources(resource: InferenceDeployment) -> tuple[FileSource, ...]:
    """Return the sources of the adapters, in their order."""
    adapters = resource.spec.model.adapters
    return tuple(
        _beside(model_source(resource), f"adapter-{number}", adapter.uri, is_adapter=True)
        for number, adapter in enumerate(adapters)
    )


def draft_source(resource: InferenceDeployment) -> FileSource | None:
    """Return the source of the draft model, if there is one."""
    speculative = resource.spec.engine.speculative
    if speculative is None or speculative.draft_uri is None:
        return None
    return _beside(model_source(resource), "draft", speculative.draft_uri)


def sources(resource: InferenceDeployment) -> tuple[FileSource, ...]:
    """Return the sources of all files. That of the model is the first."""
    draft = draft_source(resource)
    return (model_source(resource), *adapter_sources(resource), *([draft] if draft is not None else []))


def _beside(model: FileSource, name: str, uri: str, *, is_adapter: bool = False) -> FileSource:
    parts = urlsplit(uri)
    match parts.scheme:
        case "file":
            path = parts.path
        case "pvc":
            mounted = MODEL_DIRECTORY if parts.netloc == model.claim else f"{CLAIMS_DIRECTORY}/{parts.netloc}"
            path = f"{mounted}{parts.path.rstrip('/')}"
        case _:
            path = f"{fetched_directory(model)}/{name}"
    return FileSource(name, uri, path, is_adapter)


def fetched_directory(model: FileSource) -> str:
    """Return the directory of fetched files."""
    return MODEL_DIRECTORY if model.is_fetched else FETCHED_DIRECTORY


def file_volumes(resource: InferenceDeployment) -> Iterator[Body]:
    """Yield the volumes of the files, and that of a cache. Another order would roll the pods."""
    model, *others = sources(resource)
    claims = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim} | ({} if name == CACHE_VOLUME else READ_ONLY)}
        for claim, name in _claim_volumes(resource).items()
    ]
    if model.is_fetched:
        yield {"name": "models"} | _fetched_files(resource)
    elif model.claim is not None:
        yield claims.pop(0)
    if not model.is_fetched and any(source.is_fetched for source in others):
        yield {"name": "fetched"} | _fetched_files(resource)
    yield from claims
    if resource.spec.model.cache_path is not None:
        path = resource.spec.model.cache_path
        yield {"name": CACHE_VOLUME, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def file_mounts(resource: InferenceDeployment) -> Iterator[Body]:
    """Yield the mounts of a worker for the volumes of `file_volumes`."""
    model, *others = sources(resource)
    volumes = _claim_volumes(resource)
    if model.claim is not None:
        yield {"name": volumes[model.claim], "mountPath": MODEL_DIRECTORY, "readOnly": True}
    elif model.is_fetched:
        yield {"name": "models", "mountPath": MODEL_DIRECTORY, "readOnly": True}
    if not model.is_fetched and any(source.is_fetched for source in others):
        yield {"name": "fetched", "mountPath": FETCHED_DIRECTORY, "readOnly": True}
    for claim in _other_claims(model, others):
        yield {"name": volumes[claim], "mountPath": f"{CLAIMS_DIRECTORY}/{claim}", "readOnly": True}
    if is_cached(resource):
        yield cache_mount(resource) | {"readOnly": True}


def fetched_mount(resource: InferenceDeployment) -> Body:
    """Return the mount of a container that fetches files."""
    directory = fetched_directory(model_source(resource))
    return {"name": "models" if directory == MODEL_DIRECTORY else "fetched", "mountPath": directory}


def is_cached(resource: InferenceDeployment) -> bool:
    """Return true if pods share fetched files."""
    model = resource.spec.model
    return model.cache_path is not None or (model.cache is not None and model.cache.persistent_volume_claim is not None)


def cache_mount(resource: InferenceDeployment) -> Body:
    """Return the mount of the cache.

    Of a directory of the node, a namespace sees its own part only: whoever chooses the image of a worker can write to
    the cache, and must not change the models of others. The kubelet creates the part, with the mode of the directory.
    """
    mount = {"name": CACHE_VOLUME, "mountPath": CACHE_DIRECTORY}
    return mount if resource.spec.model.cache_path is None else mount | {"subPath": resource.metadata.namespace}


def _fetched_files(resource: InferenceDeployment) -> Body:
    """Return the source of the volume that holds the fetched files, or the links to them in a cache."""
    model = resource.spec.model
    if model.cache is not None and model.cache.volume_claim_template is not None:
        return {"ephemeral": {"volumeClaimTemplate": model.cache.volume_claim_template}}
    if model.size_limit_gibibytes is not None:
        return {"emptyDir": {"sizeLimit": f"{model.size_limit_gibibytes}Gi"}}
    return {"emptyDir": {}}


def _claim_volumes(resource: InferenceDeployment) -> dict[str, str]:
    """Return the name of the volume of each claim.

    A claim has one volume, also if it contains files and the cache: with two, the kubelet may never start the pod.
    """
    model, *others = sources(resource)
    names = {} if model.claim is None else {model.claim: "models"}
    names |= {claim: f"claim-{number}" for number, claim in enumerate(_other_claims(model, others))}
    cache = resource.spec.model.cache
    if cache is not None and cache.persistent_volume_claim is not None:
        names[cache.persistent_volume_claim.claim_name] = CACHE_VOLUME
    return names


def _other_claims(model: FileSource, others: list[FileSource]) -> list[str]:
    claims = (source.claim for source in others if source.claim not in {None, model.claim})
    return list(dict.fromkeys(claim for claim in claims if claim is not None))
