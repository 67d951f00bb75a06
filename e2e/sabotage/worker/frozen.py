"""`/metrics` says for ever what it said the first time."""

from functools import lru_cache

from ballast_worker.metrics import Metrics

Metrics.render = lru_cache(Metrics.render)
