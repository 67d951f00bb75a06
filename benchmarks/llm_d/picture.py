"""Draw the cycles: TTFT of the interactive requests and tokens of the jobs over time, by scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_d.protocol import ALONE, SCENARIOS, UNSUSPENDED, Outcome

MOST_MINUTES = 15
HIDDEN = ("ballast-alone", UNSUSPENDED)
"""Scenarios without a curve, because theirs would hide others."""
MARKS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Milliseconds that the axis of TTFT may name."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One scenario. All figures are by second."""

    scenario: str
    worst_ttft: Sequence[float]
    """Of the requests that arrived in the second; 0 if none arrived."""
    offline_tokens: Sequence[int]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the picture."""

    title: str
    phase_seconds: float
    seconds: float
    """Length of the time axis."""
    curves: Sequence[Curve]
    bin: int = 5
    """Seconds that one point stands for."""


def column(outcomes: Sequence[Outcome]) -> Column:
    """Return the column of one number of replicas."""
    protocol, replicas = outcomes[0].case.protocol, outcomes[0].case.replicas
    done = max((outcome.done for outcome in outcomes if not outcome.failure), default=0.0)
    return Column(
        title=f"{replicas} replica{'s' if replicas > 1 else ''}, {protocol.burst_rate:g} requests/s in bursts",
        phase_seconds=protocol.phase_seconds,
        seconds=min(60 * MOST_MINUTES, max(done, 3 * protocol.cycle_seconds) + 30),
        curves=[
            Curve(outcome.case.scenario, outcome.worst_ttft, outcome.offline_tokens, outcome.failure)
            for outcome in outcomes
        ],
    )


def draw(columns: Sequence[Column], path: Path) -> None:
    """Draw the columns beside each other; bursts are shaded."""
    import matplotlib as mpl  # noqa: PLC0415  a second of import, when a picture is asked for
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams |= {"svg.hashsalt": "ballast", "svg.fonttype": "none"}
    figure = Figure(figsize=(max(9, 7 * len(columns)), 6.5), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row")
    for index, each in enumerate(columns):
        _draw_column(each, panels[0][index], panels[1][index])
    slowest = 1e3 * max(max(curve.worst_ttft, default=0.1) for each in columns for curve in each.curves)
    fastest = 1e3 * min(ttft for each in columns for curve in each.curves for ttft in curve.worst_ttft if ttft > 0)
    panels[0][0].set_ylim(0.8 * fastest, 1.3 * slowest)
    panels[0][0].set_yticks([mark for mark in MARKS if fastest < mark < 1.3 * slowest], minor=False)
    panels[0][0].set_ylabel(f"slowest TTFT in {columns[0].bin} s, ms")
    panels[1][0].set_ylabel("batch tokens per second")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small", frameon=False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_column(column: Column, above, below) -> None:  # noqa: ANN001  matplotlib has no types
    unit = 60 if column.seconds > 600 else 1
    for index, curve in enumerate(column.curves):
        if curve.scenario in HIDDEN:
            continue
        name = SCENARIOS[curve.scenario]
        if curve.failure:
            above.plot([], [], color=f"C{index}", label=f"{name}: failed")
            continue
        starts = range(0, len(curve.worst_ttft), column.bin)
        times = [start / unit for start in starts]
        slowest = [1e3 * max(curve.worst_ttft[start : start + column.bin]) or None for start in starts]
        tokens = [sum(curve.offline_tokens[start : start + column.bin]) / column.bin for start in starts]
        style = {"color": f"C{index}", "linewidth": 2 if curve.scenario == "ballast" else 1}
        above.plot(times, slowest, label=name, **style)
        if curve.scenario not in ALONE:
            below.plot(times, tokens, **style)
    for axes in (above, below):
        for cycle in range(int(column.seconds / column.phase_seconds / 2) + 1):
            start = (2 * cycle + 1) * column.phase_seconds / unit
            axes.axvspan(start, start + column.phase_seconds / unit, color="grey", alpha=0.12, linewidth=0)
        axes.set_xlim(0, column.seconds / unit)
    above.set_yscale("log")
    above.set_yticks((), minor=True)
    above.yaxis.set_major_formatter("{x:.0f}")
    above.set_title(column.title)
    below.set_xlabel("minutes" if unit == 60 else "seconds")
