"""`ballast plan`: how many GPUs the traffic needs, apart and mixed, today and over months, and what tokens cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ballast_cli.console import examples, print_json, print_table, say
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.errors import CliError, Usage

if TYPE_CHECKING:
    from ballast_sim.capacity import Alternative, FleetPlan
    from ballast_sim.forecast import Outlook
    from ballast_sim.inputs import PlanInputs

EXAMPLES = examples(
    "ballast plan                                  # 8 online GPUs at 20 % and 4 offline at 30 %, mixed",
    "ballast plan --model qwen2.5-7b --gpu h100 --tpot-ms 30 --plot plan.png",
    "ballast plan --show-inputs > plan.yaml        # every figure it computes from, to be changed",
    "ballast plan --inputs plan.yaml --ahead       # services that grow over months",
)
_Trace = Annotated[
    Path,
    typer.Option(metavar="TRACE", help="Online traffic: CSV or JSONL with times.", show_default="Azure conversations"),
]
_Lengths = Annotated[
    Path,
    typer.Option(metavar="LENGTHS", help="Offline work: CSV or JSONL.", show_default="arXiv summaries"),
]
_Inputs = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="YAML", help="Figures that differ from the defaults.", show_default=False),
]
_Model = Annotated[str | None, typer.Option(help="A known name, or a model's config.json.", show_default="llama-3-8b")]
_Gpu = Annotated[str | None, typer.Option(help="a100, h100, h200, l4, or one of --inputs.", show_default="a100")]
_Weights = Annotated[
    str | None, typer.Option("--quantization", help="Weights: none, fp8, int8, int4.", show_default="none")
]
_Ttft = Annotated[float | None, typer.Option("--ttft-ms", min=0.001, help="SLO: first token.", show_default="1000")]
_Tpot = Annotated[float | None, typer.Option("--tpot-ms", min=0.001, help="SLO: each token.", show_default="50")]
_Price = Annotated[float | None, typer.Option(min=0, help="Dollars for a GPU and hour.", show_default="by GPU")]
_Ahead = Annotated[bool, typer.Option("--ahead", help="Plan the services of --inputs over months.")]
_Show = Annotated[bool, typer.Option("--show-inputs", help="Print all inputs as YAML and stop.")]
_Tries = Annotated[bool, typer.Option(help="Also try other weights, GPUs and SLOs.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.", show_default=False)]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw a picture: PNG, SVG or PDF.", show_default=False)
]


def plan(
    *,
    online: _Trace = ONLINE_TRACE,
    offline: _Lengths = OFFLINE_TRACE,
    inputs: _Inputs = None,
    model: _Model = None,
    gpu: _Gpu = None,
    quantization: _Weights = None,
    ttft: _Ttft = None,
    tpot: _Tpot = None,
    price: _Price = None,
    ahead: _Ahead = False,
    show_inputs: _Show = False,
    tries: _Tries = True,
    json_file: _Json = None,
    plot: _Plot = None,
) -> None:
    """Compute from a trace how many GPUs it needs, online and offline apart or mixed, and what a million tokens costs.

    Every figure comes from a simulation of this traffic with the policy that Ballast runs, on a roofline of the GPU.
    """
    for module, extra in (("numpy", "worker"), *((("matplotlib", "local"),) if plot else ())):
        if find_spec(module) is None:
            raise CliError(f"`ballast plan` needs {module}: pip install 'ballast[{extra}]'")
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.parent.is_dir():
            raise Usage(f"{option}: there is no directory {file.parent}: make it first.")
    with _refusals():
        figures = _inputs(inputs, model=model, gpu=gpu, quantization=quantization)
        figures = _with_options(figures, ttft=ttft, tpot=tpot, price=price)
        if show_inputs:
            sys.stdout.write(figures.dump())
        elif ahead:
            _ahead(figures, json_file, plot)
        else:
            _fleet(figures, online, offline, tries=tries, json_file=json_file, plot=plot)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what the planner refuses into a sentence and an exit code."""
    from ballast_api.errors import InvalidConfig  # noqa: PLC0415  numpy, for this verb only
    from ballast_sim.errors import IllegalPlan, Impossible, SimError  # noqa: PLC0415

    try:
        yield
    except Impossible as error:
        raise CliError(f"{error}.") from error
    except IllegalPlan as error:
        raise CliError(f"the policy broke its contract, which is a bug of Ballast: {error}") from error
    except (SimError, InvalidConfig) as error:
        raise Usage(str(error)) from error


