"""Calibrate the step times on the published rows without batch work, and check them against the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import log, sqrt

from ballast_cli.console import print_table
from llm_d.experts import GPT_OSS_A100, ExpertRoofline
from llm_d.protocol import Case, Protocol, run
from llm_d.published import CALIBRATION, CHECKS, Cells, Published, deciled

SECONDS = 25.0
"""Length of the burst that a calibration simulates. All bursts without batch work are equal."""
COMPUTE = (0.4, 0.45, 0.5, 0.55, 0.6)
DIVERSITY = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""What the calibration tries. At 1, every token chooses its experts by itself."""
COLUMNS = ("TTFT p50", "p95", "p99", "ITL p50", "p95", "p99")


def medians(row: Published) -> tuple[Cells, Cells]:
    """Return the cells that the calibration uses: medians, and the ITL p99 of the row that has no ITL median.

    Tails of TTFT are left to be checked: interpolated between the 90th percentile and the maximum, they hang on one
    request. ITL hardly differs between requests.
    """
    itl = (row.itl[0], None, None) if row.itl[0] else row.itl
    return (row.ttft[0], None, None), itl


def simulated(row: Published, model: ExpertRoofline, protocol: Protocol) -> tuple[float, ...]:
    """Return TTFT and ITL in milliseconds, as the published script computes them."""
    case = Case(row.scenario, row.replicas, protocol, model=model, batch_rate=row.batch_rate or 4.0)
    outcome = run(case, is_extended=False)
    return tuple(1e3 * value for latencies in (outcome.ttft, outcome.itl) for value in deciled(latencies))


def errors(row: Published, found: tuple[float, ...], *, is_fit: bool) -> list[float]:
    """Return the logarithms of simulated over published."""
    ttft, itl = medians(row) if is_fit else (row.ttft, row.itl)
    return [log(ours / theirs) for ours, theirs in zip(found, (*ttft, *itl), strict=True) if theirs]


@cache
def error(compute: float, diversity: float) -> float:
    """Return the root mean square of the logarithmic errors over the cells of the calibration."""
    model = made(compute, diversity)
    protocol = Protocol(phase_seconds=SECONDS, cycles=1, warmup_cycles=0)
    by_load = {(row.replicas, row.burst_rate): row for row in CALIBRATION}
    found = {load: simulated(row, model, replace(protocol, burst_rate=row.burst_rate)) for load, row in by_load.items()}
    squares = [e * e for row in CALIBRATION for e in errors(row, found[row.replicas, row.burst_rate], is_fit=True)]
    return sqrt(sum(squares) / len(squares))


def made(compute: float, diversity: float) -> ExpertRoofline:
    """Return the model with the two calibrated values replaced."""
    efficiency = GPT_OSS_A100.efficiency.model_copy(update={"compute": compute})
    return replace(GPT_OSS_A100, efficiency=efficiency, diversity=diversity)


def calibrate() -> None:
    """Fit compute efficiency and diversity by trying all pairs, and print the best of each diversity."""
    shipped = (GPT_OSS_A100.efficiency.compute, GPT_OSS_A100.diversity)
    best = min(product(COMPUTE, DIVERSITY), key=lambda pair: error(*pair))
    print("Root mean square of log(simulated / published) over the medians of the rows with interactive traffic alone")
    print(f"  shipped: compute {shipped[0]:g}, diversity {shipped[1]:g}: {error(*shipped):.3f}")
    print(f"  fitted again: compute {best[0]:g}, diversity {best[1]:g}: {error(*best):.3f}")
    for diversity in DIVERSITY:
        compute = min(COMPUTE, key=lambda compute: error(compute, diversity))
        print(f"  diversity {diversity:g}: compute {compute:g}: {error(compute, diversity):.3f}")


def check(*, is_quick: bool) -> list[dict[str, object]]:
    """Print simulated beside published for the rows of the calibration and for all others."""
    rows, found = [], []
    for is_fit, published in ((True, CALIBRATION), (False, CHECKS)):
        for row in published:
            cycles = 1 if is_quick or row.scenario == "S0" else 4
            protocol = Protocol(burst_rate=row.burst_rate, cycles=cycles, warmup_cycles=cycles // 4)
            ours = simulated(row, GPT_OSS_A100, protocol)
            theirs = (*row.ttft, *row.itl)
            rows.append(
                (*_name(row, is_fit=is_fit), *(_cell(o, t) for o, t in zip(ours, theirs, strict=True)), row.note)
            )
            found.append({"row": _name(row, is_fit=is_fit), "published": theirs, "simulated": ours})
    print("\nStep times against published rows: published > simulated (error), ms; p95 and p99 interpolated as theirs")
    columns = ("date", "scenario", "replicas", "burst", "used", *COLUMNS, "")
    print_table(columns, rows, right=COLUMNS)
    return found


def _name(row: Published, *, is_fit: bool) -> tuple[str, ...]:
    return row.date, row.scenario, str(row.replicas), f"{row.burst_rate:g}/s", "medians" if is_fit else "no"


def _cell(ours: float, theirs: float | None) -> str:
    return f"- > {ours:.0f}" if theirs is None else f"{theirs:g} > {ours:.0f} ({ours / theirs - 1:+.0%})"
