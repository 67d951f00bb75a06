"""One row for each scenario, with the published rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from math import inf, isfinite
from typing import Any

from ballast_cli.console import print_table
from ballast_sim.replay.report import Percentiles
from llm_d.protocol import ALONE, SCENARIOS, Outcome
from llm_d.published import Cells, Published, alone, rows

FACTOR = 1.25
"""The goal: TTFT p99 and ITL p99 at most this factor times those of interactive traffic alone."""
MINUTES = {1: 12.0, 2: 10.0}
"""The goal, by number of replicas: when all jobs are done."""
LATENCIES = ("TTFT p50", "p95", "p99", "x S0", "ITL p50", "p95", "p99", "x S0")
COLUMNS = ("scenario", *LATENCIES, "beside batch", "batch/s idle", "jobs done, min", "goal")


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return Percentiles.of(values).p99


def missed(row: Outcome, s0: Outcome) -> tuple[str, ...]:
    """Return what a scenario misses of the goal, in the measured bursts or in those beside batch work."""
    if row.failure:
        return ("failed",)
    minutes = MINUTES.get(row.case.replicas, inf)
    found = (
        ("TTFT", max(p99(row.ttft), p99(row.ttft_beside)) > FACTOR * p99(s0.ttft)),
        ("ITL", max(p99(row.itl), p99(row.itl_beside)) > FACTOR * p99(s0.itl)),
        ("jobs", row.done > 60 * minutes),
    )
    return tuple(name for name, is_missed in found if is_missed)


def print_rows(found: Sequence[Outcome]) -> None:
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


def _burst(row: Outcome) -> float:
    return row.case.protocol.burst_rate


def _simulated(row: Outcome, s0: Outcome) -> tuple[str, ...]:
    name = f"{row.case.scenario}: {SCENARIOS[row.case.scenario]}" if row.case.scenario[0] == "S" else row.case.scenario
    if row.failure:
        return (name, *("-",) * (len(COLUMNS) - 2), "failed")
    latencies = (
        *_three(row.ttft),
        _times(row.ttft, s0.ttft),
        *_three(row.itl, 1),
        _times(row.itl, s0.itl),
    )
    if not row.finished:
        return (name, *latencies, *("-",) * 4)
    beside = f"{_times(row.ttft_beside, s0.ttft)}, {_times(row.itl_beside, s0.itl)}"
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


def _three(latencies: Sequence[float], digits: int = 0) -> tuple[str, ...]:
    return tuple(f"{1e3 * value:.{digits}f}" for value in astuple(Percentiles.of(latencies)))


def _times(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratio = p99(ours) / p99(theirs)
    return f"{ratio:.2f}" if isfinite(ratio) else "-"


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


def as_json(row: Outcome, s0: Outcome) -> dict[str, Any]:
    """Return a row as data; times are milliseconds if their name says so."""
    case = row.case
    return {
        "scenario": case.scenario,
        "replicas": case.replicas,
        "arrivals": "poisson" if case.protocol.is_poisson else "constant",
        "num_requests": len(row.ttft),
        "ttft_ms": _finite([1e3 * v for v in astuple(Percentiles.of(row.ttft))]),
        "itl_ms": _finite([1e3 * v for v in astuple(Percentiles.of(row.itl))]),
        "ttft_p99_over_alone": _finite([p99(row.ttft) / p99(s0.ttft)])[0],
        "itl_p99_over_alone": _finite([p99(row.itl) / p99(s0.itl)])[0],
        "beside_ttft_p99_ms": _finite([1e3 * p99(row.ttft_beside)])[0],
        "beside_itl_p99_ms": _finite([1e3 * p99(row.itl_beside)])[0],
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
