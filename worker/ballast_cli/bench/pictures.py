"""The pictures of `ballast bench`: slots over time, TTFT distributions, harvest against load."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ballast_sim.comparison.bench import Row
from ballast_sim.comparison.table import Table

_SIZE = (9.0, 4.0)
_ONLINE, _OFFLINE = "#1f77b4", "#ff9f40"
_OURS = {"color": "black", "linewidth": 2.5, "zorder": 3}
"""Style of Ballast's line."""


def draw(table: Table, directory: Path) -> list[Path]:
    """Draw one picture of harvest, and two for each load and reservation; return their paths."""
    drawn = [_harvest(table, directory / "harvest.png")]
    for load in dict.fromkeys(row.load for row in table.rows):
        for reservation in dict.fromkeys(row.reservation for row in table.rows):
            rows = table.of(load, reservation)
            name = f"load-{100 * load:g}-reservation-{100 * reservation:g}.png"
            drawn.append(_ttft(rows, table, directory / f"ttft-{name}"))
            drawn.append(_slots(rows, table, directory / f"slots-{name}"))
    return drawn


def _slots(rows: list[Row], table: Table, path: Path) -> Path:
    """Draw slots by class over time: Ballast (or the first policy) above, and online alone below."""
    chosen = [row for row in rows if row.policy == "ballast"] or rows[:1]
    alone = table.bench.alone(chosen[0].load)
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, row in zip(figure.subplots(2, 1, sharex=True), (*chosen, alone), strict=True):
        minutes = [time / 60 for time in row.series.times]
        axes.stackplot(
            minutes, row.series.online_slots, row.series.offline_slots, labels=("online", "offline"),
            colors=(_ONLINE, _OFFLINE), step="mid",
        )  # fmt: skip
        axes.set(ylabel="slots", title=f"{row.policy}, load {row.load:.0%}")
        axes.legend(loc="upper right")
    axes.set_xlabel("minutes")
    return _save(figure, path)


def _ttft(rows: list[Row], table: Table, path: Path) -> Path:
    """Draw the share of requests whose first token came within a time."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes: Axes = figure.subplots()
    for row in rows:
        waits = sorted(answer.ttft for answer in row.result.answers)
        if waits:
            shares = [(index + 1) / len(waits) for index in range(len(waits))]
            style = _OURS if row.policy == "ballast" else {"linewidth": 1.2}
            axes.step([1e3 * wait for wait in waits], shares, where="post", label=row.policy, **style)
    axes.axvline(1e3 * table.bench.config.ttft, linestyle="--", color="gray", label="SLO")
    axes.set(xscale="log", xlabel="TTFT, ms", ylabel="share of online requests", ylim=(0, 1))
    axes.set_title(f"Load {rows[0].load:.0%}, reservation {rows[0].reservation:.0%}")
    axes.legend(fontsize=8)
    return _save(figure, path)


def _harvest(table: Table, path: Path) -> Path:
    """Draw the harvest by load, with one plot for each reservation.

    Points are hollow if online loses more attainment than `Bench.keeps` allows.
    """
    reservations = list(dict.fromkeys(row.reservation for row in table.rows))
    figure = Figure(figsize=_SIZE, layout="constrained")
    plots = figure.subplots(1, len(reservations), sharey=True, squeeze=False)[0]
    for axes, reservation in zip(plots, reservations, strict=True):
        rows = [row for row in table.rows if row.reservation == reservation]
        for policy in dict.fromkeys(row.policy for row in rows):
            if policy.startswith("ballast-") or policy in {"online-only", "offline-only"}:
                continue
            of_policy = [row for row in rows if row.policy == policy]
            points = [(100 * row.load, 100 * row.offline_tokens / table.bench.unbounded) for row in of_policy]
            style = _OURS if policy == "ballast" else {"linewidth": 1.2}
            line = axes.plot(*zip(*points, strict=True), marker="o", label=policy, **style)[0]
            broken = [point for point, row in zip(points, of_policy, strict=True) if not table.bench.keeps(row)]
            if broken:
                axes.plot(
                    *zip(*broken, strict=True), marker="o", linestyle="", zorder=4,
                    markerfacecolor="white", markeredgecolor=line.get_color(),
                )  # fmt: skip
        axes.set(xlabel="online load, % of the SLO-bound throughput", title=f"reservation {reservation:.0%}")
    plots[0].set_ylabel("harvest, % of offline alone")
    figure.supxlabel("hollow: online loses more than a point of attainment", fontsize=9)
    if plots[0].lines:
        plots[0].legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