def _inputs(path: Path | None, *, model: str | None, gpu: str | None, quantization: str | None) -> PlanInputs:
    from ballast_sim.inputs import PlanInputs  # noqa: PLC0415
    from ballast_sim.shape import Quantization  # noqa: PLC0415

    found = PlanInputs() if path is None else PlanInputs.load(path)
    names = [kind.value for kind in Quantization]
    if quantization is not None and quantization not in names:
        raise Usage(f"--quantization is {quantization!r}; known are {', '.join(names)}.")
    weights = found.quantization if quantization is None else Quantization(quantization)
    return found.model_copy(update={"model": model or found.model, "gpu": gpu or found.gpu, "quantization": weights})


def _with_options(found: PlanInputs, *, ttft: float | None, tpot: float | None, price: float | None) -> PlanInputs:
    from ballast_sim.inputs import GpuInput  # noqa: PLC0415

    given = {"ttft_milliseconds": ttft, "tpot_milliseconds": tpot}
    slo = found.slo.model_copy(update={key: value for key, value in given.items() if value is not None})
    gpus = dict(found.gpus)
    if price is not None:
        gpus[found.gpu] = gpus.get(found.gpu, GpuInput()).model_copy(update={"dollars_per_hour": price})
    return found.model_copy(update={"slo": slo, "gpus": gpus})


def _fleet(
    inputs: PlanInputs, online: Path, offline: Path, *, tries: bool, json_file: Path | None, plot: Path | None
) -> None:
    from ballast_sim.capacity import alternatives, plan_fleet  # noqa: PLC0415
    from ballast_sim.traffic import read, read_lengths  # noqa: PLC0415

    trace, lengths = read(online), read_lengths(offline)
    found = plan_fleet(inputs, trace, lengths, _progress)
    tried = alternatives(inputs, trace, lengths, _progress) if tries else []
    _print_premises(inputs, found)
    _print_options(found)
    for reason in found.because:
        sys.stdout.write(f"- {reason}\n")
    if tried:
        _print_alternatives(tried)
    if json_file:
        _write_json(json_file, _fleet_figures(found, tried))
    if plot:
        _draw_fleet(found, plot)
        say(f"Picture: {plot}")


def _print_premises(inputs: PlanInputs, found: FleetPlan) -> None:
    deployment, gpu = found.deployment, found.deployment.gpu
    slo, weights = inputs.slo, inputs.quantization
    named = "bfloat16" if weights == "none" else weights.value
    sys.stdout.write(
        f"{deployment.shape.name} ({deployment.shape.parameters / 1e9:.2f} billion {named} weights) on {gpu.name}: "
        f"{gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s, {gpu.memory / 1e9:g} GB, "
        f"{deployment.kv_tokens:,} tokens of KV\n"
        f"SLO: TTFT {slo.ttft_milliseconds:g} ms and TPOT {slo.tpot_milliseconds:g} ms "
        f"for {slo.attainment_percent:g} % of requests\n"
        f"Batch ceiling: {found.batch_ceiling} decodes ({found.batch_ceiling_because})\n"
        f"Online asks for {found.online_tokens:,.0f} tokens/s, offline for {found.offline_tokens:,.0f} tokens/s\n\n"
    )


def _print_options(found: FleetPlan) -> None:
    latency = ("TTFT met", "TPOT met")
    dollars = ("$/hour", "$/M online", "$/M offline")
    columns = ("", "GPUs", "used", "MFU", *latency, "offline tok/s", *dollars, "kW", "how")
    rows = [
        (
            option.name,
            str(option.gpus),
            f"{option.utilization:.0%}",
            f"{option.mfu:.0%}",
            f"{option.ttft_attainment:.2%}",
            f"{option.tpot_attainment:.2%}",
            f"{option.offline_tokens:,.0f}",
            f"{option.dollars_per_hour:.2f}",
            f"{option.online_dollars:.3f}",
            f"{option.offline_dollars:.3f}",
            f"{option.kilowatts:.2f}",
            option.note,
        )
        for option in found.options
    ]
    print_table(columns, rows, right=columns[1:-1])
    sys.stdout.write("\n")


def _print_alternatives(tried: list[Alternative]) -> None:
    sys.stdout.write("\nWhat else to try, by what one GPU does with offline work alone:\n")
    columns = ("", "tok/s within TPOT", "tok/s in full batches", "kept", "$/M tokens within TPOT")
    rows = [
        (one.name, f"{one.bound:,.0f}", f"{one.full:,.0f}", f"{one.bound / one.full:.0%}", f"{one.dollars:.3f}")
        for one in tried
        if not one.problem
    ]
    print_table(columns, rows, right=columns[1:])
    for one in tried:
        if one.problem:
            sys.stdout.write(f"- {one.name}: {one.problem}\n")


