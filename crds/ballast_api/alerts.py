"""Alert rules of one resource, from its `slo` and `offline`, for a PrometheusRule or a rules file.

Alerts of the SLO use burn rates over several windows, as in chapter 5 of Google's SRE workbook. The error budget is
the share of requests that may miss the SLO: 100 % minus `objectivePercent`. The burn rate is the speed at which
requests use it up. This module contains every name, window and threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from ballast_api import metrics
from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import gcs_redis
from ballast_api.sections import Slo

FEWEST_REQUESTS = 20
"""Minimum of counted requests in an hour for a critical alert. With fewer, one slow request is a large share."""

FEWEST_MISSES = 5
"""Minimum of misses in the long window for a warning. At low traffic, a single miss exceeds the budget of days."""

MISSING_FOR = "6h"
"""Time after which a missing worker is an alert even if enough others serve. Most rollouts end before."""

Severity = Literal["critical", "warning"]
"""`critical` pages a person at once, `warning` can wait until the morning."""
RuleJson = dict[str, Any]
"""A rule or a group of rules, as Prometheus reads it."""


@dataclass(frozen=True, slots=True)
class Burn:
    """The error budget of 30 days burns at least `rate` times too fast, over a long and over a short window."""

    severity: Severity
    rate: float
    long: str
    short: str


BURNS = (
    Burn("critical", 14.4, "1h", "5m"),
    Burn("critical", 6, "6h", "30m"),
    Burn("warning", 3, "1d", "2h"),
    Burn("warning", 1, "3d", "6h"),
)
WINDOWS = {"30s": ("5m", "30m", "1h"), "2m": ("2h", "6h", "1d", "3d")}
"""Windows by the interval at which they are recorded. Long windows cost more and change slowly."""
RATIO = "ballast:slo_miss_ratio:rate"
"""Prefix of the recorded share of misses. The window follows."""
TRAFFIC = "ballast:slo_requests:rate"
"""Prefix of the recorded counted requests per second. The window follows."""
COUNTED = {"1h": 3600, "1d": 86400, "3d": 259200}
"""Seconds of the windows over which requests are counted."""
RESERVED_LABELS = frozenset(
    {"alertname", "class", "inferencedeployment", "instance", "job", "kind", "le", "met", "name", "namespace", "part"}
    | {"outcome", "pod", "queue", "reason", "resource_namespace", "service", "severity", "slo", "state", "status"}
    | {"task", "type"}
)
"""Labels that rules, or the series that they read, have already."""
GAP_SECONDS = 480
GAP = f"{GAP_SECONDS // 60}m"
"""Longest time without series of an operator that restarts. Kubernetes waits for up to 5 minutes before a start."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective of online requests, with an error budget.

    Attributes:
        slo: Value of the recorded label `slo`.
        alert: Name of the alert.
        misses: Selector of the series that count misses.
        all: Selector of the series that count all requests of the objective.
        text: Describes a miss.
        page: Name of the runbook page.
    """

    slo: str
    alert: str
    misses: str
    all: str
    text: str
    page: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        alert: Name of the alert.
        severity: The label `severity`.
        lasting: Time that the expression must hold.
        expression: PromQL expression.
        summary: One line for a pager.
        meaning: Sentences that explain the alert.
        page: Name of the runbook page.
    """

    alert: str
    severity: Severity
    lasting: str
    expression: str
    summary: str
    meaning: str
    page: str


def rule_groups(
    resource: InferenceDeployment,
    *,
    match: str | None = None,
    labels: Mapping[str, str] | None = None,
    runbooks: str | None = None,
    keeps_head_state: bool = True,
) -> list[RuleJson]:
    """Return the groups of a PrometheusRule's spec or of a rules file.

    Args:
        resource: The resource to watch.
        match: PromQL matchers of the scraped workers; by default the labels that the resource's ServiceMonitor sets.
        labels: Labels that every series must have, and that every alert and recorded series gets, such as the cluster.
            None is of `RESERVED_LABELS`.
        runbooks: Base URL of the runbook pages. Without it, alerts have no `runbook_url`.
        keeps_head_state: Whether a Redis keeps the state of Ray's head, if the resource runs on Ray.
    """
    labels = labels or {}
    own = Labels(resource, match, labels)
    ids = {**labels, "namespace": own.namespace, "inferencedeployment": own.name}
    prefix = "/".join(("ballast", *labels.values(), own.namespace, own.name))
    alerts = [*_burn_alerts(own, resource.spec.slo), *_other_alerts(own, resource, keeps_head_state=keeps_head_state)]
    return [
        *(
            {
                "name": f"{prefix}/every-{interval}",
                "interval": interval,
                "rules": list(_recordings(own, resource.spec.slo, ids, windows)),
            }
            for interval, windows in WINDOWS.items()
        ),
        {"name": f"{prefix}/alerts", "interval": "30s", "rules": [_alert(alert, ids, runbooks) for alert in alerts]},
    ]


