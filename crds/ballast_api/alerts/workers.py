"""Alerts of workers that do not serve, and of the parts of Ray that they need."""

from __future__ import annotations

from collections.abc import Iterator

from ballast_api import metrics
from ballast_api.alerts.alert import Alert
from ballast_api.alerts.series import GAP, GAP_SECONDS, Labels
from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import gcs_redis

MISSING_FOR = "6h"
"""Time after which a missing worker is an alert even if enough others serve. Most rollouts end before."""


def worker_alerts(own: Labels, resource: InferenceDeployment, *, keeps_head_state: bool) -> Iterator[Alert]:
    """Yield the alerts of one resource. `keeps_head_state` is as in `rule_groups`."""
    yield from _workers_not_ready(own, resource)
    yield Alert(
        "BallastConfigInvalid",
        "warning",
        "5m",
        f"count({own.of(metrics.CONFIG_INVALID)} == 1) > 0",
        f"{own}: {{{{ $value }}}} workers use an old file, because the new one is invalid",
        "The file of API keys or of the configuration is empty, missing or wrong, or one of Redis or of a certificate "
        "is missing. Until it is correct, the earlier one stays in force: API keys that were removed stay valid.",
        "config-invalid",
    )
    if resource.spec.scaling is None or resource.spec.scaling.min_replicas:
        yield _no_worker_ready(own, resource)
    if resource.spec.runtime.ray is not None:
        yield from _ray_alerts(own, resource, keeps_head_state=keeps_head_state)


def _ray_alerts(own: Labels, resource: InferenceDeployment, *, keeps_head_state: bool) -> Iterator[Alert]:
    head, storage = (f"{own.known(own.ray(part))} == 0" for part in ("head", "storage"))
    pending = own.condition(ConditionType.PROGRESSING, ConditionReason.RAY_REPLICAS_PENDING)
    yield Alert(
        "BallastRayHeadDown",
        "critical",
        "3m" if keeps_head_state else "30s",  # without the state, all workers end after a minute
        f"{head} unless {storage}",  # the head ends without its Redis, which has an alert of its own
        f"{own}: the head of the Ray cluster is not ready",
        "The workers serve on without their head for ten minutes if a Redis keeps its state, and otherwise for one "
        "minute. Then they end. Until the head is back, Ray replaces no worker, and no change reaches them.",
        "ray-head-down",
    )
    yield Alert(
        "BallastRayStorageDown",
        "critical",
        "3m",
        storage,
        f"{own}: the Redis with the state of Ray's head is not ready",
        f"The head ends without the Redis {gcs_redis(own.name)}. The workers serve on without a head for ten minutes, "
        "and then end. If the state is lost, Ray starts all workers again.",
        "ray-storage-down",
    )
    startup = resource.spec.startup_seconds
    yield Alert(
        "BallastRayReplicasPending",
        "warning",
        f"{startup + 120}s",
        f"max(max_over_time({pending}[2m])) == 1 or {own.known(pending)} == 1",
        f"{own}: Ray finds no place for a replica",
        f"A replica of Ray Serve waits for its pods for longer than spec.rollout.startupSeconds ({startup} s) and 2 "
        f"minutes. `kubectl describe infd {own.name} -n {own.namespace}` quotes Ray.",
        "ray-replicas-pending",
    )


def _workers_not_ready(own: Labels, resource: InferenceDeployment) -> Iterator[Alert]:
    """Yield an alert for too few workers, as in the condition `Ready`, and one for any that is missing for hours.

    In a rollout, up to `maxUnavailable` workers are always missing, and one pod after another does not answer yet. So
    the first alert allows for these workers, and counts the time of each pod alone. No metric distinguishes a rollout
    from a worker that does not come back, so the second alert waits for longer than most rollouts take.

    While replicas are added one after another, some are never ready, each for a short time. So the first alert counts
    only workers that were wanted for the whole time in which one starts, and for longer than a restart of the operator.

    A failed scrape counts only without the figures of the operator. Some pods never listen, such as the further pods of
    a worker over several nodes, and Prometheus may be unable to reach workers that serve.
    """
    startup, missing = resource.spec.startup_seconds, resource.spec.rollout.max_unavailable
    wanted, ready = (own.known(own.replicas(state)) for state in ("desired", "ready"))
    lasting = f"{startup + 120}s"
    due = f"min(min_over_time({own.replicas('desired')}[{max(startup + 120, GAP_SECONDS)}s]))"
    is_gated = own.condition(ConditionType.READY, ConditionReason.SCHEDULING_GATED)
    gated = f"unless max(max_over_time({is_gated}[{GAP}])) == 1"
    summary = f"{own}: {{{{ $value }}}} workers are not ready"
    shown = f"`kubectl get infd {own.name} -n {own.namespace} -o wide` shows the reason."
    yield Alert(
        "BallastWorkerNotReady",
        "critical",
        lasting,
        f"({due} - {ready} > {missing} {gated})"
        f" or ({wanted} > 0 and {ready} == 0)"
        f" or (count by (namespace, pod) ({own.of('up')} == 0) > 0 unless on () {wanted})"
        f" or (count by (namespace, pod) ({own.of(metrics.ENGINE_HEALTHY)} == 0) > 0)",
        summary,
        f"The workers are not ready for longer than spec.rollout.startupSeconds ({startup} s) and 2 minutes. {shown}",
        "worker-not-ready",
    )
    yield Alert(
        "BallastWorkerNotReady",
        "warning",
        MISSING_FOR,
        f"{wanted} - {ready} > 0",
        summary,
        f"Fewer workers than spec.replicas are ready for {MISSING_FOR}. {shown}",
        "worker-not-ready",
    )


def _no_worker_ready(own: Labels, resource: InferenceDeployment) -> Alert:
    """Return the alert for an outage of workers that served, which need no time to load a model.

    A rollout leaves a worker ready if there are more than `maxUnavailable`, or more than one on Ray, where Serve
    restarts replicas in their pods. The window lasts until `BallastWorkerNotReady` fires.
    """
    window = f"[{resource.spec.startup_seconds + 300}s]"
    missing = resource.spec.rollout.max_unavailable if resource.spec.runtime.ray is None else 1
    wanted, ready = own.replicas("desired"), own.replicas("ready")
    return Alert(
        "BallastNoWorkerReady",
        "critical",
        "3m",
        f"min(min_over_time({wanted}{window})) > {missing}"
        f" and {own.known(ready)} == 0"
        f" and max(max_over_time({ready}{window})) > 0",
        f"{own}: none of {{{{ $value }}}} workers is ready",
        f"Workers were ready, and for 3 minutes none is. Online requests fail, and no job proceeds. "
        f"`kubectl get infd {own.name} -n {own.namespace} -o wide` shows the reason.",
        "no-worker-ready",
    )
