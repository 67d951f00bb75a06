"""Alert rules of one resource, from its `slo` and `offline`; for a PrometheusRule and for a rules file alike.

Promises are watched by burn rate over several windows, as in chapter 5 of Google's SRE workbook: how fast the share of
requests that may miss (100 % less `objectivePercent`) is being used up. Every name, window and threshold stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ballast_api import metrics
from ballast_api.inference_deployment import InferenceDeployment

RUNBOOKS = "docs/runbooks"
"""Where the pages of the alerts are; one page per alert."""
FEWEST_REQUESTS = 20
"""Under so many judged requests in an hour, a burn wakes nobody: one slow request would be a large share."""

Severity = Literal["critical", "warning"]
"""`critical` wakes somebody, `warning` waits for the morning."""
Rule = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Burn:
    """The budget of 30 days burns `rate` times too fast, over a long window and still over a short one."""

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
"""How often each window is recorded: a long one is dear, and moves slowly."""
RATIO = "ballast:slo_miss_ratio:rate"
"""Recorded share of misses; the window follows."""
TRAFFIC = "ballast:slo_requests:rate1h"
"""Recorded judged requests per second."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that online requests are promised.

    Attributes:
        slo: The recorded label.
        alert: Name of the alert.
        misses: Selector of the counter's series that count misses.
        all: Selector of those that count every judged request.
        text: What a miss is.
        page: The runbook.
    """

    slo: str
    alert: str
    misses: str
    all: str
    text: str
    page: str


@dataclass(frozen=True, slots=True)
class Watch:
    """An alert that is no burn rate."""

    alert: str
    severity: Severity
    lasting: str
    expression: str
    summary: str
    meaning: str
    page: str


def rule_groups(resource: InferenceDeployment, *, match: str | None = None, runbooks: str = RUNBOOKS) -> list[Rule]:
    """Give the groups of a PrometheusRule's spec or of a rules file.

    Args:
        resource: whose alerts these are.
        match: PromQL matchers that select the scraped workers of `resource`; by default what its ServiceMonitor gives.
        runbooks: folder or URL that holds the runbook pages.
    """
    own = Labels(resource, match)
    ids = {"namespace": resource.metadata.namespace, "inferencedeployment": resource.metadata.name}
    prefix = f"ballast/{own.namespace}/{own.name}"
    alerts = [*_burn_alerts(own, resource.spec.slo.objective_percent), *_watches(own, resource)]
    return [
        *(
            {
                "name": f"{prefix}/every-{interval}",
                "interval": interval,
                "rules": list(_recordings(own, ids, windows)),
            }
            for interval, windows in WINDOWS.items()
        ),
        {"name": f"{prefix}/alerts", "interval": "30s", "rules": [_alert(alert, ids, runbooks) for alert in alerts]},
    ]


class Labels:
    """How PromQL selects what belongs to one resource."""

    def __init__(self, resource: InferenceDeployment, match: str | None) -> None:
        self.namespace, self.name = resource.metadata.namespace, resource.metadata.name
        self.match = f'namespace="{self.namespace}",service="{self.name}"' if match is None else match
        self.queue = f'queue="{resource.queue_name}"'
        self.recorded = f'namespace="{self.namespace}",inferencedeployment="{self.name}"'
        self.operator = f'namespace="{self.namespace}",name="{self.name}"'

    def __str__(self) -> str:
        """Name the resource."""
        return f"{self.namespace}/{self.name}"

    def of(self, metric: str, *more: str) -> str:
        """The series of a worker's metric."""
        return f"{metric}{{{','.join(part for part in (self.match, *more) if part)}}}"


def promises(own: Labels) -> tuple[Promise, ...]:
    """Everything that burns a budget."""
    online = 'class="online"'
    either = "|".join((*metrics.ANSWERS, *metrics.FAILURES))
    return (
        *(
            Promise(
                slo,
                f"Ballast{slo.capitalize()}BudgetBurn",
                own.of(metrics.SLO_REQUESTS, online, f'slo="{slo}"', 'met="false"'),
                own.of(metrics.SLO_REQUESTS, online, f'slo="{slo}"'),
                text,
                f"{slo}-budget-burn",
            )
            for slo, text in (
                ("ttft", "online requests waited longer for their first token than spec.slo.ttftMilliseconds"),
                ("tpot", "online requests got their tokens more slowly than spec.slo.tpotMilliseconds"),
            )
        ),
        Promise(
            "availability",
            "BallastAvailabilityBudgetBurn",
            own.of(metrics.REQUESTS, online, f'outcome=~"{"|".join(metrics.FAILURES)}"'),
            own.of(metrics.REQUESTS, online, f'outcome=~"{either}"'),
            "online requests failed or were turned away",
            "availability-budget-burn",
        ),
    )


def _recordings(own: Labels, ids: dict[str, str], windows: tuple[str, ...]) -> Iterator[Rule]:
    for promise in promises(own):
        labels = ids | {"slo": promise.slo}
        for window in windows:
            # A counter of misses that never moved may not exist: then none was missed.
            misses = f"(sum(rate({promise.misses}[{window}])) or vector(0))"
            ratio = f"{misses} / sum(rate({promise.all}[{window}]))"
            yield {"record": f"{RATIO}{window}", "expr": ratio, "labels": labels}
        if "1h" in windows:
            yield {"record": TRAFFIC, "expr": f"sum(rate({promise.all}[1h]))", "labels": labels}