class Labels:
    """PromQL matchers of the series of one resource."""

    def __init__(self, resource: InferenceDeployment, match: str | None, labels: Mapping[str, str]) -> None:
        self.namespace, self.name = resource.metadata.namespace, resource.metadata.name
        every = [f'{label}="{value}"' for label, value in labels.items()]
        own = f'namespace="{self.namespace}",service="{self.name}"' if match is None else match
        self.match = _listed(*every, own)
        self.queue = f'queue="{resource.queue_name}"'
        self.recorded = _listed(*every, f'namespace="{self.namespace}",inferencedeployment="{self.name}"')
        self.operator = _listed(*every, f'resource_namespace="{self.namespace}",name="{self.name}"')

    def __str__(self) -> str:
        """Return namespace and name of the resource."""
        return f"{self.namespace}/{self.name}"

    def of(self, metric: str, *more: str) -> str:
        """Return the selector of a metric of the workers."""
        return f"{metric}{{{_listed(self.match, *more)}}}"

    def replicas(self, state: Literal["desired", "ready"]) -> str:
        """Return the selector of a number of workers, which each replica of the operator may export."""
        return f'{metrics.OPERATOR_REPLICAS}{{{self.operator},state="{state}"}}'

    def condition(self, kind: ConditionType, reason: ConditionReason) -> str:
        """Return the selector of a condition that the operator exports."""
        return f'{metrics.OPERATOR_CONDITION}{{{self.operator},type="{kind}",reason="{reason}"}}'

    def ray(self, part: Literal["head", "storage"]) -> str:
        """Return the selector of a part of the Ray cluster that the operator exports."""
        return f'{metrics.OPERATOR_RAY_READY}{{{self.operator},part="{part}"}}'

    def known(self, series: str) -> str:
        """Return the value that the operator exports, or the last one while it exports no figures of the resource.

        So a restart of the operator does not start the time of an alert again. The result has no labels.
        """
        last = f"max(last_over_time({series}[{GAP}])) unless max({self.replicas('desired')})"
        return f"(max({series}) or ({last}))"


def _listed(*matchers: str) -> str:
    return ",".join(part for part in matchers if part)


def objectives(own: Labels, slo: Slo) -> tuple[Objective, ...]:
    """Return all objectives."""
    online = 'class="online"'
    either = "|".join((*metrics.ANSWERS, *metrics.FAILURES))
    return (
        *(
            Objective(
                name,
                f"Ballast{name.capitalize()}BudgetBurn",
                own.of(metrics.SLO_REQUESTS, online, f'slo="{name}"', 'met="false"'),
                own.of(metrics.SLO_REQUESTS, online, f'slo="{name}"'),
                f"online requests exceed spec.slo.{name}Milliseconds (or their own SLO, if it is longer)",
                f"{name}-budget-burn",
            )
            for name in slo.milliseconds
        ),
        Objective(
            "availability",
            "BallastAvailabilityBudgetBurn",
            own.of(metrics.REQUESTS, online, f'outcome=~"{"|".join(metrics.FAILURES)}"'),
            own.of(metrics.REQUESTS, online, f'outcome=~"{either}"'),
            "online requests fail or are refused",
            "availability-budget-burn",
        ),
    )


def _recordings(own: Labels, slo: Slo, ids: dict[str, str], windows: tuple[str, ...]) -> Iterator[RuleJson]:
    for objective in objectives(own, slo):
        labels = ids | {"slo": objective.slo}
        for window in windows:
            # A counter without misses may not exist.
            misses = f"(sum(rate({objective.misses}[{window}])) or vector(0))"
            ratio = f"{misses} / sum(rate({objective.all}[{window}]))"
            yield {"record": f"{RATIO}{window}", "expr": ratio, "labels": labels}
        for window in filter(COUNTED.__contains__, windows):
            yield {"record": f"{TRAFFIC}{window}", "expr": f"sum(rate({objective.all}[{window}]))", "labels": labels}


def _burn_alerts(own: Labels, slo: Slo) -> Iterator[Alert]:
    percent = slo.objective_percent
    budget = round(1 - percent / 100, 8)
    for objective in objectives(own, slo):
        labels = f'{{{own.recorded},slo="{objective.slo}"}}'
        for severity in ("critical", "warning"):
            # A share of misses above 1 is impossible, so this objective cannot have such a burn.
            burns = [burn for burn in BURNS if burn.severity == severity and burn.rate * budget < 1]
            if not burns:
                continue
            either = " or ".join(_burning(labels, burn, budget) for burn in burns)
            busy = f" and {TRAFFIC}1h{labels} * 3600 >= {FEWEST_REQUESTS}" if severity == "critical" else ""
            windows = " or ".join(burn.long for burn in burns)
            yield Alert(
                alert=objective.alert,
                severity=severity,
                lasting="0s",
                expression=f"({either}){busy}",
                summary=f"{own}: {{{{ $value | humanizePercentage }}}} of {objective.text}",
                meaning=f"With spec.slo.objectivePercent {percent:g}, {100 - percent:g} % of the requests may miss. "
                f"Over the last {windows}, requests used up this error budget at least {burns[-1].rate:g} times as "
                "fast as an even use over 30 days.",
                page=objective.page,
            )


