"""The subcommands, in the order in which a new user needs them."""

from __future__ import annotations

from typing import Annotated

import typer

from ballast_cli import (
    alerts,
    explain,
    get,
    job,
    jobs,
    plan,
    queue_init,
    redrive,
    results,
    serve,
    submit,
    top,
    transitions,
    up,
    version,
)
from ballast_cli.bench import verb as bench
from ballast_cli.console import examples
from ballast_cli.demo import verb as demo
from ballast_cli.errors import EXIT_CODES
from ballast_cli.fetch import verb as fetch

app = typer.Typer(
    name="ballast",
    help="Serve online requests and offline jobs on the same GPUs. Jobs fill the slots that online requests leave.",
    epilog=examples(
        "ballast up                          # Valkey and a worker on this machine",
        "ballast submit items.jsonl --watch  # offline work, in the OpenAI batch format",
        "ballast top                         # slots by class, rates, queue",
    )
    + f"\n\n{EXIT_CODES}",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def ballast(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=version.print_and_exit)
    ] = False,
) -> None:
    """Serve online requests and offline jobs on the same GPUs."""


_LOCAL, _WORK, _STATE, _CLUSTER = "On this machine", "Offline work", "State and figures", "In a cluster"
for _name, _run, _panel, _examples in (
    ("up", up.up, _LOCAL, up.EXAMPLES),
    ("serve", serve.serve, _LOCAL, serve.EXAMPLES),
    ("demo", demo.demo, _LOCAL, demo.EXAMPLES),
    ("fetch", fetch.fetch, _LOCAL, fetch.EXAMPLES),
    ("submit", submit.submit, _WORK, submit.EXAMPLES),
    ("results", results.results, _WORK, results.EXAMPLES),
    ("cancel", transitions.cancel, _WORK, transitions.CANCEL_EXAMPLES),
    ("pause", transitions.pause, _WORK, transitions.PAUSE_EXAMPLES),
    ("resume", transitions.resume, _WORK, transitions.RESUME_EXAMPLES),
    ("redrive", redrive.redrive, _WORK, redrive.EXAMPLES),
    ("delete", transitions.delete, _WORK, transitions.DELETE_EXAMPLES),
    ("jobs", jobs.jobs, _STATE, jobs.EXAMPLES),
    ("job", job.job, _STATE, job.EXAMPLES),
    ("top", top.top, _STATE, top.EXAMPLES),
    ("plan", plan.plan, _STATE, plan.EXAMPLES),
    ("get", get.get, _CLUSTER, get.EXAMPLES),
    ("explain", explain.explain, _CLUSTER, explain.EXAMPLES),
    ("alerts", alerts.alerts, _CLUSTER, alerts.EXAMPLES),
    ("version", version.version, _STATE, version.EXAMPLES),
):
    app.command(_name, rich_help_panel=_panel, epilog=_examples)(_run)
app.add_typer(queue_init.queue, name="queue", rich_help_panel=_WORK)
app.add_typer(bench.bench, name="bench", rich_help_panel=_STATE)
