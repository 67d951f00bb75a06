"""The declarative configuration of Ray Serve for one model: what `ballast up --ray` and the operator apply."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from ballast_api.hot import with_hot_fields
from ballast_api.sections import Model
from ballast_api.worker_config import WorkerConfig

APPLICATION = "ballast"
DEPLOYMENT = "worker"
IMPORT_PATH = "ballast_serve.application:build"
MOST_SLOTS = 1024
"""The most slots of a worker whose configuration does not state them: the default of vLLM 0.32 on large GPUs."""
OTHER_REQUESTS = 256
"""Requests beyond slots and queues: those that only read, and those whose body is still being sent."""
QUEUED_REQUESTS = 256
"""Requests that may wait in a proxy of Serve. The worker refuses requests before a replica is full."""
STOP_SECONDS = 15.0
"""Time in which a drained replica ends its engine."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = '  File "'
"""The start of a frame in a traceback of Python."""


def most_requests(config: WorkerConfig) -> int:
    """Return `max_ongoing_requests`: the worker itself answers 429 before Serve holds a request back."""
    slots = config.slots or MOST_SLOTS
    return config.limits.most_requests(slots) + OTHER_REQUESTS


def serve_config(
    config: WorkerConfig, text: str, *, replicas: int, gpus: int, name: str = APPLICATION
) -> dict[str, Any]:
    """Return the configuration of Serve.

    Serve restarts replicas only if `args` change, so these name the fields that are not hot.

    Args:
        config: the configuration of a worker
        text: the same as YAML; replicas publish its hash
        replicas: how many workers
        gpus: GPUs of a replica on each of its nodes
        name: name of the application. Another one than the default is also its path behind a proxy of Serve
    """
    runtime = config.runtime
    deployment: dict[str, Any] = {
        "name": DEPLOYMENT,
        "num_replicas": replicas,
        "max_ongoing_requests": most_requests(config),
        "max_queued_requests": QUEUED_REQUESTS,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1.0},
        "graceful_shutdown_timeout_s": runtime.unready_seconds + runtime.drain_seconds + STOP_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,  # Serve replaces a replica after three failures
        "health_check_timeout_s": 30.0,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        "user_config": {"config": text},
    }
    if runtime.nodes > 1:
        # Each bundle is an object of its own, so that YAML repeats it and needs no anchor.
        deployment["placement_group_bundles"] = [{"CPU": 1, "GPU": gpus} for _ in range(runtime.nodes)]
        deployment["placement_group_strategy"] = "STRICT_SPREAD"
    elif runtime.port or runtime.metrics_port:
        # Serve starts a replica while the one that it replaces still drains, on the same node if this has the CPUs.
        # They need the same ports, and Serve gives up a deployment that fails to start three times.
        deployment["max_replicas_per_node"] = 1
    return {
        "proxy_location": "Disabled",  # requests reach the ports of the replicas
        "applications": [
            {
                "name": name,
                "import_path": IMPORT_PATH,
                "route_prefix": "/" if name == APPLICATION else f"/{name}",
                "args": {"cold_fields": cold_hash(config)},
                "deployments": [deployment],
            }
        ],
    }


def cold_hash(config: WorkerConfig) -> str:
    """Return a hash of the fields that are not hot."""
    cold = with_hot_fields(config, _NEUTRAL)
    return hashlib.sha256(cold.dump().encode()).hexdigest()[:16]


_NEUTRAL = WorkerConfig(model=Model(uri="/"))
"""A configuration with the default of each hot field. Only its hot fields count, so no field of a user is in it."""


def without_traceback(message: str) -> str:
    """Return a message of Serve as one line: its first line, and the error below the traceback that it quotes."""
    lines = _COLOUR.sub("", message).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if frames:
        end = next((number for number in range(frames[-1], len(lines)) if not lines[number].startswith(" ")), None)
        lines = lines[:1] if end is None else [lines[0], *lines[end:]]
    return " ".join(line.strip() for line in lines if line.strip())