def _burning(labels: str, burn: Burn, budget: float) -> str:
    over = f"> {round(burn.rate * budget, 8):g}"
    long, several = f"{RATIO}{burn.long}{labels}", ""
    if burn.severity == "warning":
        several = f" and {long} * {TRAFFIC}{burn.long}{labels} * {COUNTED[burn.long]} >= {FEWEST_MISSES}"
    return f"({long} {over} and {RATIO}{burn.short}{labels} {over}{several})"


def _other_alerts(own: Labels, resource: InferenceDeployment, *, keeps_head_state: bool) -> Iterator[Alert]:
    offline = resource.spec.offline
    if offline.reserved_percent > 0:
        yield _reservation_not_met(own, offline.reserved_percent)
    yield Alert(
        "BallastDeadlineAtRisk",
        "warning",
        "5m",
        f"max by (queue) ({own.of(metrics.JOBS_AT_RISK, own.queue)}) > 0",
        f"{own}: {{{{ $value }}}} jobs will miss their deadline",
        "At the rate of the last minutes, these jobs end after their deadline. Results that are complete by then are "
        "kept.",
        "deadline-at-risk",
    )
    letters = own.of(metrics.DEAD_LETTERS, own.queue)
    # Without workers, letters remain for this time after the end of their job.
    kept = max(7, ceil(min(offline.results_days, 365)) + 1)
    yield Alert(
        "BallastDeadLetters",
        "warning",
        "0s",
        # The least of the half hour: at its start, workers may not have reported, or a job was deleted since. The least
        # of all workers now: Prometheus scrapes one after another, so some still show letters that were redriven. New
        # letters therefore count when the last worker shows them.
        f"min by (queue) ({letters}) - min by (queue) (min_over_time({letters}[30m])) > 0 "
        f"or (min by (queue) ({letters}) > 0 unless max by (queue) (last_over_time({letters}[{kept}d] offset 30m)))",
        f"{own}: {{{{ $value }}}} items became dead letters in the last half hour",
        f"An item becomes a dead letter after {offline.max_attempts} failed attempts. The results of its job show the "
        "error. `ballast redrive` returns it to the queue.",
        "dead-letters",
    )
    yield Alert(
        "BallastRedisUnreachable",
        "critical",
        "2m",
        f"min({own.of(metrics.REDIS_UP)}) == 0",
        f"{own}: a worker cannot use Redis",
        "The worker still serves online requests. Its offline work pauses, and no work is lost. Its leases expire "
        f"after {offline.lease_seconds:g} s, and other workers claim its items.",
        "redis-unreachable",
    )
    yield Alert(
        "BallastFeederFailing",
        "warning",
        "10m",
        f"sum by (task) (increase({own.of(metrics.FEEDER_FAILURES)}[5m])) > 0",
        f"{own}: the task {{{{ $labels.task }}}} between queue and engine fails",
        "Other tasks go on. If the task is `inbox`, Redis may be full: entries of inboxes wait until it has memory.",
        "feeder-failing",
    )
    yield from _workers_not_ready(own, resource)
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


def _reservation_not_met(own: Labels, percent: float) -> Alert:
    return Alert(
        "BallastOfflineReservationNotMet",
        "warning",
        "5m",
        f"avg_over_time({own.of(metrics.OFFLINE_RESERVATION_MET)}[10m]) < 0.9",
        f"{own}: the offline reservation is not met on {{{{ $labels.pod }}}}",
        "For more than a tenth of the last ten minutes, offline requests waited while fewer ran than the "
        f"reservation ({percent:g} %, spec.offline.reservedPercent) and the maxSlots of their tenants allow. Parked "
        "requests do not count as running. The policy keeps the reservation at any online load, so something prevents "
        "it.",
        "offline-reservation-not-met",
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


def _alert(alert: Alert, ids: dict[str, str], runbooks: str | None) -> RuleJson:
    lasting = {} if alert.lasting == "0s" else {"for": alert.lasting}
    return {
        "alert": alert.alert,
        "expr": alert.expression,
        **lasting,
        "labels": ids | {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.meaning,
            **({"runbook_url": f"{runbooks.rstrip('/')}/{alert.page}.md"} if runbooks else {}),
        },
    }
