"""The arguments of `vllm serve` for a worker configuration. It needs no vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast_api.sections import Adapter, EngineSettings, Model
from ballast_api.worker_config import WorkerConfig
from ballast_worker.errors import NotServed
from ballast_worker.settings import directory_of, listening_host, model_directory, served_names

SCHEDULER = "ballast_vllm.scheduler.BallastScheduler"
MIDDLEWARE = "ballast_vllm.middleware.BallastMiddleware"
QUIET_PATHS = "/health,/ready,/metrics,/ballast/status"
"""Paths that probes and Prometheus read. They stay out of the access log."""
LAUNCHED = "BALLAST_LAUNCHED"
"""Variable that states that vLLM's arguments follow from the configuration."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be told."""
MOST_ADAPTERS_AT_A_TIME = 8
"""Adapters in one step, unless `--max-loras` says otherwise. Each of them takes GPU memory from KV."""
KV_DTYPES = {"int8": "int8_per_token_head"}
"""vLLM's names for data types of KV, where they differ."""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """The place of one node of a model that spans several nodes."""

    rank: int
    """0 is the node with the API server and EngineCore. The others only compute."""
    address: str
    """Host of the node with rank 0."""
    port: int
    """Port at which the ranks find each other, on that host."""


def serve_arguments(config: WorkerConfig, node: NodeRank | None = None, *, is_cpu: bool = False) -> list[str]:
    """Return the arguments that follow from the configuration, without `engine.vllm.args`. The model is the first.

    `is_cpu`: vLLM computes on a CPU.

    Raises:
        NotServed: a directory of the model, of an adapter or of the draft model has no checkpoint.
    """
    if (node is None) != (config.runtime.nodes == 1):
        raise NotServed("runtime.nodes above 1 needs a replica of Ray Serve. Set it to 1, or run the worker with Ray")
    directory = model_directory(config)
    runtime = config.runtime
    names = served_names(config, directory)
    return [
        str(directory),
        *(["--served-model-name", *names] if len(names) > 1 else [f"--served-model-name={names[0]}"]),
        *_named(
            ("host", listening_host(config)),
            ("port", runtime.port),
            ("scheduler-cls", SCHEDULER),
            ("middleware", MIDDLEWARE),
            ("disable-access-log-for-endpoints", QUIET_PATHS),
            ("max-num-seqs", config.slots),
            ("ssl-certfile", runtime.tls_cert_file),
            ("ssl-keyfile", runtime.tls_key_file),
            ("tensor-parallel-size", runtime.tensor_parallel if runtime.tensor_parallel > 1 else None),
        ),
        *_nodes(config, node),
        *_named(*_model(config.model)),
        *_engine(config.engine),
        *_adapters(config, names, is_cpu=is_cpu),
    ]


def _nodes(config: WorkerConfig, node: NodeRank | None) -> Iterator[str]:
    # vLLM would choose Ray for its ranks in a process of Ray. Its own executor needs no Ray between the ranks.
    yield from _named(("distributed-executor-backend", "mp" if config.runtime.tensor_parallel > 1 else None))
    if node is not None:
        yield from _named(("nnodes", config.runtime.nodes), ("node-rank", node.rank))
        yield from _named(("master-addr", node.address), ("master-port", node.port))
        yield from ("--headless",) if node.rank > 0 else ()


def _model(model: Model) -> Iterator[tuple[str, Any]]:
    yield "dtype", model.dtype if model.dtype != "auto" else None
    yield "max-model-len", model.max_model_len
    yield "load-format", model.load_format if model.load_format != "auto" else None


def _engine(engine: EngineSettings) -> Iterator[str]:
    mebibytes = engine.kv_memory_mebibytes
    if not engine.prefix_cache:  # else vLLM decides: models without KV, such as BERT, have no prefix cache
        yield "--no-enable-prefix-caching"
    yield from _named(
        ("quantization", engine.quantization),
        ("kv-cache-dtype", KV_DTYPES.get(engine.kv_dtype, engine.kv_dtype) if engine.kv_dtype is not None else None),
        ("kv-cache-memory-bytes", mebibytes * 1024 * 1024 if mebibytes is not None else None),
        ("speculative-config", _speculative(engine)),
    )


def _speculative(engine: EngineSettings) -> str | None:
    found = engine.speculative
    if found is None:
        return None
    config: dict[str, object] = {"method": "ngram", "num_speculative_tokens": found.draft_tokens}
    if found.draft_uri is not None:
        directory = directory_of("engine.speculative.draftUri", found.draft_uri)
        config |= {"method": "draft_model", "model": str(directory)}
    return json.dumps(config)


def _adapters(config: WorkerConfig, names: tuple[str, ...], *, is_cpu: bool) -> Iterator[str]:
    adapters = config.model.adapters
    if not adapters:
        return
    # On a CPU, vLLM 0.32 adds the adapter in the last of its `max-loras` places to requests without one, if a request
    # for any adapter is in the same step. So the last place stays empty there.
    most = len(adapters) + 1 if is_cpu else min(len(adapters), MOST_ADAPTERS_AT_A_TIME)
    modules, ranks = [], []
    for adapter in adapters:
        if adapter.name in names:
            raise NotServed(f"model.adapters: an adapter has the name of the model, {adapter.name}. Use another name")
        directory, rank = _adapter(adapter)
        modules.append(json.dumps({"name": adapter.name, "path": str(directory)}))
        ranks.append(rank)
    largest = max(ranks)
    yield from _named(("max-lora-rank", min(rank for rank in RANKS if rank >= largest)))
    yield from _named(("max-loras", most))
    yield from ("--enable-lora", "--lora-modules", *modules)


def _adapter(adapter: Adapter) -> tuple[Path, int]:
    """Return the directory of an adapter, and the largest of its ranks: `rank_pattern` has those of single modules."""
    directory = directory_of(f"model.adapters {adapter.name}", adapter.uri)
    path = directory / "adapter_config.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        ranks = [stated["r"], *(stated.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        ranks = [None]
    if not all(isinstance(rank, int) and 1 <= rank <= RANKS[-1] for rank in ranks):
        raise NotServed(
            f"model.adapters {adapter.name}: {path} states no rank `r` of 1 to {RANKS[-1]}, or another rank in "
            "`rank_pattern`. Name the directory of a LoRA adapter, with adapter_config.json and *.safetensors"
        )
    return directory, max(ranks)


def _named(*values: tuple[str, Any]) -> Iterator[str]:
    yield from (f"--{name}={value}" for name, value in values if value is not None)
