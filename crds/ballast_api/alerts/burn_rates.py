"""Alerts of the SLO: burn rates over several windows, as in chapter 5 of Google's SRE workbook.

The error budget is the share of requests that may miss the SLO: 100 % minus `objectivePercent`. The burn rate is the
speed at which requests use it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ballast_api import metrics
from ballast_api.alerts.alert import Alert, RuleJson, Severity
from ballast_api.alerts.series import Labels
from ballast_api.sections import Slo

FEWEST_REQUESTS = 20
"""Minimum of counted requests in an hour for a critical alert. With fewer, one slow request is a large share."""

FEWEST_MISSES = 5
"""Minimum of misses in the long window for a warning. At low traffic, a single miss exceeds the budget of days."""


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


def recordings(own: Labels, slo: Slo, ids: dict[str, str], windows: tuple[str, ...]) -> Iterator[RuleJson]:
    """Yield the rules that record these windows, with the labels `ids`."""
    for objective in objectives(own, slo):
        labels = ids | {"slo": objective.slo}
        for window in windows:
            # A counter without misses may not exist.
            misses = f"(sum(rate({objective.misses}[{window}])) or vector(0))"
            ratio = f"{misses} / sum(rate({objective.all}[{window}]))"
            yield {"record": f"{RATIO}{window}", "expr": ratio, "labels": labels}
        for window in filter(COUNTED.__contains__, windows):
            yield {"record": f"{TRAFFIC}{window}", "expr": f"sum(rate({objective.all}[{window}]))", "labels": labels}


def burn_alerts(own: Labels, slo: Slo) -> Iterator[Alert]:
    """Yield the alerts of one resource."""
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
