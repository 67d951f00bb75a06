"""The pictures of `ballast plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ballast_sim.planner.fleet_plan import FleetPlan
    from ballast_sim.planner.forecast import GrowthPlan


def draw_fleet(found: FleetPlan, path: Path) -> None:
    """Draw the utilization and the cost of the options."""
    from matplotlib.figure import Figure  # noqa: PLC0415  its import takes a second

    unit = found.deployment.model.gpu.unit
    names = [
        f"{option.name}\n{option.gpus} {unit}s".replace(", ", ",\n").replace(" on ", " on\n")
        for option in found.options
    ]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    online = [option.online_tokens / found.maximums.online_full / option.gpus for option in found.options]
    offline = [option.offline_tokens / found.maximums.offline_full / option.gpus for option in found.options]
    left.bar(names, online, label="online")
    left.bar(names, offline, bottom=online, label="offline")
    left.axhline(found.maximums.bound_share, linestyle="--", color="gray", label="most within the TPOT")
    left.set(title="Utilization", ylim=(0, 1))
    left.legend(loc="upper left")
    places = range(len(names))
    right.bar([p - 0.2 for p in places], [o.online_dollars for o in found.options], width=0.4, label="online")
    right.bar([p + 0.2 for p in places], [o.offline_dollars for o in found.options], width=0.4, label="offline")
    right.set_xticks(list(places), names)
    right.set(title="Dollars per million tokens")
    right.legend()
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=7)
    figure.savefig(path, dpi=150)


def draw_ahead(plans: list[GrowthPlan], budget: float | None, path: Path, unit: str) -> None:
    """Draw GPUs and power over the months, with one line for each way."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for plan in plans:
        months = [month.number for month in plan.months]
        left.step(months, [month.gpus for month in plan.months], where="mid", label=plan.way.name)
        right.plot(months, [month.kilowatts for month in plan.months], label=plan.way.name)
    if budget is not None:
        right.axhline(budget, linestyle="--", color="gray", label="power budget")
    left.set(title=f"{unit}s", xlabel="month", yscale="log")
    right.set(title="Kilowatts at the meter", xlabel="month", yscale="log")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=150)
