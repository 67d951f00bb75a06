"""The published figures of llm-d's batch gateway benchmark, in milliseconds, at the burst.

Source: `benchmarks/README.md` and issue 491 of llm-d/llm-d-batch-gateway, runs of 2026-07-15 to 2026-09-18, on their
GPUs. Their script reads the deciles of guidellm and interpolates: p95 lies halfway between the 90th percentile and the
maximum, and p99 nine tenths of the way. `deciled` computes the same from simulated latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cells = tuple[float | None, float | None, float | None]
"""p50, p95 and p99; None if it is not published."""


@dataclass(frozen=True, slots=True)
class Published:
    """One published row."""

    date: str
    scenario: str
    replicas: int
    ttft: Cells
    itl: Cells
    burst_rate: float = 15.0
    batch_rate: float | None = None
    """Batch requests per second in idle phases."""
    jobs: str = ""
    """What is published of the jobs."""
    note: str = ""


CALIBRATION = (
    Published("2026-07-15", "S0", 1, (71, None, 90), (None, None, 25)),
    Published("2026-09-08", "S0", 1, (72, 92, None), (24, 24, None)),
    Published("2026-07-15", "S0", 2, (37, 76, 82), (12, 13, 13)),
    Published("2026-09-18", "S0", 2, (63, 125, 127), (17.7, 26, None), burst_rate=25),
    Published("2026-09-18", "S0", 2, (71, 131, 134), (19.6, 31, None), burst_rate=30),
    Published("2026-09-18", "S0", 2, (103, 1282, 1460), (31, 99, None), burst_rate=35),
)
"""The rows with interactive traffic alone whose number of replicas is certain."""

_TWO = "published as one replica; its latencies are those of two"
CHECKS = (
    Published("2026-07-20", "S0", 2, (33, 43, 44), (12, 12, 12), note=_TWO),
    Published("2026-07-15", "S1", 1, (None, None, 2617), (None, None, 310), batch_rate=3.96),
    Published("2026-07-15", "S1", 2, (54, 107, 116), (13, 22, 22), batch_rate=3.98),
    Published("2026-09-08", "S1", 1, (278, 597, None), (53, 66, None), note="rate of batch not published"),
    Published("2026-07-20", "S1", 2, (50, 434, 492), (23, 61, 63), batch_rate=1.0, note=_TWO),
    Published("2026-07-20", "S6", 2, (69, 92, 95), (27, 28, 29), batch_rate=2.7, jobs="20", note=_TWO),
)
"""Rows that the step times are checked against. No fit has seen them."""

GATES = (
    Published("2026-07-15", "S4", 1, (87, None, 1273), (None, None, 73), batch_rate=1.39, jobs="1,033 of 2,000"),
    Published("2026-07-15", "S7", 1, (None, None, 1941), (None, None, 82), batch_rate=1.69, jobs="1,255 of 2,100"),
    Published("2026-07-15", "S4", 2, (57, 1668, 1832), (16, 52, 56), batch_rate=3.5, jobs="2,705 of 3,000"),
    Published("2026-07-15", "S7", 2, (65, 320, 488), (18, 30, 30), batch_rate=3.86, jobs="12"),
    Published("2026-07-20", "S4", 2, (69, 271, 337), (27, 38, 39), batch_rate=4.2, jobs="2,990 in 22", note=_TWO),
)
"""Gates that this benchmark does not simulate: the table has them for comparison."""


def rows(scenario: str, replicas: int, burst_rate: float) -> list[Published]:
    """Return the published rows of a scenario."""
    asked = (scenario, replicas, burst_rate)
    every = (*CALIBRATION, *CHECKS, *GATES)
    return [row for row in every if (row.scenario, row.replicas, row.burst_rate) == asked]


def alone(row: Published) -> Published | None:
    """Return the published row with interactive traffic alone of the same run."""
    same = (row.date, row.replicas, row.burst_rate)
    found = (other for other in (*CALIBRATION, *CHECKS) if other.scenario == "S0")
    return next((other for other in found if (other.date, other.replicas, other.burst_rate) == same), None)


def deciled(latencies: Sequence[float]) -> tuple[float, float, float]:
    """Return p50, p95 and p99 as the published script computes them from deciles."""
    ordered = sorted(latencies)
    p50, p90 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9))
    rest = ordered[-1] - p90
    return p50, p90 + 0.5 * rest, p90 + 0.9 * rest