def _burn_alerts(own: Labels, objective: float) -> Iterator[Watch]:
    budget = round(1 - objective / 100, 8)
    for promise in promises(own):
        labels = f'{{{own.recorded},slo="{promise.slo}"}}'
        for severity in ("critical", "warning"):
            # Above 1 no share of misses can be: such a burn does not exist under this objective.
            burns = [burn for burn in BURNS if burn.severity == severity and burn.rate * budget < 1]
            if not burns:
                continue
            either = " or ".join(_burning(labels, burn, budget) for burn in burns)
            busy = f" and {TRAFFIC}{labels} * 3600 >= {FEWEST_REQUESTS}" if severity == "critical" else ""
            windows = " or ".join(burn.long for burn in burns)
            yield Watch(
                alert=promise.alert,
                severity=severity,
                lasting="0s",
                expression=f"({either}){busy}",
                summary=f"{own}: {{{{ $value | humanizePercentage }}}} of {promise.text}",
                meaning=f"spec.slo.objectivePercent ({objective:g} %) leaves {100 - objective:g} % that may miss. Over "
                f"the last {windows} they were used up at least {burns[-1].rate:g} times as fast as 30 days allow.",
                page=promise.page,
            )


def _burning(labels: str, burn: Burn, budget: float) -> str:
    over = f"> {round(burn.rate * budget, 8):g}"
    return f"({RATIO}{burn.long}{labels} {over} and {RATIO}{burn.short}{labels} {over})"


def _watches(own: Labels, resource: InferenceDeployment) -> Iterator[Watch]:
    offline = resource.spec.offline
    if offline.reserved_percent > 0:
        yield Watch(
            "BallastOfflineReservationNotMet",
            "warning",
            "5m",
            f"avg_over_time({own.of(metrics.OFFLINE_RESERVATION_MET)}[10m]) < 0.9",
            f"{own}: offline work on {{{{ $labels.pod }}}} runs in fewer slots than are reserved",
            "In more than a tenth of the last ten minutes, offline requests waited while fewer ran than the "
            f"reservation ({offline.reserved_percent:g} %, spec.offline.reservedPercent) and the maxSlots of their "
            "tenants allow. Parked requests do not count. The policy keeps the reservation whatever the online load: "
            "something keeps it from doing so.",
            "offline-reservation-not-met",
        )
    yield Watch(
        "BallastDeadlineAtRisk",
        "warning",
        "5m",
        f"max by (queue) ({own.of(metrics.JOBS_AT_RISK, own.queue)}) > 0",
        f"{own}: {{{{ $value }}}} jobs will miss their deadline",
        "At the rate of the last minutes these jobs end after their deadline. What is done by then is kept.",
        "deadline-at-risk",
    )
    letters = f"max by (queue) ({own.of(metrics.DEAD_LETTERS, own.queue)})"
    earlier = f"max by (queue) ({own.of(metrics.DEAD_LETTERS, own.queue)} offset 30m)"
    yield Watch(
        "BallastDeadLetters",
        "warning",
        "0s",
        f"{letters} - ({earlier} or {letters} * 0) > 0",
        f"{own}: {{{{ $value }}}} items were given up in the last half hour",
        f"An item is given up after {offline.max_attempts} attempts. It is in the job's results as an error, and "
        "`ballast redrive` tries it again.",
        "dead-letters",
    )
    yield Watch(
        "BallastRedisUnreachable",
        "critical",
        "2m",
        f"min({own.of(metrics.REDIS_UP)}) == 0",
        f"{own}: a worker cannot use Redis",
        "Online requests are served on; offline work pauses there and nothing is lost. Leases of that worker run out "
        f"after {offline.lease_seconds:g} s, and others take its items.",
        "redis-unreachable",
    )
    yield _worker_not_ready(own, resource)


def _worker_not_ready(own: Labels, resource: InferenceDeployment) -> Watch:
    startup = resource.spec.rollout.startup_seconds
    ready, wanted = (f'max without (pod, instance) ({metrics.OPERATOR_REPLICAS}{{{own.operator},state="{state}"}})'
                     for state in ("ready", "desired"))  # fmt: skip
    return Watch(
        "BallastWorkerNotReady",
        "critical",
        f"{startup + 120}s",
        f"({wanted} - ignoring (state) {ready} > 0)"
        f" or (count by (namespace) ({own.of('up')} == 0) > 0)"
        f" or (count by (namespace) ({own.of(metrics.ENGINE_HEALTHY)} == 0) > 0)",
        f"{own}: {{{{ $value }}}} workers do not serve",
        f"They have not been ready for longer than spec.rollout.startupSeconds ({startup} s) allows. "
        f"`kubectl get infd {own.name} -n {own.namespace} -o wide` has the reason.",
        "worker-not-ready",
    )


def _alert(watch: Watch, ids: dict[str, str], runbooks: str) -> Rule:
    lasting = {} if watch.lasting == "0s" else {"for": watch.lasting}
    return {
        "alert": watch.alert,
        "expr": watch.expression,
        **lasting,
        "labels": ids | {"severity": watch.severity},
        "annotations": {
            "summary": watch.summary,
            "description": watch.meaning,
            "runbook_url": f"{runbooks.rstrip('/')}/{watch.page}.md",
        },
    }
