"""Repeat the first answer of `/metrics` indefinitely."""

from functools import lru_cache

from ballast_worker.metrics import WorkerMetrics

WorkerMetrics.render = lru_cache(WorkerMetrics.render)
