"""The `WorkerConfig` of each version of a resource, in one ConfigMap. PURE.

A version is the cold part: what a worker reads at its start only. While pods of an old version run, its file stays
beside the new one and follows the hot part, so that an old pod that restarts comes back as it was.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
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
CACHE_DIRECTORY = "/cache"
LEAVE_SECONDS = 5
"""A leaving pod answers on for so long, until Services and routers send it nothing more."""
HOT_RUNTIME = ("generation", "created", "unready_seconds", "drain_seconds")
_FILE = re.compile(r"worker-([0-9a-f]+)\.yaml$")


def file_name(version: str) -> str:
    """The key of a version in the ConfigMap."""
    return f"worker-{version}.yaml"


def version_of_file(name: str) -> str | None:
    """The version that a key of the ConfigMap holds; None for what is no such file."""
    match = _FILE.match(name)
    return match[1] if match else None


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
            return f"{MODEL_DIRECTORY}/model"  # with a cache of the node, a link into it


def worker_config(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> WorkerConfig:
    """What the workers of `resource` are told.

    Args:
        resource: what is wanted.
        own_keys: keys of the Secret for resources that name no Redis; empty where the operator has none.
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
    redis = redis_of(resource, own_keys=own_keys)
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
        unready_seconds=LEAVE_SECONDS,
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


def redis_of(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> Redis | None:
    """The Secret that the resource names, else the copy of the operator's own; None: there is no Redis."""
    named = resource.spec.redis
    if named is not None:
        return Redis(named.secret_name, named.url_key, named.password_key)
    if not own_keys:
        return None
    return Redis(redis_secret(resource.metadata.name), "url", "password" if "password" in own_keys else None)


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
            "runtime": cold.runtime.model_copy(update={name: getattr(hot.runtime, name) for name in HOT_RUNTIME}),
        }
    )


_NEUTRAL = WorkerConfig(model=Model(uri="/"))


def config_texts(config: WorkerConfig, present: Mapping[str, str], running: AbstractSet[str]) -> dict[str, str]:
    """The file of each version. Files that no pod needs leave with the next change, and are no reason for one.

    Args:
        config: what is wanted now.
        present: the files as they are.
        running: versions that pods run with.
    """
    texts = {version_of(config): config}
    for version, text in present.items():
        found = _parsed(text)
        if found is not None:
            texts.setdefault(version, with_hot_part(found, config))
    files = {version: _settled(wanted, present.get(version)) for version, wanted in texts.items()}
    if files == present:
        return files
    return {version: text for version, text in files.items() if version in running or version == version_of(config)}


@lru_cache(maxsize=4096)
def _parsed(text: str) -> WorkerConfig | None:
    """None for what another version of Ballast wrote and this one cannot read; its pods are being replaced."""
    try:
        return WorkerConfig.parse(text, "")
    except InvalidConfig:
        return None


def _settled(wanted: WorkerConfig, text: str | None) -> str:
    """The file for `wanted`; where nothing but the generation is new, the file as it is, which touches no pod."""
    found = None if text is None else _parsed(text)
    if text is not None and found is not None:
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
