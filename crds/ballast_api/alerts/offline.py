"""Alerts of offline work: its reservation, its jobs, and their queue."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from ballast_api import metrics
from ballast_api.alerts.alert import Alert
from ballast_api.alerts.series import GAP, Labels
from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.sections import Offline


def offline_alerts(own: Labels, offline: Offline) -> Iterator[Alert]:
    """Yield the alerts of one resource."""
    if offline.reserved_percent > 0:
        yield _reservation_not_met(own, offline.reserved_percent)
    at_risk = own.of(metrics.JOBS_AT_RISK, own.queue)
    late = own.known(own.condition(ConditionType.DEADLINE_AT_RISK, ConditionReason.LATE))
    on_time = own.known(own.condition(ConditionType.DEADLINE_AT_RISK, ConditionReason.ON_TIME))
    yield Alert(
        "BallastDeadlineAtRisk",
        "warning",
        "5m",
        # Workers know the number. Without a worker, the operator knows of it. During an outage of Redis, neither does.
        f"(max({at_risk}) or {late} or (max(last_over_time({at_risk}[{GAP}])) unless {on_time})) > 0",
        f"{own}: at least {{{{ $value }}}} jobs will miss their deadline",
        "At the rate of the last minutes, these jobs end after their deadline. Results that are complete by then are "
        "kept.",
        "deadline-at-risk",
    )
    yield _dead_letters(own, offline)
    up = f"min({own.of(metrics.REDIS_UP)})"
    unreachable = own.known(own.condition(ConditionType.DEADLINE_AT_RISK, ConditionReason.REDIS_UNREACHABLE))
    yield Alert(
        "BallastRedisUnreachable",
        "critical",
        "2m",
        f"{up} == 0 or ({unreachable} == 1 unless {up})",
        f"{own}: a worker, or the operator of a resource without workers, cannot use Redis",
        "The worker still serves online requests. Its offline work pauses, and no work is lost. Its leases expire "
        f"after {offline.lease_seconds:g} s, and other workers claim its items. Without workers, no job starts one.",
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


def _dead_letters(own: Labels, offline: Offline) -> Alert:
    letters = own.of(metrics.DEAD_LETTERS, own.queue)
    # During an outage of Redis, workers do not report them. The alert would end, and fire again for the same letters.
    # The last minute with figures counts: earlier ones are also of workers that ended before it.
    now = f"(min by (queue) ({letters}) or last_over_time(min by (queue) ({letters})[30m:1m]))"
    # Without workers, letters remain for this time after the end of their job.
    kept = max(7, ceil(min(offline.results_days, 365)) + 1)
    return Alert(
        "BallastDeadLetters",
        "warning",
        "0s",
        # The least of the half hour: at its start, workers may not have reported, or a job was deleted since. The least
        # of all workers now: Prometheus scrapes one after another, so some still show letters that were redriven. New
        # letters therefore count when the last worker shows them.
        f"{now} - min by (queue) (min_over_time({letters}[30m])) > 0 "
        f"or ({now} > 0 unless max by (queue) (last_over_time({letters}[{kept}d] offset 30m)))",
        f"{own}: {{{{ $value }}}} items became dead letters in the last half hour",
        f"An item becomes a dead letter after {offline.max_attempts} failed attempts. The results of its job show the "
        "error. `ballast redrive` returns it to the queue.",
        "dead-letters",
    )
