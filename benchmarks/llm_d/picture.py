"""Draw the cycles: TTFT of the interactive requests and tokens of the jobs over time, by scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm_d.protocol import SCENARIOS, Outcome

BIN = 5
"""Seconds that one point stands for."""
MOST_MINUTES = 15


def draw(by_replicas: Sequence[Sequence[Outcome]], path: Path) -> None:
    """Draw one column for each number of replicas; bursts are shaded."""
    from matplotlib.figure import Figure  # noqa: PLC0415  a second of import, when a picture is asked for

    figure = Figure(figsize=(7 * len(by_replicas), 6.5), layout="constrained")
    panels = figure.subplots(2, len(by_replicas), squeeze=False, sharex="col", sharey="row")
    for column, outcomes in enumerate(by_replicas):
        above, below = panels[0][column], panels[1][column]
        protocol, replicas = outcomes[0].case.protocol, outcomes[0].case.replicas
        done = max((outcome.done for outcome in outcomes if not outcome.failure), default=0.0) / 60
        minutes = min(MOST_MINUTES, max(done, 3 * protocol.cycle_seconds / 60) + 0.5)
        for index, outcome in enumerate(outcomes):
            name = SCENARIOS[outcome.case.scenario]
            if outcome.case.scenario == "ballast-alone":
                continue
            if outcome.failure:
                below.plot([], [], color=f"C{index}", label=f"{name}: failed")
                continue
            starts = range(0, len(outcome.worst_ttft), BIN)
            times = [start / 60 for start in starts]
            slowest = [1e3 * max(outcome.worst_ttft[start : start + BIN]) or None for start in starts]
            tokens = [sum(outcome.offline_tokens[start : start + BIN]) / BIN for start in starts]
            style = {"color": f"C{index}", "linewidth": 2 if outcome.case.scenario == "ballast" else 1}
            above.plot(times, slowest, label=name, **style)
            if outcome.finished:
                below.plot(times, tokens, label=name, **style)
        for axes in (above, below):
            for cycle in range(int(60 * minutes / protocol.cycle_seconds) + 1):
                start = (cycle + 0.5) * protocol.cycle_seconds / 60
                axes.axvspan(start, start + protocol.phase_seconds / 60, color="grey", alpha=0.12, linewidth=0)
            axes.set_xlim(0, minutes)
        above.set_yscale("log")
        above.set_yticks((50, 100, 200, 500, 1000, 2000, 5000), minor=False)
        above.set_yticks((), minor=True)
        above.yaxis.set_major_formatter("{x:.0f}")
        above.set_title(
            f"{replicas} replica{'s' if replicas > 1 else ''}, {protocol.burst_rate:g} requests/s in bursts"
        )
        below.set_xlabel("minutes")
    slowest_of_all = max(max(o.worst_ttft, default=0.1) for outcomes in by_replicas for o in outcomes)
    panels[0][0].set_ylim(30, 1.3e3 * slowest_of_all)
    panels[0][0].set_ylabel(f"slowest TTFT in {BIN} s, ms")
    panels[1][0].set_ylabel("batch tokens per second")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120)
