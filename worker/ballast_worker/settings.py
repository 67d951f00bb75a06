"""Derive the settings of engine, policy and queue from the configuration file."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import TypeAdapter

from ballast_api import wildcard
from ballast_api.worker_config import WorkerConfig
from ballast_engine.options import EngineOptions
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_queue.errors import QueueForbidden
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings
from ballast_worker.errors import NotServed
from ballast_worker.tenancy import ApiKeys

DAY = 86400.0
SAMPLE_BYTES = 65536
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*.jinja")
"""Files of a model that decide the tokens of an answer."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that always names the same files."""
RECORD = ".ballast-fetch.json"
"""The manifest of `ballast fetch`."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What the manifest records of a file, as far as it is equal in all copies or shows a change."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Record:
    files: dict[str, _Recorded]


_RECORD = TypeAdapter(_Record)


def model_directory(config: WorkerConfig) -> Path:
    """Return the directory of the checkpoint; see `directory_of`."""
    return directory_of("model.uri", config.model.uri)


def directory_of(field: str, uri: str) -> Path:
    """Return the directory that a field of the configuration names.

    Raises:
        NotServed: the URI is of another kind, or the directory does not exist.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"}:
            raise NotServed(f"{field} {uri} names the host {parts.netloc}: write file:///path with three slashes")
        path = Path(unquote(parts.path))
    elif parts.scheme and "://" in uri:
        raise NotServed(
            f"{field} {uri} has the scheme {parts.scheme}://, but a worker reads only directories: run "
            f"`ballast fetch {uri} DIR` first (`ballast serve` and the operator do that themselves)"
        )
    else:
        path = Path(os.path.expanduser(uri))  # noqa: PTH111  Path's fails on an unknown user
    if not path.is_dir():
        raise NotServed(
            f"{field} {uri}: directory {path} does not exist. A model needs config.json, *.safetensors and "
            "tokenizer.json"
        )
    return path


def served_names(config: WorkerConfig, directory: Path) -> tuple[str, ...]:
    """Return the names of the model for clients. The first one is in answers, metrics and the status."""
    return tuple(dict.fromkeys((config.model.served_name or directory.resolve().name, *config.model.aliases)))


def model_revision(config: WorkerConfig, directory: Path) -> str:
    """Return the name of weights and chat template: a configured commit, else a fingerprint of the files.

    Another configured revision comes before the fingerprint: a branch or a tag may name other weights tomorrow. The
    fingerprint has the checksum that `ballast fetch` recorded of a file. Of a file without one, it reads only the size
    and samples, so that it is fast for large weights. Hidden files do not count: they differ between copies.

    Raises:
        NotServed: a file cannot be read.
    """
    revision = config.model.revision
    if COMMIT.fullmatch(revision):
        return revision
    digest = hashlib.sha256(f"{config.model.load_format}\0{config.model.dtype}".encode())
    recorded = _recorded(directory)
    found = [path for pattern in MODEL_FILES for path in sorted(directory.glob(pattern))]
    for path in (path for path in found if not path.name.startswith(".")):
        try:
            _add_file(digest, path, recorded.get(str(path.relative_to(directory))))
        except OSError as error:
            raise NotServed(f"{path} cannot be read: {error.strerror}. Repair the file, or remove it") from error
    fingerprint = digest.hexdigest()[:16]
    return f"{revision}-{fingerprint}" if revision else fingerprint


def _recorded(directory: Path) -> dict[str, _Recorded]:
    try:
        return _RECORD.validate_json((directory / RECORD).read_bytes()).files
    except (OSError, ValueError):  # no copy that `ballast fetch` completed
        return {}


