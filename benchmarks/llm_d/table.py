"""One row for each scenario, with the published rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from ballast_cli.console import print_table
from ballast_sim.replay.report import Percentiles
from llm_d.protocol import ALONE, SCENARIOS, Case, Outcome
from llm_d.published import Cells, Published, alone, rows

FACTOR = 1.25
"""The goal: TTFT p99 and ITL p99 at most this factor times those of interactive traffic alone."""
MINUTES = {1: 12.0, 2: 10.0}
"""The goal, by number of replicas: when all jobs are done."""
LATENCIES = ("TTFT p50", "p95", "p99", "x S0", "ITL p50", "p95", "p99", "x S0")
COLUMNS = ("scenario", *LATENCIES, "beside batch", "batch/s idle", "jobs done, min", "goal")


@dataclass(frozen=True, slots=True)
class Row:
    """All seeds of one scenario on one number of replicas. Times are seconds."""

    case: Case
    num_requests: int
    ttft: Percentiles
    itl: Percentiles
    beside: tuple[float, float]
    """TTFT p99 and ITL p99 of the requests that arrived in a burst while a job was unfinished."""
    finished: tuple[float, ...]
    """When each job was done in the slowest seed."""
    num_in_window: int
    """Jobs done in time in the slowest seed."""
    idle_rate: float
    num_steps: int
    num_preempted: int
    failure: str

    @property
    def done(self) -> float:
        """When all jobs were done in the slowest seed."""
        return max(self.finished, default=0.0)


def pooled(outcomes: Sequence[Outcome]) -> Row:
    """Return the row of a scenario: latencies pooled over seeds, jobs by the slowest seed."""
    return Row(
        case=outcomes[0].case,
        num_requests=sum(len(outcome.ttft) for outcome in outcomes),
        ttft=Percentiles.of(value for outcome in outcomes for value in outcome.ttft),
        itl=Percentiles.of(value for outcome in outcomes for value in outcome.itl),
        beside=(
            Percentiles.of(value for outcome in outcomes for value in outcome.ttft_beside).p99,
            Percentiles.of(value for outcome in outcomes for value in outcome.itl_beside).p99,
        ),
        finished=tuple(max(each) for each in zip(*(outcome.finished for outcome in outcomes), strict=True)),
        num_in_window=min(outcome.num_in_window for outcome in outcomes),
        idle_rate=sum(outcome.idle_rate for outcome in outcomes) / len(outcomes),
        num_steps=sum(outcome.num_steps for outcome in outcomes),
        num_preempted=sum(outcome.num_preempted for outcome in outcomes),
        failure=next((outcome.failure for outcome in outcomes if outcome.failure), ""),
    )


def missed(row: Row, s0: Row) -> tuple[str, ...]:
    """Return what a scenario misses of the goal, in the measured bursts or in those beside batch work."""
    if row.failure:
        return ("failed",)
    minutes = MINUTES.get(row.case.replicas, inf)
    found = (
        ("TTFT", max(row.ttft.p99, row.beside[0]) > FACTOR * s0.ttft.p99),
        ("ITL", max(row.itl.p99, row.beside[1]) > FACTOR * s0.itl.p99),
        ("jobs", row.done > 60 * minutes),
    )
    return tuple(name for name, is_missed in found if is_missed)


def print_rows(found: Sequence[Row]) -> None:
    """Print the table of one number of replicas and one kind of arrivals; the first row is S0."""
    s0 = found[0]
    lines = []
    for row in found:
        lines.append(_simulated(row, s0))
        lines += [_published(other) for other in rows(row.case.scenario, s0.case.replicas, _burst(s0))]
    for gate in ("S4", "S7"):
        lines += [_published(row, gate) for row in rows(gate, s0.case.replicas, _burst(s0))]
    print_table(COLUMNS, lines, right=COLUMNS[1:-1])
    for row in found:
        if row.failure:
            print(f"{SCENARIOS[row.case.scenario]} failed: {row.failure}")


def _burst(row: Row) -> float:
    return row.case.protocol.burst_rate


def _simulated(row: Row, s0: Row) -> tuple[str, ...]:
    name = f"{row.case.scenario}: {SCENARIOS[row.case.scenario]}" if row.case.scenario[0] == "S" else row.case.scenario
    if row.failure:
        return (name, *("-",) * (len(COLUMNS) - 2), "failed")
    latencies = (
        *_three(row.ttft),
        _times(row.ttft.p99, s0.ttft.p99),
        *_three(row.itl, 1),
        _times(row.itl.p99, s0.itl.p99),
    )
    if not row.finished:
        return (name, *latencies, *("-",) * 4)
    beside = ", ".join(_times(ours, theirs) for ours, theirs in zip(row.beside, (s0.ttft.p99, s0.itl.p99), strict=True))
    jobs = " / ".join(f"{seconds / 60:.1f}" if seconds < inf else "never" for seconds in row.finished)
    in_window = "" if row.num_in_window == len(row.finished) else f" ({row.num_in_window} in window)"
    verdict = missed(row, s0)
    return (
        name,
        *latencies,
        beside,
        f"{row.idle_rate:.2f}",
        jobs + in_window,
        f"missed: {', '.join(verdict)}" if verdict else "met",
    )


def _three(latency: Percentiles, digits: int = 0) -> tuple[str, ...]:
    return tuple(f"{1e3 * value:.{digits}f}" for value in (latency.p50, latency.p95, latency.p99))


def _times(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if isfinite(ours / theirs) else "-"


def _published(row: Published, name: str = "") -> tuple[str, ...]:
    s0 = alone(row)
    latencies: list[str] = []
    for ours, theirs in ((row.ttft, s0.ttft if s0 else None), (row.itl, s0.itl if s0 else None)):
        latencies += [f"{value:g}" if value else "-" for value in ours]
        latencies.append(_ratio(ours, theirs))
    label = f"  {name + ' ' if name else ''}published {row.date}"
    return (label, *latencies, "-", f"{row.batch_rate:g}" if row.batch_rate else "-", row.jobs or "-", "-")


def _ratio(ours: Cells, theirs: Cells | None) -> str:
    """Return the ratio of p99; if one is not published, of p95."""
    for mine, other in zip(reversed(ours), reversed(theirs or ()), strict=False):
        if mine and other:
            return f"{mine / other:.2f}"
    return "-"


def as_json(row: Row, s0: Row) -> dict[str, Any]:
    """Return a row as data; times are milliseconds if their name says so."""
    case = row.case
    return {
        "scenario": case.scenario,
        "replicas": case.replicas,
        "arrivals": "poisson" if case.protocol.is_poisson else "constant",
        "num_requests": row.num_requests,
        "ttft_ms": _finite([1e3 * v for v in (row.ttft.p50, row.ttft.p95, row.ttft.p99)]),
        "itl_ms": _finite([1e3 * v for v in (row.itl.p50, row.itl.p95, row.itl.p99)]),
        "ttft_p99_over_alone": _finite([row.ttft.p99 / s0.ttft.p99])[0],
        "itl_p99_over_alone": _finite([row.itl.p99 / s0.itl.p99])[0],
        "beside_ttft_p99_ms": _finite([1e3 * row.beside[0]])[0],
        "beside_itl_p99_ms": _finite([1e3 * row.beside[1]])[0],
        "batch_per_s_idle": row.idle_rate,
        "jobs_done_min": _finite([seconds / 60 for seconds in row.finished]),
        "jobs_in_window": row.num_in_window,
        "slo_ms": _finite([1e3 * case.ttft, 1e3 * case.tpot]),
        "num_steps": row.num_steps,
        "num_preempted": row.num_preempted,
        "missed": [] if case.scenario in ALONE else list(missed(row, s0)),
        "failure": row.failure,
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has neither nan nor infinity."""
    return [value if isfinite(value) else None for value in values]
