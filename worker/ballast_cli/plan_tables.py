"""The tables of `ballast plan`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ballast_cli.bench.json_rows import known
from ballast_cli.bench.table import milliseconds, percent
from ballast_cli.console import print_table

if TYPE_CHECKING:
    from ballast_sim.planner.alternatives import Alternative, Chunk
    from ballast_sim.planner.batch_ceiling import BatchCeiling
    from ballast_sim.planner.fleet_plan import FleetPlan
    from ballast_sim.planner.forecast import GrowthPlan, Month
    from ballast_sim.planner.inputs import PlanInputs

_AS_STATED = ", as its config.json states"


def print_premises(inputs: PlanInputs, found: FleetPlan) -> None:
    """Print the premises of the plan."""
    deployment, shape, gpu = found.deployment, found.deployment.model.shape, found.deployment.model.gpu
    slo, weights = inputs.slo, deployment.model.quantization
    named = "bfloat16 weights" if weights == "none" else f"{weights} weights"
    named += _AS_STATED if inputs.stated(inputs.model) else ""
    sys.stdout.write(
        f"{shape.name} ({shape.parameters / 1e9:.2f} billion {named}) on {gpu.name}: "
        f"{deployment.model.rated_flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s, {gpu.memory / 1e9:g} GB, "
        f"{deployment.kv_tokens:,} tokens of KV\n"
        + (f"The counts, prices and power below are those of groups of {gpu.count} GPUs.\n" if gpu.count > 1 else "")
        + f"SLO: TTFT {slo.ttft_milliseconds:g} ms and TPOT {slo.tpot_milliseconds:g} ms "
        f"for {slo.attainment_percent:g} % of requests\n"
        f"Batch ceiling: {found.batch_ceiling} decodes ({found.batch_ceiling_because})\n"
        f"Online needs {found.traffic.tokens:,.0f} tokens/s, offline {found.offline_tokens:,.0f} tokens/s\n\n"
    )


def print_options(found: FleetPlan) -> None:
    """Print one row for each fleet that serves the traffic."""
    latency = ("TTFT met", "TPOT met")
    dollars = ("$/hour", "$/M online", "$/M offline")
    units = f"{found.deployment.model.gpu.unit}s"
    columns = ("", units, "used", "MFU", *latency, "offline tok/s", *dollars, "kW", "kWh/M", "how")
    rows = [
        (
            option.name,
            str(option.gpus),
            f"{option.utilization:.0%}",
            f"{option.mfu:.0%}",
            percent(option.ttft_attainment),
            percent(option.tpot_attainment),
            f"{option.offline_tokens:,.0f}",
            f"{option.dollars_per_hour:.2f}",
            f"{option.online_dollars:.3f}",
            f"{option.offline_dollars:.3f}",
            f"{option.kilowatts:.2f}",
            f"{option.kilowatt_hours:.4f}",
            option.note,
        )
        for option in found.options
    ]
    print_table(columns, rows, right=columns[1:-1])
    sys.stdout.write("\n")


def print_alternatives(tried: list[Alternative], sizes: list[Chunk], unit: str) -> None:
    """Print the alternatives: weights, GPUs and SLOs by the throughput of one GPU, and chunks by a simulation."""
    sys.stdout.write(f"\nAlternatives, by the throughput of one {unit} with offline work alone:\n")
    mixed = f"mixed {unit}s, about"
    columns = ("", "tok/s within TPOT", "tok/s in full batches", "kept", "$/M tokens", mixed, "$/hour")
    rows = [
        (
            one.name,
            f"{one.bound:,.0f}",
            f"{one.full:,.0f}",
            f"{one.bound / one.full:.0%}",
            f"{one.dollars:.3f}",
            str(one.gpus or "-"),
            f"{one.dollars_per_hour:.2f}" if one.gpus else "-",
        )
        for one in tried
        if not one.problem
    ]
    print_table(columns, rows, right=columns[1:])
    for one in tried:
        if one.problem:
            sys.stdout.write(f"- {one.name}: {one.problem}\n")
    if sizes:
        heads = ("chunk", "offline tok/s", "TTFT p50", "TTFT met", "TPOT met")
        lines = [
            (
                str(one.tokens),
                f"{one.offline_tokens:,.0f}",
                f"{milliseconds(one.ttft_p50)} ms",
                percent(one.ttft_attainment),
                percent(one.tpot_attainment),
            )
            for one in sizes
        ]
        print_table(heads, lines, right=heads)


def advice(found: FleetPlan, tried: list[Alternative], sizes: list[Chunk]) -> list[str]:
    """Return sentences about alternatives that do the same work for less; empty if there is none."""
    if not tried or not found.mixed:
        return []
    given, unit = tried[0], found.deployment.model.gpu.unit
    lines = []
    for what, named in (
        ("Quantize", [one for one in tried if one.name.endswith("weights")]),
        ("Right-size the GPU", [one for one in tried if one.name.endswith("instead")]),
    ):
        usable = [one for one in named if not one.problem]
        best = min(usable, key=lambda one: (one.dollars_per_hour, one.dollars), default=None)
        if best and best.dollars_per_hour < given.dollars_per_hour:  # estimates of the same kind
            lines.append(
                f"{what} ({best.name}): {best.bound / best.full:.0%} of full batches within the TPOT instead of "
                f"{given.bound / given.full:.0%}, about {best.gpus} mixed {unit}s at ${best.dollars_per_hour:.2f} an "
                f"hour instead of about {given.gpus} at ${given.dollars_per_hour:.2f}."
            )
    return lines + _chunk_advice(found, sizes)


def _chunk_advice(found: FleetPlan, sizes: list[Chunk]) -> list[str]:
    wanted = found.deployment.config.objective
    kept = [one for one in sizes if min(one.ttft_attainment, one.tpot_attainment) >= wanted]
    now = next((one for one in sizes if one.tokens == found.deployment.config.chunk_tokens), None)
    best = max(kept, key=lambda one: one.offline_tokens, default=None)
    if not now or not best:
        return []
    if best.offline_tokens < 1.02 * now.offline_tokens:
        return [f"Chunk size: none of {', '.join(str(one.tokens) for one in sizes)} does 2 % more than {now.tokens}."]
    more = best.offline_tokens / now.offline_tokens - 1
    return [f"Chunk size: {best.tokens} tokens instead of {now.tokens} do {more:.0%} more offline work within the SLO."]


def print_growth(plans: list[GrowthPlan], budget: float | None, unit: str) -> None:
    """Print one row for each way to run growing services, and then the reasons, costs and months of each way."""
    columns = ("", f"{unit}s first", f"{unit}s last", "owned", "rented", "used", "kW last", "$ in all", "power budget")
    rows = []
    for plan in plans:
        first, last = plan.months[0], plan.months[-1]
        over = plan.over_budget(budget)
        kept = "none given" if budget is None else f"over from month {over.number}" if over else "kept"
        rows.append(
            (
                plan.way.name,
                str(first.gpus),
                str(last.gpus),
                str(last.owned),
                str(last.rented),
                f"{last.utilization:.0%}",
                f"{last.kilowatts:,.1f}",
                f"{plan.dollars:,.0f}",
                kept,
            )
        )
    print_table(columns, rows, right=columns[1:-1])
    for plan in plans:
        _print_way(plan, unit)


def _print_way(plan: GrowthPlan, unit: str) -> None:
    sys.stdout.write(f"\n{plan.way.name}\n")
    for reason in plan.because:
        sys.stdout.write(f"- {reason}\n")
    costs = ("service", "a million", "$ hardware", "$ energy", "$", "kWh")
    print_table(
        costs,
        [
            (
                cost.name,
                cost.unit,
                f"{cost.hardware_dollars:.4f}",
                f"{cost.power_dollars:.4f}",
                f"{cost.dollars:.4f}",
                f"{cost.kilowatt_hours:.4f}",
            )
            for cost in plan.services
        ],
        right=costs[2:],
    )
    columns = ("month", f"{unit}s", "owned", "rented", "used", "kW", "$ hardware", "$ energy")
    print_table(columns, [_month(month) for month in plan.months], right=columns)


def _month(month: Month) -> tuple[str, ...]:
    return (
        str(month.number),
        str(month.gpus),
        str(month.owned),
        str(month.rented),
        f"{month.utilization:.0%}",
        f"{month.kilowatts:,.1f}",
        f"{month.hardware_dollars:,.0f}",
        f"{month.power_dollars:,.0f}",
    )


def print_ceiling(ceiling: BatchCeiling, tried: int, stated: str | None) -> None:
    """Print one batch ceiling with its reasons. `stated` is the quantization that the model's config.json states."""
    case = ceiling.case
    what = "answer" if case.is_encoder else "first token"
    sys.stdout.write(
        f"{case.name}: prompts of {case.prompt} tokens, {case.rate:g} requests/s, {what} within "
        f"{1e3 * case.seconds:g} ms for {case.share:.0%}\n- batch ceiling {ceiling.batch} computed, "
        f"{tried} by trying batch sizes with newcomers that are drawn one by one\n"
    )
    for reason in (*ceiling.because, *([f"{stated} weights{_AS_STATED}"] if stated else [])):
        sys.stdout.write(f"- {reason}\n")


