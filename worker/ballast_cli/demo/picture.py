"""The picture of a demo: slots over time by class, and the latencies of both sides beside the SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ballast_cli.demo.report import COLUMNS
from ballast_cli.demo.run import DemoRecord

ONLINE, OFFLINE, ALONE = "#1f6feb", "#2da44e", "#8250df"


def draw(record: DemoRecord, found: dict[str, Any], path: Path) -> None:
    """Draw the picture, and write it as PNG."""
    import matplotlib as mpl  # noqa: PLC0415  its import takes a second

    mpl.use("Agg")
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.2, 1))
    _slots(figure.add_subplot(grid[0, :]), record)
    for place, name in enumerate(COLUMNS):
        _latency(figure.add_subplot(grid[1, place]), found, name=name)
    figure.suptitle(found["promise"], fontsize=11)
    figure.savefig(path, dpi=130)


def _slots(axes: Any, record: DemoRecord) -> None:
    moments = np.array(record.polls, dtype=float)
    # Half-second means: single polls are too fine to see.
    bins = np.floor(moments[:, 0] * 2).astype(int)
    times = np.unique(bins)
    means = np.array([moments[bins == one, 1:].mean(axis=0) for one in times])
    axes.stackplot(
        times / 2,
        means[:, 0],
        means[:, 1],
        labels=("online", "offline"),
        colors=(ONLINE, OFFLINE),
        alpha=0.85,
        step="post",
    )
    axes.axhline(record.plan.slots, color="black", linewidth=0.8)
    for block in record.blocks:
        if block.side == "mixed":
            axes.axvspan(block.began, block.ended, color=OFFLINE, alpha=0.08, linewidth=0)
    marks = [(block, "alone" if block.side == "online_only" else "mixed") for block in record.blocks]
    if record.warmup:
        marks.append((record.warmup, "warm-up"))
    if record.flood:
        marks.append((record.flood, "flood"))
    for block, label in marks:
        middle = (block.began + block.ended) / 2
        axes.text(middle, record.plan.slots * 1.03, label, ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, record.plan.slots * 1.15)
    axes.set_xlim(0, record.polls[-1][0])
    axes.set_ylabel(f"slots in use, of {record.plan.slots}")
    axes.set_xlabel("seconds")
    axes.legend(loc="center left", bbox_to_anchor=(0.18, 0.5), frameon=True, fontsize=8)


def _latency(axes: Any, found: dict[str, Any], *, name: str) -> None:
    """Draw how many requests take longer than a time: the tail that the SLO is about, on two log scales."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415  as in `draw`

    slo, column = found["slo"][f"{name}_ms"], COLUMNS[name]
    for side, label, colour in (("online_only", "online alone", ALONE), ("mixed", "with the offline job", OFFLINE)):
        values = np.sort([row[column] for row in found["requests"][side] if row[column] is not None])
        above = 100 * (1 - np.arange(len(values)) / len(values))
        met = f"{label}: {found[side]['attainment'][name]:.1%} meet the SLO"
        axes.step(values, above, where="pre", label=met, color=colour, linewidth=1.5)
    axes.axvline(slo, color="black", linestyle=":", linewidth=1, label=f"SLO {slo:.0f} ms")
    lost = found["attainment_lost"][name]
    interval = f"95 % interval of the loss {lost['low']:z.1f} to {lost['high']:z.1f}"
    said = "lost" if lost["points"] >= 0 else "gained"
    axes.set_title(f"{name.upper()}: {abs(lost['points']):.1f} points {said} ({interval})", fontsize=10)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # A request whose tokens all reached the client in one packet has a TPOT of almost 0. It is left of the picture.
    axes.set_xlim(left=max(0.5, min(axes.get_xlim()[0], 10)))
    axes.set_xlabel(f"online {name.upper()}, ms")
    axes.set_ylabel("% of requests that take longer")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(top=100)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
