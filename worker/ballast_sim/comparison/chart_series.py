"""The slots of a run over time for its picture: few enough points to send from one process to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ballast_sim.replay.simulation import Run

NUM_POINTS = 400


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Slots of one run without its warm-up."""

    times: tuple[float, ...]
    """Middle of each interval, in seconds since the run began."""
    online_slots: tuple[float, ...]
    """Mean slots held by online in each interval, over all replicas."""
    offline_slots: tuple[float, ...]


def series(run: Run) -> ChartSeries:
    """Return the slots of a run in `NUM_POINTS` intervals."""
    start, end = run.scenario.warmup_seconds, run.seconds
    width = max((end - start) / NUM_POINTS, 1e-9)
    edges = start + width * np.arange(NUM_POINTS + 1)
    steps = [step for replica in run.replicas for step in replica.steps]
    starts = [step.start for step in steps]
    held = [step.online_slots * step.seconds for step in steps], [step.offline_slots * step.seconds for step in steps]
    online, offline = ((np.histogram(starts, edges, weights=each)[0] / width).tolist() for each in held)
    return ChartSeries(tuple((edges[:-1] + width / 2).tolist()), tuple(online), tuple(offline))
