"""Several seeds of one scenario: other slices of a trace, and pooled reports of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.comparison.bench import Row
from ballast_sim.comparison.table import Table
from ballast_sim.replay.attainment import Percentiles, thirds, tpot_attainment, ttft_attainment
from ballast_sim.replay.report import Report, Tokens
from ballast_sim.replay.traffic import Arrival, Trace, at_zero


def rotated(trace: Trace, share: float) -> list[Arrival]:
    """Start a trace at a share of its requests. The requests before it follow the last one."""
    first = int(share * len(trace))
    span = trace[-1].seconds * len(trace) / max(len(trace) - 1, 1)
    return at_zero([*trace[first:], *(replace(arrival, seconds=arrival.seconds + span) for arrival in trace[:first])])


def pooled(reports: Sequence[Report], judged_by: PolicyConfig) -> Report:
    """Pool reports of runs under one configuration.

    Latencies and attainment are those of all online requests together. Rates and shares are means over time, counts
    are sums, and the fairness figures are those of the worst run.
    """
    answers = tuple(answer for each in reports for answer in each.answers)
    counts = [each.num_online for each in reports]
    times = [each.seconds for each in reports]

    def over_time(field: str) -> float:
        return _mean([getattr(each, field) for each in reports], times)

    return replace(
        reports[0],
        seconds=sum(times),
        num_online=len(answers),
        ttft=Percentiles.of(answer.ttft for answer in answers),
        tpot=Percentiles.of(answer.tpot for answer in answers if not isnan(answer.tpot)),
        ttft_attainment=ttft_attainment(answers, judged_by.ttft),
        tpot_attainment=tpot_attainment(answers, judged_by.tpot),
        envelope_attainment=_mean([each.envelope_attainment for each in reports], counts),
        goodput=over_time("goodput"),
        online=_tokens([each.online for each in reports], times),
        offline=_tokens([each.offline for each in reports], times),
        wasted_tokens=sum(each.wasted_tokens for each in reports),
        online_slots=over_time("online_slots"),
        offline_slots=over_time("offline_slots"),
        jain=min(each.jain for each in reports),
        service_gap=max(each.service_gap for each in reports),
        reservation_shortfall=over_time("reservation_shortfall"),
        deadline_hits=over_time("deadline_hits"),
        thirds=thirds(answers, ttft=judged_by.ttft, tpot=judged_by.tpot),
        answers=answers,
        num_unfinished=sum(each.num_unfinished for each in reports),
    )


def pooled_row(rows: Sequence[Row], judged_by: PolicyConfig) -> Row:
    """Pool the rows of one policy, load and reservation; the slots over time are those of the first run."""
    times = [row.result.seconds for row in rows]
    return replace(
        rows[0],
        result=pooled([row.result for row in rows], judged_by),
        total_tokens=_mean([row.total_tokens for row in rows], times),
        offline_tokens=_mean([row.offline_tokens for row in rows], times),
        note="; ".join(dict.fromkeys(row.note for row in rows if row.note)),
    )


def pooled_table(tables: Sequence[Table]) -> Table:
    """Pool the tables of several seeds, online alone among them."""
    bench = tables[0].bench
    config = bench.config
    alones = {load: pooled_row([table.bench.alone(load) for table in tables], config) for load in bench.alones}
    rows = [pooled_row(rows, config) for rows in zip(*(table.rows for table in tables), strict=True)]
    rate = sum(table.rate for table in tables) / len(tables)
    return Table(replace(bench, alones=alones), rate, {}, rows)


def _tokens(tokens: Sequence[Tokens], times: Sequence[float]) -> Tokens:
    return Tokens(_mean([each.prefill for each in tokens], times), _mean([each.decode for each in tokens], times))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Compute the weighted mean of the values that are known."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if not isnan(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else nan
