"""`/metrics` says for ever what it said the first time."""

from functools import lru_cache

from ballast_worker.metrics import WorkerMetrics

WorkerMetrics.render = lru_cache(WorkerMetrics.render)
