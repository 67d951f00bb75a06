"""`ballast bench`: compare the policy with baselines, validate the simulator, and check guarantees."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ballast_cli.console import examples, print_json, say
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.errors import CliError, Usage
from ballast_cli.refusals import refusals

if TYPE_CHECKING:
    from ballast_cli.bench_workload import WorkloadOptions
    from ballast_sim.comparison.table import Table

TRACE = "trace"
"""The workload that replays a trace at several loads."""
_TRACE_ONLY = {
    "--load": "its requests have their own times",
    "--online": "it makes its own requests",
    "--plot": "the pictures show loads of a trace",
}
TENANT_TRACE = ONLINE_TRACE.with_name("vtc_arena.csv")
EXAMPLES = examples(
    "ballast bench mixed                                   # all policies at 20, 40 and 60 % online load",
    "ballast bench mixed --policy ballast,greedy --load 40 --minutes 3",
    "ballast bench mixed --gpu h100 --model qwen2.5-7b --tpot-ms 25 --json rows.json --plot pictures",
    "ballast bench mixed --online mooncake.jsonl --offline lengths.csv",
    "ballast bench mixed --setting sparse --every 0.5,2,10     # idle GPUs: a request every few seconds",
    "ballast bench mixed --setting long-prompts                # attainment by prompt length",
)
VALIDATE_EXAMPLES = examples(
    "ballast bench validate                     # five minutes on an idle machine",
    "ballast bench validate --clock cpu         # on a busy machine: processor time of the engine",
)
GUARANTEES_EXAMPLES = examples("ballast bench guarantees", "ballast bench guarantees --tenants mine.csv --minutes 2")
bench = typer.Typer(
    name="bench",
    help="Compare the policy with other policies on the same traffic, in virtual time.",
    no_args_is_help=True,
    epilog=EXAMPLES,
)

_TRACE_HELP = "Online traffic: a CSV or JSONL file with times."
_LENGTHS_HELP = "Offline work: a CSV or JSONL file with lengths."
_TTFT_HELP = "SLO of the time to the first token, in milliseconds."
_TPOT_HELP = "SLO of the mean time per token after the first, in milliseconds."
_SLOTS_HELP = "Number of slots of the engine."
_MINUTES_HELP = "Length of the traffic in each run. The first quarter (at most 1 minute) does not count."
_Trace = Annotated[Path, typer.Option(metavar="TRACE", help=_TRACE_HELP, show_default="Azure conversations")]
_Lengths = Annotated[Path, typer.Option(metavar="LENGTHS", help=_LENGTHS_HELP, show_default="arXiv summaries")]
_MixedTrace = Annotated[
    Path | None, typer.Option(metavar="TRACE", help=_TRACE_HELP, show_default="Azure conversations")
]
_MixedLengths = Annotated[
    Path | None,
    typer.Option(metavar="LENGTHS", help=_LENGTHS_HELP, show_default="arXiv summaries, or the workload's"),
]
_WorkloadName = Annotated[
    str,
    typer.Option(
        "--setting",
        metavar="NAME",
        help="Workload: trace (replays --online at each --load), sparse, long-prompts or bursts-from-silence.",
    ),
]
_Every = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS,...", help="Seconds between two requests of the workload sparse.", show_default="0.5,2,10"
    ),
]
_Model = Annotated[str, typer.Option(help="Name of a known model, or path of a model's config.json.")]
_Gpu = Annotated[str, typer.Option(help="GPU: a100, h100, h200 or l4.")]
_Load = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,...",
        help="Online load: tokens per second, in percent of the SLO-bound throughput.",
        show_default="20,40,60",
    ),
]
_Reservation = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT,...",
        help="Share of slots, KV blocks and prefill that is reserved for offline.",
        show_default="0,10; 0 with a workload other than trace",
    ),
]
_Ttft = Annotated[float, typer.Option("--ttft-ms", min=0.001, max=1e9, help=_TTFT_HELP)]
_Tpot = Annotated[float, typer.Option("--tpot-ms", min=0.001, max=1e9, help=_TPOT_HELP)]
_MixedTtft = Annotated[
    float | None,
    typer.Option("--ttft-ms", min=0.001, max=1e9, help=_TTFT_HELP, show_default="1000, or the workload's"),
]
_MixedTpot = Annotated[
    float | None, typer.Option("--tpot-ms", min=0.001, max=1e9, help=_TPOT_HELP, show_default="50, or the workload's")
]
_Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Policies to run, or all of them: all.", show_default="all, or the workload's"
    ),
]
_Seed = Annotated[int, typer.Option(min=0, help="Random seed for the step-time noise and for generated traffic.")]
_Minutes = Annotated[float, typer.Option(min=0.1, max=10_000, help=_MINUTES_HELP)]
_MixedMinutes = Annotated[
    float | None, typer.Option(min=0.1, max=10_000, help=_MINUTES_HELP, show_default="10, or the workload's")
]
_MixedSlots = Annotated[
    int | None, typer.Option(min=1, max=4096, help=_SLOTS_HELP, show_default="256, or the workload's")
]
_Slots = Annotated[int, typer.Option(min=1, max=4096, help=_SLOTS_HELP)]
_Chunk = Annotated[int, typer.Option(min=16, max=1_000_000, help="Most prefill tokens in a step.")]
_StepModel = Annotated[
    str, typer.Option(help="Step times: refit or published (llama-3-8b on a100 only), roofline, or auto.")
]
_Noise = Annotated[
    float, typer.Option(min=0, max=1, help="Noise of step times: standard deviation of their logarithm.")
]
_Fitted = Annotated[bool, typer.Option("--fitted", help="Make Ballast learn the step times during the run.")]
_Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Number of processes.", show_default="one per core")]
_Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the rows as JSON to FILE; - is stdout.", show_default=False),
]
_Plot = Annotated[Path | None, typer.Option(metavar="DIR", help="Draw pictures into DIR.", show_default=False)]
_Checkpoint = Annotated[
    Path | None,
    typer.Option("--model", help="Directory of a checkpoint.", show_default="the small model that ships with Ballast"),
]
_Clock = Annotated[str, typer.Option(help="Clock: wall, or cpu (the processor time of the engine).")]
_Share = Annotated[
    float,
    typer.Option(
        "--load", min=1, max=100, help="Online load, in percent of the maximum throughput of offline work alone."
    ),
]
_Seconds = Annotated[float, typer.Option(min=2, help="Length of each slice of the trace, in seconds.")]
_Tenants = Annotated[
    Path, typer.Option(metavar="TRACE", help="Traffic with tenants.", show_default="27 tenants of the arena trace")
]
_Turns = Annotated[int, typer.Option(min=1, help="Number of replays of each slice.")]


@bench.callback()
def _bench() -> None:
    """Compare the policy with other policies on the same traffic, in virtual time."""


@bench.command("mixed", epilog=EXAMPLES)
def mixed(
    *,
    workload_name: _WorkloadName = TRACE,
    every: _Every = None,
    online: _MixedTrace = None,
    offline: _MixedLengths = None,
    model: _Model = "llama-3-8b",
    gpu: _Gpu = "a100",
    load: _Load = None,
    reservation: _Reservation = None,
    ttft: _MixedTtft = None,
    tpot: _MixedTpot = None,
    policy: _Policy = None,
    seed: _Seed = 0,
    minutes: _MixedMinutes = None,
    slots: _MixedSlots = None,
    chunk: _Chunk = 512,
    step_model: _StepModel = "auto",
    noise: _Noise = 0.0,
    fitted: _Fitted = False,
    jobs: _Jobs = None,
    json_file: _Json = None,
    plot: _Plot = None,
) -> None:
    """Compare Ballast with other policies: online alone, GPUs apart, priorities, chunks, a rate limit and AIMD.

    Every row replays the same traffic from the same seed. A load is a share of the SLO-bound throughput: the throughput
    of one GPU with offline work alone and every step within the TPOT. With --setting, a workload other than trace
    brings its own requests and its own SLO.
    """
    _need("numpy", "worker")
    _check_json(json_file)
    processes = jobs or len(os.sched_getaffinity(0))
    if workload_name != TRACE:
        for option, value in (("--load", load), ("--online", online), ("--plot", plot)):
            if value is not None:
                reason = _TRACE_ONLY[option]
                raise Usage(f"{option} does not apply to the workload {workload_name}: {reason}. Leave it out.")
        with refusals():
            from ballast_cli.bench_workload import WorkloadOptions, spacings  # noqa: PLC0415
            from ballast_sim.replay.traffic import read_lengths  # noqa: PLC0415

            options = WorkloadOptions(
                workload_name,
                every=spacings(every) if every is not None else None,
                policies=names(policy) if policy is not None else None,
                reservations=fractions("--reservation", reservation) if reservation is not None else None,
                ttft=ttft and ttft / 1e3,
                tpot=tpot and tpot / 1e3,
                seconds=minutes and 60 * minutes,
                slots=slots,
                offline=read_lengths(offline) if offline else None,
                model=model,
                gpu=gpu,
                chunk_tokens=chunk,
                step_model=step_model,
                seed=seed,
                noise=noise,
                is_fitted=fitted,
            )
            _run_workload(options, processes, json_file)
        return
    if every is not None:
        raise Usage("--every sets the spacing of sparse requests. Add --setting sparse.")
    if plot:
        _need("matplotlib", "local")
    if plot is not None and plot.exists() and not plot.is_dir():
        raise Usage(f"--plot: {plot} is a file, expected a directory for several pictures.")
    minutes = 10.0 if minutes is None else minutes
    with refusals():
        from ballast_cli.bench_table import print_table_of  # noqa: PLC0415  numpy, for this verb only
        from ballast_sim.comparison.bench import POLICIES, Bench  # noqa: PLC0415
        from ballast_sim.comparison.engine import BenchEngine  # noqa: PLC0415
        from ballast_sim.comparison.json_rows import as_json  # noqa: PLC0415
        from ballast_sim.comparison.table import run_table  # noqa: PLC0415
        from ballast_sim.replay.traffic import read, read_lengths  # noqa: PLC0415

        trace, lengths = read(online or ONLINE_TRACE), read_lengths(offline or OFFLINE_TRACE)
        engine = BenchEngine.of(
            model=model,
            gpu=gpu,
            ttft=1.0 if ttft is None else ttft / 1e3,
            tpot=0.05 if tpot is None else tpot / 1e3,
            slots=slots or 256,
            chunk_tokens=chunk,
            online=trace,
            offline=lengths,
            step_model=step_model,
        )
        table = run_table(
            Bench(
                trace,
                lengths,
                engine.config,
                engine.model,
                60 * minutes,
                seed=seed,
                noise=noise,
                num_layers=engine.num_layers,
                warmup_seconds=min(60.0, 15 * minutes),
                maximum_seconds=min(900.0, 900 * minutes),
                is_fitted=fitted,
            ),
            policies=POLICIES if policy in {None, "all"} else names(policy or ""),
            loads=fractions("--load", "20,40,60" if load is None else load),
            reservations=fractions("--reservation", "0,10" if reservation is None else reservation),
            processes=processes,
            progress=progress,
        )
    if str(json_file) != "-":
        print_table_of(table, engine)
    if json_file:
        _write([as_json(row, table.bench) for row in table.rows], json_file)
    if plot:
        _draw(table, plot)


def _run_workload(options: WorkloadOptions, processes: int, json_file: Path | None) -> None:
    from ballast_cli.bench_workload import print_engine, print_point, rows_of, run_workload  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    for found in run_workload(options, processes=processes, progress=progress):
        if str(json_file) != "-":
            if not rows:
                print_engine(found)
            print_point(found)
        rows += rows_of(found)
    if json_file:
        _write(rows, json_file)


@bench.command("validate", epilog=VALIDATE_EXAMPLES)
def validate(
    *,
    online: _Trace = ONLINE_TRACE,
    offline: _Lengths = OFFLINE_TRACE,
    model: _Checkpoint = None,
    clock: _Clock = "wall",
    load: _Share = 15.0,
    seconds: _Seconds = 40.0,
    turns: _Turns = 2,
    slots: _Slots = 16,
    json_file: _Json = None,
) -> None:
    """Compare the simulator with the engine on this machine. The exit code is 1 if the simulator is not valid.

    The engine replays two slices of the trace. The step times of the first slice give the coefficients for the
    simulation of the second slice. Lengths are one sixteenth of those in the trace.
    """
    for module in ("numpy", "torch"):
        _need(module, "worker")
    if clock not in {"wall", "cpu"}:
        raise Usage(f"--clock is {clock!r}; expected wall or cpu.")
    _check_json(json_file)
    from ballast_cli import bench_validate  # noqa: PLC0415

    bench_validate.require_idle(clock)
    with refusals():
        from ballast_sim.replay.traffic import read, read_lengths  # noqa: PLC0415

        found = bench_validate.validate(
            bench_validate.shortened(read(online)),
            bench_validate.shortened(read_lengths(offline)),
            model=model,
            clock=clock,
            load=load / 100,
            seconds=seconds,
            turns=turns,
            slots=slots,
        )
    bench_validate.print_validation(found, clock)
    if json_file:
        bench_validate.write_validation(found, json_file)
    if not found.is_valid:
        raise typer.Exit(1)


@bench.command("guarantees", epilog=GUARANTEES_EXAMPLES)
def guarantees(
    *,
    online: _Trace = ONLINE_TRACE,
    offline: _Lengths = OFFLINE_TRACE,
    tenants: _Tenants = TENANT_TRACE,
    model: _Model = "llama-3-8b",
    gpu: _Gpu = "a100",
    ttft: _Ttft = 1000.0,
    tpot: _Tpot = 50.0,
    seed: _Seed = 0,
    minutes: _Minutes = 5.0,
    slots: _Slots = 256,
    chunk: _Chunk = 512,
    json_file: _Json = None,
) -> None:
    """Stress the reservation, the fairness of tenants, and a deadline. The exit code is 1 if a guarantee is broken."""
    _need("numpy", "worker")
    _check_json(json_file)
    with refusals():
        from ballast_cli.bench_guarantees import print_result, write_results  # noqa: PLC0415
        from ballast_sim.comparison.engine import BenchEngine  # noqa: PLC0415
        from ballast_sim.comparison.guarantee_runs import GuaranteeRuns  # noqa: PLC0415
        from ballast_sim.replay.traffic import read, read_lengths  # noqa: PLC0415

        trace, lengths = read(online), read_lengths(offline)
        engine = BenchEngine.of(
            model=model,
            gpu=gpu,
            ttft=ttft / 1e3,
            tpot=tpot / 1e3,
            slots=slots,
            chunk_tokens=chunk,
            online=trace,
            offline=lengths,
        )
        runs = GuaranteeRuns(engine.config, engine.model, trace, read(tenants), lengths, 60 * minutes, seed)
        found = []
        for run in runs.all():
            found.append(run())
            print_result(found[-1])
    if json_file:
        write_results(found, json_file)
    if not all(result.is_kept for result in found):
        raise typer.Exit(1)


def names(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Read percentages, separated by commas, as fractions of 1."""
    try:
        return tuple(float(part) / 100 for part in names(text))
    except ValueError:
        raise Usage(f"{option} is {text!r}; expected percentages, separated by commas, such as 20,40,60.") from None


def progress(done: int, number: int, what: str) -> None:
    """Print the progress on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{done} of {number}: {what}" if done < number else "\r\x1b[K")
        sys.stderr.flush()


def _need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise CliError(f"`ballast bench` needs {module}: pip install 'ballast[{extra}]'")


def _check_json(path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise Usage(f"--json: {path} is a directory, expected a file.")
    if path is not None and not path.parent.is_dir():
        raise Usage(f"--json: there is no directory {path.parent}. Create it first.")


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import json  # noqa: PLC0415

    if str(path) == "-":
        print_json(rows)
        return
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    say(f"Rows: {path}")


def _draw(table: Table, directory: Path) -> None:
    from ballast_cli.bench_pictures import draw  # noqa: PLC0415  its import takes a second

    directory.mkdir(parents=True, exist_ok=True)
    for path in draw(table, directory):
        say(f"Picture: {path}")