def fleet_figures(found: FleetPlan, tried: list[Alternative], sizes: list[Chunk]) -> dict[str, Any]:
    """Return a plan for JSON. A figure that was not measured is None."""
    figures = {
        "version": 1,
        "model": found.deployment.model.shape.name,
        "gpu": found.deployment.model.gpu.name,
        "quantization": found.deployment.model.quantization,
        "inputs": found.deployment.inputs.model_dump(mode="json", by_alias=True),
        "kv_tokens": found.deployment.kv_tokens,
        "batch_ceiling": found.batch_ceiling,
        "batch_ceiling_because": found.batch_ceiling_because,
        "work_gpus": found.work,
        "online_tokens_per_s": found.traffic.tokens,
        "offline_tokens_per_s": found.offline_tokens,
        "maximum_throughputs": asdict(found.maximums),
        "options": [{**asdict(option), "kilowatt_hours": option.kilowatt_hours} for option in found.options],
        "because": list(found.because),
        "chunks": [asdict(one) for one in sizes],
        "alternatives": [asdict(one) for one in tried if not one.problem],
        "impossible": {one.name: one.problem for one in tried if one.problem},
    }
    return {key: known(value) for key, value in figures.items()}


def growth_figures(plan: GrowthPlan) -> dict[str, Any]:
    """Return the plan of one way over the months for JSON. A figure that is not finite is None."""
    months = [{**asdict(month), "dollars": month.dollars} for month in plan.months]
    services = [{**asdict(cost), "dollars": cost.dollars} for cost in plan.services]
    figures = {**asdict(plan), "dollars": plan.dollars, "months": months, "services": services}
    return {"version": 1} | {key: known(value) for key, value in figures.items()}


def ceiling_figures(ceiling: BatchCeiling, tried: int) -> dict[str, Any]:
    """Return a batch ceiling for JSON."""
    case = ceiling.case
    return {
        "version": 1,
        "name": case.name,
        "prompt_tokens": case.prompt,
        "context": case.context,
        "milliseconds": 1e3 * case.seconds,
        "percentile": 100 * case.share,
        "requests_per_second": case.rate,
        "batch_ceiling": ceiling.batch,
        "api_server_per_second": case.api_server.texts_per_second if case.api_server.text_milliseconds else None,
        "tried": tried,
        "because": list(ceiling.because),
    }