def _add_file(digest: hashlib._Hash, path: Path, recorded: _Recorded | None) -> None:
    """Add the name, the size and the content of a file to a digest."""
    found = path.stat()
    size = found.st_size
    digest.update(f"\0{path.name}\0{size}\0".encode())
    if recorded is not None and (recorded.size, recorded.mtime_ns) == (size, found.st_mtime_ns):
        digest.update(recorded.sha256.encode())
        return
    with path.open("rb") as file:
        for start in sorted({0, size // 3, 2 * size // 3, max(0, size - SAMPLE_BYTES)}):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))


def engine_options(config: WorkerConfig, directory: Path) -> EngineOptions:
    """Return the options of the engine."""
    engine, model = config.engine, config.model
    mebibytes = engine.kv_memory_mebibytes
    return EngineOptions(
        directory=directory,
        dtype=model.dtype,
        load_format=model.load_format,
        attention=engine.attention,
        threads=engine.threads,
        block_tokens=engine.block_tokens,
        kv_memory_bytes=None if mebibytes is None else mebibytes * 1024 * 1024,
        slots=config.slots,
        max_model_len=model.max_model_len,
        prefix_cache=engine.prefix_cache,
        isolate_tenants=engine.isolate_tenants,
    )


def policy_config(config: WorkerConfig, current: PolicyConfig) -> PolicyConfig:
    """Return the configuration of the policy. Slots and KV stay those of the engine."""
    offline = config.offline
    return replace(
        current,
        chunk_tokens=config.engine.prefill_chunk_tokens,
        offline_share=offline.reserved_percent / 100,
        offline_max_share=offline.max_percent / 100,
        ttft=config.slo.seconds("latency") or config.slo.seconds("ttft") or inf,
        tpot=config.slo.seconds("tpot") or inf,
        max_interference=None if offline.max_interference_percent is None else offline.max_interference_percent / 100,
        objective=config.slo.objective_percent / 100,
        batch_window=offline.batch_window_milliseconds / 1000,
        tenants={
            tenant.name: TenantShare(
                tenant.weight, tenant.max_priority, tenant.max_slots, tenant.reserved_percent / 100
            )
            for tenant in offline.tenants
        },
    )


def queue_settings(config: WorkerConfig, names: tuple[str, ...]) -> QueueSettings:
    """Return the settings of the queue. `names` are the models that it accepts."""
    offline = config.offline
    return QueueSettings(
        owner=f"{config.runtime.namespace}/{config.runtime.name}",
        created=config.runtime.created,
        generation=config.runtime.generation,
        tenants=tuple(
            TenantSettings(name=tenant.name, weight=tenant.weight, max_priority=tenant.max_priority)
            for tenant in offline.tenants
        ),
        models=names,
        max_attempts=offline.max_attempts,
        lease_seconds=offline.lease_seconds,
        results_seconds=offline.results_days * DAY,
        abandoned_seconds=offline.abandoned_days * DAY,
        max_line_bytes=config.limits.max_body_kibibytes * 1024,
    )


def redis_address(config: WorkerConfig) -> tuple[str | None, str | None, str | None]:
    """Return the URL, the password and the authorities of Redis. The URL is None for a worker without a queue.

    Raises:
        NotServed: a file cannot be read.
    """
    runtime = config.runtime
    password = _secret("redisPasswordFile", runtime.redis_password_file)
    ca = _secret("redisCaFile", runtime.redis_ca_file)
    url = _secret("redisUrlFile", runtime.redis_url_file)
    return runtime.redis_url if url is None else url, password, ca


def open_queue(config: WorkerConfig) -> Queue:
    """Open the queue with the current address, password and authorities. All may change while a worker runs.

    Raises:
        QueueForbidden: a file with the address, the password or the authorities cannot be read.
        QueueError: Redis does not answer, or refuses the user.
    """
    try:
        url, password, ca = redis_address(config)
    except NotServed as error:
        raise QueueForbidden(str(error)) from error
    return Queue.connect(url or "", config.queue_name, password=password, ca=ca)


def api_keys(config: WorkerConfig) -> ApiKeys | None:
    """Return the API keys from their file, or None if the configuration names no file.

    Raises:
        NotServed: the file cannot be read.
    """
    path = config.runtime.api_keys_file
    return None if path is None else ApiKeys.load(path)


def watched_files(
    config: WorkerConfig,
    *,
    reload_keys: Callable[[], None],
    reconnect: Callable[[], None] | None,
    reload_certificate: Callable[[], None] | None,
) -> dict[Path, Callable[[], None]]:
    """Return the files that may change while a server runs, each with the function to call then.

    `reconnect` opens the queue with a new address, password or authority; None without a queue. `reload_certificate`
    reads the certificate of HTTPS again; None without HTTPS.
    """
    runtime = config.runtime
    files: dict[Path | None, Callable[[], None]] = {runtime.api_keys_file: reload_keys}
    if reconnect is not None:
        paths = (runtime.redis_url_file, runtime.redis_password_file, runtime.redis_ca_file)
        files |= dict.fromkeys(paths, reconnect)
    if reload_certificate is not None:
        files |= dict.fromkeys((runtime.tls_cert_file, runtime.tls_key_file), reload_certificate)
    return {path: function for path, function in files.items() if path is not None}


def _secret(field: str, path: Path | None) -> str | None:
    """Return the text of a file without the newline at its end; None without a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise NotServed(f"runtime.{field} {path} cannot be read: {reason}") from error


def listening_host(config: WorkerConfig) -> str:
    """Return the address to listen on: in a pod whose address is IPv6, `0.0.0.0` stands for both families."""
    return wildcard.listening_host(config.runtime.host, os.environ.get("POD_IP", ""))


def public_host(host: str) -> str:
    """Return the host in a URL for other machines: for a wildcard `POD_IP`, else the name of this machine."""
    if host in wildcard.WILDCARDS:
        host = os.environ.get("POD_IP") or socket.gethostname()
    return f"[{host}]" if ":" in host else host


def worker_id(config: WorkerConfig) -> str:
    """Return the id of this worker, unique in its queue."""
    return config.runtime.worker_id or f"{socket.gethostname()}-{os.getpid()}"
