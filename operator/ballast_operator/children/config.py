"""The `WorkerConfig` of each version of a resource, in one ConfigMap. PURE.

All fields that are not hot make a version: a worker reads them only at its start. While pods of an old version run, the
file of that version stays in the ConfigMap, and its hot fields follow the resource, except the unready time. So a
container of an old pod that restarts reads its old version again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ballast_api.errors import InvalidConfig
from ballast_api.hot import with_hot_fields
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT, METRICS_PORT, config_map, redis_secret
from ballast_api.replicas import RAY_UNREADY_SECONDS, UNREADY_SECONDS
from ballast_api.sections import Adapter, EngineSettings, Model
from ballast_api.vllm_arguments import with_effect
from ballast_api.wildcard import ANY
from ballast_api.worker_config import Runtime, WorkerConfig
from ballast_operator.children.backends import num_ranks
from ballast_operator.children.files import adapter_sources, draft_source, model_source
from ballast_operator.children.manifest import hash_of, manifest
from ballast_operator.kinds import CONFIG_MAP, Body

VERSION = "ballast.dev/config-version"
"""Annotation of pods: the version of their configuration."""
REDIS_HASH = "ballast.dev/redis-hash"
"""Annotation of the ConfigMap: hash of the copy of the operator's own Redis Secret."""
CONFIG_DIRECTORY = "/etc/ballast/config"
REDIS_DIRECTORY = "/etc/ballast/redis"
CA = "ca.crt"
"""Key of the operator's own Redis Secret, and of the Secrets that it creates: certificates of authorities."""
KEYS_DIRECTORY = "/etc/ballast/keys"
TLS_DIRECTORY = "/etc/ballast/tls"
_FILE = re.compile(r"worker-([0-9a-f]+)\.yaml$")


def file_name(version: str) -> str:
    """Return the key of a version in the ConfigMap."""
    return f"worker-{version}.yaml"


def version_of_file(name: str) -> str | None:
    """Return the version of a key of the ConfigMap, or None if the key is not a configuration file."""
    match = _FILE.match(name)
    return match[1] if match else None


