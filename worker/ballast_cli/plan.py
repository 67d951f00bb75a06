"""`ballast plan`: compute the GPUs that the traffic needs, apart and mixed, today and over months, and their cost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ballast_cli.connection import not_empty
from ballast_cli.console import examples, say
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.errors import CliError, Usage
from ballast_cli.refusals import refusals
from ballast_cli.sim_options import (
    Json,
    Lengths,
    Tpot,
    Ttft,
    check_output,
    require,
    show_progress,
    write_json,
)

if TYPE_CHECKING:
    from ballast_api.base import ApiModel
    from ballast_sim.planner.inputs import PlanInputs

_Section = TypeVar("_Section", bound="ApiModel")
PICTURES = (".png", ".svg", ".pdf")
EXAMPLES = examples(
    "ballast plan                                  # 8 online GPUs at 20 % and 4 offline at 30 %, mixed",
    "ballast plan --model qwen2.5-7b --gpu h100 --tpot-ms 30 --plot plan.png",
    "ballast plan --show-inputs > plan.yaml        # all inputs of a plan, to change them",
    "ballast plan --inputs plan.yaml --ahead       # services that grow over months",
    "ballast plan --model llama-3-70b --gpu h100 --tensor-parallel 8   # eight GPUs share the model",
    "ballast plan --model llama-3-70b --gpu h100 --tensor-parallel 16 --nodes 2   # and two nodes",
    "ballast plan --ceilings                       # the batch that a latency SLO allows",
)
_Inputs = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="YAML", help="Inputs that differ from the defaults.", show_default=False),
]
_Online = Annotated[
    Path | None,
    typer.Option(
        metavar="TRACE",
        help="Online traffic: a CSV or JSONL file with times. Its busiest minutes set the load, unless the inputs have "
        "fleet.onlineGpus or fleet.onlineUtilizationPercent.",
        show_default="Azure conversations",
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        help="Name of a known model, or path of a config.json of a known type.",
        show_default="llama-3-8b",
        callback=not_empty,
    ),
]
_Gpu = Annotated[
    str | None,
    typer.Option(help="GPU: a100, h100, h200, l4, or one of --inputs.", show_default="a100", callback=not_empty),
]
_Weights = Annotated[
    str | None,
    typer.Option(
        "--quantization", help="Quantization of the weights: none, fp8, int8 or int4.", show_default="as config.json"
    ),
]
_Group = Annotated[
    int | None,
    typer.Option("--tensor-parallel", min=1, max=16, help="GPUs that share the model.", show_default="1"),
]
_Nodes = Annotated[
    int | None,
    typer.Option(min=1, max=16, help="Nodes with equal parts of these GPUs.", show_default="1"),
]
_Price = Annotated[
    float | None, typer.Option(min=0, max=1e9, help="Rent of a GPU, in dollars per hour.", show_default="by GPU")
]
_Ahead = Annotated[bool, typer.Option("--ahead", help="Plan the services of the inputs over months.")]
_Ceilings = Annotated[
    bool, typer.Option("--ceilings", help="Compute the batch ceilings of the inputs: the batches that an SLO allows.")
]
_Show = Annotated[bool, typer.Option("--show-inputs", help="Print all inputs as YAML, and compute nothing.")]
_Tries = Annotated[bool, typer.Option(help="Also try other weights, GPUs, SLOs and chunks.")]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw a picture into a PNG, SVG or PDF file.", show_default=False)
]


def plan(
    *,
    online: _Online = None,
    offline: Lengths = None,
    inputs: _Inputs = None,
    model: _Model = None,
    gpu: _Gpu = None,
    quantization: _Weights = None,
    tensor_parallel: _Group = None,
    nodes: _Nodes = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    price: _Price = None,
    ahead: _Ahead = False,
    ceilings: _Ceilings = False,
    show_inputs: _Show = False,
    tries: _Tries = True,
    json_file: Json = None,
    plot: _Plot = None,
) -> None:
    """Compute the GPUs that a trace needs, with online and offline apart or mixed, and the cost of a million tokens.

    Every figure comes from a simulation of this traffic with Ballast's policy, on a roofline model of the GPU.
    """
    require("ballast plan", numpy="worker", **({"matplotlib": "local"} if plot else {}))
    check_output("--json", json_file)
    check_output("--plot", plot)
    if plot and plot.suffix.lower() not in PICTURES:
        raise Usage(f"--plot: {plot} has no known ending. Expected one of {', '.join(PICTURES)}.")
    _check_kind(ahead=ahead, ceilings=ceilings, has_traffic=bool(online or offline))
    if ceilings and plot:
        raise Usage("--plot draws a plan, and --ceilings has no picture. Use --json.")
    if show_inputs:
        if given := " and ".join(name for name, file in (("--json", json_file), ("--plot", plot)) if file):
            raise Usage(f"{given} would have no effect: --show-inputs computes nothing, and prints YAML.")
    else:
        ignored: dict[str, object] = {"--ttft-ms": ttft, "--tpot-ms": tpot} if ceilings else {}
        ignored |= {"--model": model, "--no-tries": None if tries else True} if ahead or ceilings else {}
        _refuse(ignored, "--ahead" if ahead else "--ceilings")
    with refusals():
        figures = _inputs(inputs, model=model, gpu=gpu, quantization=quantization)
        engine = _with_given(figures.engine, tensor_parallel=tensor_parallel, nodes=nodes)
        slo = _with_given(figures.slo, ttft_milliseconds=ttft, tpot_milliseconds=tpot)
        figures = _with_given(figures, engine=engine, slo=slo)
        if price is not None:
            figures = _with_price(figures, price)
        if show_inputs:
            sys.stdout.write(figures.dump())
        elif ceilings:
            _ceilings(figures, json_file)
        elif ahead:
            _ahead(figures, json_file, plot)
        else:
            _fleet(figures, online, offline, tries=tries, json_file=json_file, plot=plot)


def _check_kind(*, ahead: bool, ceilings: bool, has_traffic: bool) -> None:
    """Refuse options that do not apply to this kind of plan."""
    if ahead and ceilings:
        raise Usage("--ahead and --ceilings are different plans. Use one of them.")
    if has_traffic and (ahead or ceilings):
        kind = "--ahead" if ahead else "--ceilings"
        raise Usage(f"--online and --offline are for a plan of today. {kind} takes its requests from --inputs.")


def _refuse(ignored: dict[str, object], kind: str) -> None:
    """Refuse options that this kind of plan takes from its inputs."""
    if given := " and ".join(name for name, value in ignored.items() if value is not None):
        raise Usage(f"{given} would have no effect: {kind} plans what --inputs lists. Set it there.")


def _inputs(path: Path | None, *, model: str | None, gpu: str | None, quantization: str | None) -> PlanInputs:
    from ballast_sim.planner.inputs import PlanInputs  # noqa: PLC0415
    from ballast_sim.replay.model_shape import Quantization  # noqa: PLC0415

    found = PlanInputs() if path is None else PlanInputs.load(path)
    names = [kind.value for kind in Quantization]
    if quantization is not None and quantization not in names:
        raise Usage(f"--quantization is {quantization!r}; known are {', '.join(names)}.")
    weights = None if quantization is None else Quantization(quantization)
    return _with_given(found, model=model, gpu=gpu, quantization=weights)


def _with_given(section: _Section, **options: object) -> _Section:
    """Return a section of the inputs with the options that are given."""
    return section.model_copy(update={name: value for name, value in options.items() if value is not None})


def _with_price(found: PlanInputs, price: float) -> PlanInputs:
    from ballast_sim.planner.inputs import GpuInput  # noqa: PLC0415

    name = next((name for name in found.gpus if name.lower() == found.gpu.lower()), found.gpu)
    priced = found.gpus.get(name, GpuInput()).model_copy(update={"dollars_per_hour": price})
    return found.model_copy(update={"gpus": {**found.gpus, name: priced}})


def _fleet(
    inputs: PlanInputs,
    online: Path | None,
    offline: Path | None,
    *,
    tries: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from ballast_cli.plan_pictures import draw_fleet  # noqa: PLC0415
    from ballast_cli.plan_tables import (  # noqa: PLC0415
        advice,
        fleet_figures,
        print_alternatives,
        print_options,
        print_premises,
    )
    from ballast_sim.planner.alternatives import alternatives, chunks  # noqa: PLC0415
    from ballast_sim.planner.fleet import plan_fleet  # noqa: PLC0415
    from ballast_sim.replay.traffic import read, read_lengths  # noqa: PLC0415

    trace, lengths = read(online or ONLINE_TRACE), read_lengths(offline or OFFLINE_TRACE)
    has_own_load = online is not None and not inputs.fleet.has_online_load
    found = plan_fleet(inputs, trace, lengths, _progress, has_own_load=has_own_load)
    tried = alternatives(inputs, found, found.offline, trace, _progress) if tries else []
    sizes = chunks(found, found.mixed, found.offline) if tries and found.mixed else []
    show_progress()
    if str(json_file) != "-":
        print_premises(inputs, found)
        print_options(found)
        for reason in found.because:
            sys.stdout.write(f"- {reason}\n")
        if tried:
            print_alternatives(tried, sizes, found.deployment.model.gpu.unit)
            for line in advice(found, tried, sizes):
                sys.stdout.write(f"- {line}\n")
    write_json(json_file, fleet_figures(found, tried, sizes))
    if plot:
        draw_fleet(found, plot)
        say(f"Picture: {plot}")


def _ahead(inputs: PlanInputs, json_file: Path | None, plot: Path | None) -> None:
    from ballast_cli.plan_pictures import draw_ahead  # noqa: PLC0415
    from ballast_cli.plan_tables import growth_figures, print_growth  # noqa: PLC0415
    from ballast_sim.planner.forecast import plan_ahead  # noqa: PLC0415

    plans, unit = plan_ahead(inputs, _progress), inputs.find_device().unit
    show_progress()
    budget = inputs.energy.budget_kilowatts
    if str(json_file) != "-":
        print_growth(plans, budget, unit)
    write_json(json_file, [growth_figures(plan) for plan in plans])
    if plot:
        draw_ahead(plans, budget, plot, unit)
        say(f"Picture: {plot}")


def _ceilings(inputs: PlanInputs, json_file: Path | None) -> None:
    from ballast_cli.plan_tables import ceiling_figures, print_ceiling  # noqa: PLC0415
    from ballast_sim.errors import Impossible  # noqa: PLC0415
    from ballast_sim.planner.batch_ceiling import CeilingCase, drawn, largest  # noqa: PLC0415

    figures: list[dict[str, Any]] = []
    for asked in inputs.ceilings:
        try:
            ceiling = CeilingCase.of(inputs, asked).ceiling()
        except Impossible as error:
            say(f"{error}.")
            figures.append({"version": 1, "name": asked.name, "impossible": str(error)})
            continue
        _progress(f"trying batch sizes of {asked.name}")
        tried = largest(ceiling.case, partial(drawn, ceiling.case), near=ceiling.batch)
        show_progress()
        if str(json_file) != "-":
            print_ceiling(ceiling, tried, inputs.stated(asked.model))
        figures.append(ceiling_figures(ceiling, tried))
    if not figures:
        raise Usage("There is no ceiling to compute. Add at least one under `ceilings` in the inputs.")
    write_json(json_file, figures)
    if all("impossible" in one for one in figures):
        raise CliError("No ceiling is possible, see above.")


def _progress(line: str) -> None:
    show_progress(f"{line} ...")
