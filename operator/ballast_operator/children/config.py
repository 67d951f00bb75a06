"""The `WorkerConfig` of each version of a resource, in one ConfigMap. PURE.

A version is the cold part: what a worker reads at its start only. While pods of an old version run, its file stays
beside the new one and follows the hot part, so that an old pod that restarts comes back as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT, config_map, redis_secret
from ballast_api.sections import Model
from ballast_api.worker_config import Runtime, WorkerConfig
from ballast_operator.children.manifest import hash_of, manifest
from ballast_operator.kinds import CONFIG_MAP, Body

VERSION = "ballast.dev/config-version"
"""Annotation of pods: which file of the ConfigMap they run with."""
REDIS_HASH = "ballast.dev/redis-hash"
"""Annotation of the ConfigMap: what was copied from the operator's own Redis Secret."""
CONFIG_DIRECTORY = "/etc/ballast/config"
REDIS_DIRECTORY = "/etc/ballast/redis"
KEYS_DIRECTORY = "/etc/ballast/keys"
MODEL_DIRECTORY = "/models"


def file_name(version: str) -> str:
    """The key of a version in the ConfigMap."""
    return f"worker-{version}.yaml"


def model_path(resource: InferenceDeployment) -> str:
    """Where the model lies inside the pod."""
    model = resource.spec.model
    parts = urlsplit(model.uri)
    match parts.scheme:
        case "file":
            return parts.path
        case "pvc":
            return f"{MODEL_DIRECTORY}{parts.path.rstrip('/')}"
        case _:
            # One directory per source and revision, so that pods which share a cache never mix them up.
            return f"{MODEL_DIRECTORY}/{hash_of([model.uri, model.revision])}"


def worker_config(resource: InferenceDeployment, *, has_own_redis: bool) -> WorkerConfig:
    """What the workers of `resource` are told.

    Args:
        resource: what is wanted.
        has_own_redis: the operator has a Redis for resources that name none.
    """
    spec, metadata = resource.spec, resource.metadata
    source = spec.model
    model = Model(
        uri=f"file://{model_path(resource)}",
        served_name=spec.served_name,
        revision=source.revision,
        max_model_len=source.max_model_len,
        dtype=source.dtype,
        load_format=source.load_format,
    )
    redis = redis_of(resource, has_own_redis=has_own_redis)
    runtime = Runtime(
        host="0.0.0.0",  # noqa: S104 - a pod serves its Service
        port=HTTP_PORT,
        redis_url_file=Path(REDIS_DIRECTORY, redis.url_key) if redis else None,
        redis_password_file=Path(REDIS_DIRECTORY, redis.password_key) if redis and redis.password_key else None,
        namespace=metadata.namespace,
        name=metadata.name,
        generation=metadata.generation,
        created=_seconds(metadata.creation_timestamp),
        api_keys_file=Path(KEYS_DIRECTORY, spec.api_keys.key) if spec.api_keys else None,
        drain_seconds=spec.rollout.drain_seconds,
    )
    return WorkerConfig(
        model=model,
        engine=spec.engine,
        slots=spec.slots,
        slo=spec.slo,
        offline=spec.offline,
        limits=spec.limits,
        cost=spec.cost,
        runtime=runtime,
    )


@dataclass(frozen=True, slots=True)
class Redis:
    """Which Secret leads to Redis, and by which keys."""

    secret_name: str
    url_key: str
    password_key: str | None


def redis_of(resource: InferenceDeployment, *, has_own_redis: bool) -> Redis | None:
    """The Secret that the resource names, else the copy of the operator's own; None: there is no Redis."""
    named = resource.spec.redis
    if named is not None:
        return Redis(named.secret_name, named.url_key, named.password_key)
    return Redis(redis_secret(resource.metadata.name), "url", "password") if has_own_redis else None


def version_of(config: WorkerConfig) -> str:
    """Names the cold part of a configuration."""
    return hash_of(with_hot_part(config, _NEUTRAL).model_dump(mode="json", exclude_defaults=True))[:10]


def with_hot_part(cold: WorkerConfig, hot: WorkerConfig) -> WorkerConfig:
    """`cold` with every field that a running worker takes up from `hot`."""
    return cold.model_copy(
        update={
            "engine": cold.engine.model_copy(update={"prefill_chunk_tokens": hot.engine.prefill_chunk_tokens}),
            "slo": hot.slo,
            "offline": hot.offline.model_copy(update={"queue": cold.offline.queue}),
            "limits": hot.limits,
            "cost": hot.cost,
            "runtime": cold.runtime.model_copy(
                update={name: getattr(hot.runtime, name) for name in ("generation", "created", "drain_seconds")}
            ),
        }
    )


_NEUTRAL = WorkerConfig(model=Model(uri="/"))


def config_texts(config: WorkerConfig, running: Mapping[str, str]) -> dict[str, str]:
    """The file of each version.

    Args:
        config: what is wanted now.
        running: files of the versions that pods still run with, as they are now.
    """
    texts = {version_of(config): config}
    for version, text in running.items():
        try:
            texts.setdefault(version, with_hot_part(WorkerConfig.parse(text, version), config))
        except InvalidConfig:
            continue  # written by a version of Ballast that this one cannot read; its pods are being replaced
    return {version: _settled(wanted, running.get(version)) for version, wanted in texts.items()}


def _settled(wanted: WorkerConfig, text: str | None) -> str:
    """The file for `wanted`; where nothing but the generation is new, the file as it is, which touches no pod."""
    if text is not None:
        try:
            found = WorkerConfig.parse(text, "")
        except InvalidConfig:
            return wanted.dump()
        same = wanted.runtime.model_copy(update={"generation": found.runtime.generation})
        if found == wanted.model_copy(update={"runtime": same}):
            return text
    return wanted.dump()


def config_manifest(resource: InferenceDeployment, texts: Mapping[str, str], redis_hash: str) -> Body:
    """The ConfigMap with the files of `texts`."""
    data = {file_name(version): text for version, text in texts.items()}
    annotations = {REDIS_HASH: redis_hash} if redis_hash else {}
    return manifest(
        CONFIG_MAP, resource, {"data": data}, name=config_map(resource.metadata.name), annotations=annotations
    )


def content_hash(text: str) -> str:
    """The hash by which a worker names the file that it has in force."""
    return hashlib.sha256(text.encode()).hexdigest()


def _seconds(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
