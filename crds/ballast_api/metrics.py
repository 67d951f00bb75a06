"""Names of the metrics that alerts and dashboards read. A test compares them with those of workers and operator."""

from __future__ import annotations

SLO_REQUESTS = "ballast_slo_requests_total"
"""Requests with an SLO, by `class`, `slo` and `met`."""
REQUESTS = "ballast_requests_total"
"""Requests that ended, by `class` and `outcome`."""
OFFLINE_RESERVATION_MET = "ballast_offline_reservation_met"
"""1 while a worker meets its reservation, 0 while offline requests wait and too few run."""
JOBS_AT_RISK = "ballast_jobs_at_risk"
DEAD_LETTERS = "ballast_dead_letters"
REDIS_UP = "ballast_redis_up"
FEEDER_FAILURES = "ballast_feeder_failures_total"
"""Tasks between engine and queue that failed, by `task`."""
CONFIG_INVALID = "ballast_config_invalid"
"""1 while a worker uses what an earlier file contained, because the present one is invalid or missing."""
ENGINE_HEALTHY = "ballast_engine_healthy"
OPERATOR_REPLICAS = "ballast_operator_replicas"
"""Worker pods of a resource, by `resource_namespace`, `name` and `state`. The operator exports it. A label `namespace`
would be that of the operator wherever Prometheus does not honor labels of series."""
OPERATOR_CONDITION = "ballast_operator_condition"
"""1 for the present status and reason of each condition, by `resource_namespace`, `name`, `type`, `status` and
`reason`."""
OPERATOR_RAY_READY = "ballast_operator_ray_ready"
"""1 if a part of a Ray cluster is ready, else 0, by `resource_namespace`, `name` and `part`."""

FAILURES = ("failed", "queue_full", "draining")
"""Outcomes of `REQUESTS` without an answer."""
ANSWERS = ("stop", "length")
"""Outcomes of `REQUESTS` with an answer."""
