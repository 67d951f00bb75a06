"""The points of a run's pictures: few enough to send from one process to another."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_sim.replay.simulation import Run

MOST_POINTS = 400


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Latencies and slots of one run without its warm-up."""

    ttft: tuple[float, ...] = ()
    """Evenly spaced quantiles, in seconds."""
    times: tuple[float, ...] = ()
    """Middle of each interval, in seconds since the run began."""
    online_slots: tuple[float, ...] = ()
    """Mean slots held by online in each interval, over all replicas."""
    offline_slots: tuple[float, ...] = ()


NOTHING = ChartSeries()


def series(run: Run) -> ChartSeries:
    """Return at most `MOST_POINTS` points of each series of a run."""
    start, end = run.scenario.warmup_seconds, run.seconds
    waits = sorted(
        min(item.first_token, end) - item.request.arrival for item in run.online if item.request.arrival >= start
    )
    every = max(1, -(-len(waits) // MOST_POINTS))
    width = max((end - start) / MOST_POINTS, 1e-9)
    sums = [[0.0, 0.0] for _ in range(MOST_POINTS)]
    for replica in run.replicas:
        for step in replica.steps:
            index = int((step.start - start) / width)
            if 0 <= index < MOST_POINTS:
                held = sums[index]
                held[0] += step.online_slots * step.seconds
                held[1] += step.offline_slots * step.seconds
    online, offline = ([one[kind] / width for one in sums] for kind in range(2))
    return ChartSeries(
        ttft=tuple(waits[every - 1 :: every]),
        times=tuple(start + (index + 0.5) * width for index in range(MOST_POINTS)),
        online_slots=tuple(online),
        offline_slots=tuple(offline),
    )