def _ahead(inputs: PlanInputs, json_file: Path | None, plot: Path | None) -> None:
    from ballast_sim.forecast import plan_ahead  # noqa: PLC0415

    outlooks = plan_ahead(inputs, _progress)
    budget = inputs.energy.budget_kilowatts
    columns = ("", "GPUs first", "GPUs last", "bought", "rented", "used", "kW last", "$ in all", "power budget")
    rows = []
    for outlook in outlooks:
        first, last = outlook.months[0], outlook.months[-1]
        over = outlook.over_budget(budget)
        kept = "none given" if budget is None else f"over from month {over.number}" if over else "kept"
        rows.append(
            (
                outlook.way.name,
                str(first.gpus),
                str(last.gpus),
                str(last.bought),
                str(last.rented),
                f"{last.utilization:.0%}",
                f"{last.kilowatts:,.1f}",
                f"{outlook.dollars:,.0f}",
                kept,
            )
        )
    print_table(columns, rows, right=columns[1:-1])
    for outlook in outlooks:
        _print_outlook(outlook)
    if json_file:
        _write_json(json_file, [_outlook_figures(outlook) for outlook in outlooks])
    if plot:
        _draw_ahead(outlooks, budget, plot)
        say(f"Picture: {plot}")


def _print_outlook(outlook: Outlook) -> None:
    sys.stdout.write(f"\n{outlook.way.name}\n")
    for reason in outlook.because:
        sys.stdout.write(f"- {reason}\n")
    for cost in outlook.services:
        sys.stdout.write(
            f"- {cost.name}: ${cost.dollars_per_million:.3f} and {cost.kilowatt_hours_per_million:.3f} kWh per million "
            f"{cost.unit}\n"
        )
    columns = ("month", "GPUs", "bought", "rented", "used", "kW", "$")
    rows = [
        (
            str(month.number),
            str(month.gpus),
            str(month.bought),
            str(month.rented),
            f"{month.utilization:.0%}",
            f"{month.kilowatts:,.1f}",
            f"{month.dollars:,.0f}",
        )
        for month in outlook.months
    ]
    print_table(columns, rows, right=columns)


def _fleet_figures(found: FleetPlan, tried: list[Alternative]) -> dict[str, Any]:
    return {
        "version": 1,
        "model": found.deployment.shape.name,
        "gpu": found.deployment.gpu.name,
        "inputs": found.deployment.inputs.model_dump(mode="json", by_alias=True),
        "kv_tokens": found.deployment.kv_tokens,
        "batch_ceiling": found.batch_ceiling,
        "batch_ceiling_because": found.batch_ceiling_because,
        "work_gpus": found.work,
        "online_tokens_per_s": found.online_tokens,
        "offline_tokens_per_s": found.offline_tokens,
        "ceilings": asdict(found.ceilings),
        "options": [asdict(option) for option in found.options],
        "because": list(found.because),
        "alternatives": [asdict(one) for one in tried if not one.problem],
        "impossible": {one.name: one.problem for one in tried if one.problem},
    }


def _outlook_figures(outlook: Outlook) -> dict[str, Any]:
    return {**asdict(outlook), "dollars": outlook.dollars}


def _write_json(path: Path, figures: Any) -> None:
    if str(path) == "-":
        print_json(figures)
        return
    import json  # noqa: PLC0415

    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    say(f"Figures: {path}")


def _draw_fleet(found: FleetPlan, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  a second of import, where a picture is asked for

    names = [
        f"{option.name}\n{option.gpus} GPUs".replace(", ", ",\n").replace(" on ", " on\n") for option in found.options
    ]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    online = [option.online_tokens / found.ceilings.online_full / option.gpus for option in found.options]
    offline = [option.offline_tokens / found.ceilings.offline_full / option.gpus for option in found.options]
    left.bar(names, online, label="online")
    left.bar(names, offline, bottom=online, label="offline")
    left.axhline(found.ceilings.bound_share, linestyle="--", color="gray", label="most within the TPOT")
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


def _draw_ahead(outlooks: list[Outlook], budget: float | None, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for outlook in outlooks:
        months = [month.number for month in outlook.months]
        left.step(months, [month.gpus for month in outlook.months], where="mid", label=outlook.way.name)
        right.plot(months, [month.kilowatts for month in outlook.months], label=outlook.way.name)
    if budget is not None:
        right.axhline(budget, linestyle="--", color="gray", label="power budget")
    left.set(title="GPUs", xlabel="month", yscale="log")
    right.set(title="Kilowatts at the meter", xlabel="month", yscale="log")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=150)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line} ...")
        sys.stderr.flush()
