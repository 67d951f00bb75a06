"""`ballast bench mixed`: compare policies on a trace at several loads, or on another workload."""

from __future__ import annotations

from pathlib import Path

from ballast_cli.bench.json_rows import as_json
from ballast_cli.bench.options import TRACE, MixedOptions, fractions, names
from ballast_cli.bench.processes import in_processes
from ballast_cli.bench.table import print_table_of
from ballast_cli.bench.workload import compare_on_workload
from ballast_cli.console import say
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.errors import Usage
from ballast_cli.sim_options import progress, require, write_json
from ballast_sim.comparison.bench import POLICIES, Bench
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.comparison.table import Table, run_table
from ballast_sim.replay.simulation import warmup_of
from ballast_sim.replay.traffic import read, read_lengths


def compare(options: MixedOptions, *, processes: int, json_file: Path | None, plot: Path | None) -> None:
    """Run the rows, print them, and write them and their pictures."""
    if options.traffic.workload != TRACE:
        options.refuse_trace_only(plot)
        compare_on_workload(options, processes=processes, json_file=json_file)
        return
    if options.traffic.every is not None:
        raise Usage("--every sets the spacing of sparse requests. Add --setting sparse.")
    if plot is not None:
        require("ballast bench", matplotlib="local")
        if plot.exists() and not plot.is_dir():
            raise Usage(f"--plot: {plot} is a file, expected a directory for several pictures.")
    rows = options.rows
    bench, engine = _bench(options)
    table = run_table(
        bench,
        policies=POLICIES if rows.policies in {None, "all"} else names(rows.policies or ""),
        loads=fractions("--load", "20,40,60" if rows.loads is None else rows.loads),
        reservations=fractions("--reservation", "0,10" if rows.reservations is None else rows.reservations),
        mapped=in_processes(processes),
        progress=progress,
    )
    if str(json_file) != "-":
        print_table_of(table, engine)
    write_json(json_file, [as_json(row, table.bench) for row in table.rows])
    if plot:
        _draw(table, plot)


def _bench(options: MixedOptions) -> tuple[Bench, BenchEngine]:
    traffic, rows = options.traffic, options.rows
    trace, lengths = read(traffic.online or ONLINE_TRACE), read_lengths(traffic.offline or OFFLINE_TRACE)
    engine = options.engine.build(trace, lengths)
    minutes = traffic.minutes or 10.0
    bench = Bench(
        trace,
        lengths,
        engine.config,
        engine.model,
        60 * minutes,
        seed=traffic.seed,
        noise=rows.noise,
        num_layers=engine.num_layers,
        warmup_seconds=warmup_of(60 * minutes),
        maximum_seconds=min(900.0, 900 * minutes),
        is_fitted=rows.is_fitted,
    )
    return bench, engine


def _draw(table: Table, directory: Path) -> None:
    from ballast_cli.bench.pictures import draw  # noqa: PLC0415  its import takes a second

    directory.mkdir(parents=True, exist_ok=True)
    for path in draw(table, directory):
        say(f"Picture: {path}")