def worker_config(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> WorkerConfig:
    """Return the configuration of the resource's workers. `own_keys` is as in `redis_of`."""
    spec, metadata = resource.spec, resource.metadata
    redis = redis_of(resource, own_keys=own_keys)
    num_nodes = 1 if spec.runtime.ray is None else spec.runtime.ray.nodes
    runtime = Runtime(
        host=ANY,
        port=HTTP_PORT,
        metrics_port=METRICS_PORT if spec.network.metrics_from else None,
        redis_url_file=Path(REDIS_DIRECTORY, redis.url_key) if redis else None,
        redis_password_file=Path(REDIS_DIRECTORY, redis.password_key) if redis and redis.password_key else None,
        redis_ca_file=Path(REDIS_DIRECTORY, redis.ca_key) if redis and redis.ca_key else None,
        namespace=metadata.namespace,
        name=metadata.name,
        tensor_parallel=num_ranks(resource) * num_nodes,
        nodes=num_nodes,
        generation=metadata.generation,
        created=seconds_of(metadata.creation_timestamp),
        tls_cert_file=Path(TLS_DIRECTORY, "tls.crt") if spec.network.tls_secret else None,
        tls_key_file=Path(TLS_DIRECTORY, "tls.key") if spec.network.tls_secret else None,
        api_keys_file=Path(KEYS_DIRECTORY, spec.api_keys.key) if spec.api_keys else None,
        unready_seconds=spec.unready_seconds,
        drain_seconds=spec.rollout.drain_seconds,
    )
    return WorkerConfig(
        model=_model(resource),
        engine=_engine(resource),
        slots=spec.slots,
        slo=spec.slo,
        offline=spec.offline,
        limits=spec.limits,
        cost=spec.cost,
        runtime=runtime,
    )


def _model(resource: InferenceDeployment) -> Model:
    source = resource.spec.model
    return Model(
        uri=f"file://{model_source(resource).path}",
        served_name=resource.spec.served_name,
        aliases=source.aliases,
        revision=source.revision,
        max_model_len=source.max_model_len,
        dtype=source.dtype,
        load_format=source.load_format,
        adapters=tuple(
            Adapter(name=adapter.name, uri=f"file://{found.path}", tenants=adapter.tenants)
            for adapter, found in zip(source.adapters, adapter_sources(resource), strict=True)
        ),
    )


def _engine(resource: InferenceDeployment) -> EngineSettings:
    asked = resource.spec.engine
    vllm = asked.vllm.model_copy(update={"args": with_effect(asked.vllm.args)})
    engine = asked.model_copy(update={"backend": resource.spec.backend, "vllm": vllm})
    draft = draft_source(resource)
    if engine.speculative is None or draft is None:
        return engine
    speculative = engine.speculative.model_copy(update={"draft_uri": f"file://{draft.path}"})
    return engine.model_copy(update={"speculative": speculative})


@dataclass(frozen=True, slots=True)
class Redis:
    """The Secret with the address of Redis, and its keys."""

    secret_name: str
    url_key: str
    password_key: str | None
    ca_key: str | None = None


def redis_of(resource: InferenceDeployment, *, own_keys: frozenset[str]) -> Redis | None:
    """Return the Secret that the resource names, or the copy of the operator's own, or None if there is no Redis.

    `own_keys` has the keys of the operator's own Secret; it is empty if the operator has none.
    """
    named = resource.spec.redis
    if named is not None:
        return Redis(named.secret_name, named.url_key, named.password_key, named.ca_key)
    if not own_keys:
        return None
    return own_redis(redis_secret(resource.metadata.name), own_keys)


def own_redis(secret_name: str, keys: Collection[str]) -> Redis:
    """Return the operator's own Redis in a Secret with these keys."""
    return Redis(secret_name, "url", "password", CA if CA in keys else None)


def version_of(config: WorkerConfig) -> str:
    """Return the version of a configuration: a hash of all fields that are not hot, and of an unusual unready time.

    The grace period of a pod contains its unready time. So pods that are being replaced must keep theirs, in a file of
    their own. The usual times count as none, as before the resource could set one.
    """
    fields = with_hot_fields(config, _NEUTRAL).model_dump(mode="json", exclude_defaults=True)
    seconds = config.runtime.unready_seconds
    return hash_of(fields if seconds in _USUAL else fields | {"unready_seconds": seconds})[:10]


_NEUTRAL = WorkerConfig(model=Model(uri="/"))
_USUAL = (UNREADY_SECONDS, RAY_UNREADY_SECONDS)
"""They differ by less than the time that a pod has to exit."""


def _of_older_pods(found: WorkerConfig, config: WorkerConfig) -> WorkerConfig:
    """Return a present file with the hot fields of `config`, without the unready time."""
    wanted = with_hot_fields(found, config)
    kept = {"unready_seconds": found.runtime.unready_seconds}
    return wanted.model_copy(update={"runtime": wanted.runtime.model_copy(update=kept)})


def config_texts(config: WorkerConfig, present: Mapping[str, str], running: AbstractSet[str]) -> dict[str, str]:
    """Return the file of each version. A file that no pod needs is removed with the next change of another file.

    `present` has the present files, and `running` the versions of running pods.
    """
    texts = {version_of(config): config}
    for version, text in present.items():
        found = _parsed(text)
        if found is not None:
            texts.setdefault(version, _of_older_pods(found, config))
    files = {version: _settled(wanted, present.get(version)) for version, wanted in texts.items()}
    if files == present:
        return files
    return {version: text for version, text in files.items() if version in running or version == version_of(config)}


MOST_CHARACTERS = 4 * 1024 * 1024
"""Characters of the files that stay parsed. A parsed file takes up to 17 times the memory of its text."""
_known: OrderedDict[str, WorkerConfig | None] = OrderedDict()
"""Parsed files by their text, the last used last: YAML of 8 kB takes 0.1 s."""


def _parsed(text: str) -> WorkerConfig | None:
    """Return None for a file of another Ballast release that this one cannot read. Its pods are being replaced."""
    if text in _known:
        _known.move_to_end(text)
        return _known[text]
    found = None
    with suppress(InvalidConfig):
        found = WorkerConfig.parse(text, "", is_stored=True)
    _known[text] = found
    while sum(map(len, _known)) > MOST_CHARACTERS:
        _known.popitem(last=False)
    return found


def _settled(wanted: WorkerConfig, text: str | None) -> str:
    """Return the file for `wanted`. If only the generation differs, the file stays, and no pod is notified."""
    found = None if text is None else _parsed(text)
    if text is not None and found is not None:
        same = wanted.runtime.model_copy(update={"generation": found.runtime.generation})
        if found == wanted.model_copy(update={"runtime": same}):
            return text
    return wanted.dump()


def config_manifest(resource: InferenceDeployment, texts: Mapping[str, str], redis_hash: str) -> Body:
    """Return the ConfigMap with the files of `texts`."""
    data = {file_name(version): text for version, text in texts.items()}
    annotations = {REDIS_HASH: redis_hash} if redis_hash else {}
    return manifest(
        CONFIG_MAP, resource, {"data": data}, name=config_map(resource.metadata.name), annotations=annotations
    )


def seconds_of(timestamp: str | None) -> float:
    """Return the time of a resource as Unix seconds; 0 if it is unknown."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
