"""`ballast top`: show the load of the workers of a queue."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ballast_cli.connection import AsJson, CaFile, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, printable, stdout
from ballast_cli.jobs import COLUMNS, RIGHT, row
from ballast_openai.errors import counted
from ballast_queue.job import Job
from ballast_queue.status import ClassLoad, QueueStats, WorkerStatus
from ballast_worker.forecast import duration

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast top", "ballast top --once   # once, as plain text", "ballast top --json | jq '.workers[].offline.running'"
)
_MOST_JOBS = 10


@dataclass(frozen=True, slots=True)
class View:
    """The data of one screen, read at one moment."""

    queue: str
    stats: QueueStats
    workers: tuple[WorkerStatus, ...]
    jobs: tuple[Job, ...]
    """Jobs that are not over, at most `MOST_ACTIVE`. Those that will miss their deadline come first, then the order is
    that of submission."""
    note: str = ""
    """A sentence after a space, for a queue that nothing named."""
    options: str = ""
    """The options that a command needs to find the queue, each after a space."""

    @classmethod
    def read(cls, queue: Queue, place: Place) -> View:
        """Read the view from Redis."""
        active = sorted(queue.jobs.active(), key=lambda job: (not job.is_at_risk, job.created, job.id))
        workers = tuple(sorted(queue.workers.statuses(), key=lambda worker: worker.worker_id))
        return cls(place.queue, queue.stats(), workers, tuple(active), place.note, place.options)

    def as_json(self) -> dict[str, Any]:
        """Return the view as JSON. This form is stable."""
        return {
            "version": 1,
            "queue": self.queue,
            "at": self.stats.at,
            "stats": self.stats.model_dump(mode="json"),
            "workers": [worker.model_dump(mode="json") for worker in self.workers],
            "jobs": [job.model_dump(mode="json") for job in self.jobs],
        }


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit. In a pipe, this is the default.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 1.0,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show slots by class, rates, and the queue.

    On a terminal, the view refreshes until Ctrl-C.
    """
    place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
    console = stdout()
    with open_queue(place) as connected:
        view = View.read(connected, place)
        if as_json:
            print_json(view.as_json())
        elif once or not console.is_terminal:
            for line in plain(view):
                sys.stdout.write(f"{line}\n")
        else:
            with Live(rendered(view), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(rendered(View.read(connected, place)), refresh=True)


def plain(view: View) -> list[str]:
    """Return the view as lines without color."""
    lines = [_queue_line(view)]
    if not view.workers:
        lines.append(_no_workers(view))
    for worker in view.workers:
        lines.append(_worker_line(worker))
        lines.append(f"  slots    {bar(worker, 40)}  {_slots(worker)}")
        lines.append(f"  online   {_class_line(worker.online)}{_latencies(worker)}")
        lines.append(f"  offline  {_class_line(worker.offline)}{_reservation(worker)}")
    now = view.stats.at
    lines.extend(
        f"job {job.id}  {job.tenant}  {job.state}  {job.counts.done:,}/{job.counts.total:,}  {row(job, now)[-1]}"
        for job in view.jobs[:_MOST_JOBS]
    )
    return [printable(line) for line in [*lines, *_more(view)]]


def rendered(view: View) -> RenderableType:
    """Return the view for a terminal."""
    parts: list[RenderableType] = [Text(_queue_line(view), style="bold")]
    if not view.workers:
        parts.append(Text(_no_workers(view), style="yellow"))
    for worker in view.workers:
        parts.append(Text(f"\n{_worker_line(worker)}"))
        parts.append(Text("  slots    ").append_text(_coloured(worker, 48)).append(f"  {_slots(worker)}"))
        parts.append(Text(f"  online   {_class_line(worker.online)}{_latencies(worker)}", style="cyan"))
        parts.append(Text(f"  offline  {_class_line(worker.offline)}{_reservation(worker)}", style="green"))
    if view.jobs:
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
        table.columns[0].min_width = max(len(job.id) for job in view.jobs[:_MOST_JOBS])  # users copy the id
        for job in view.jobs[:_MOST_JOBS]:
            table.add_row(*(Text(printable(cell)) for cell in row(job, view.stats.at)))  # text of tenants is no markup
        parts += [Text(""), table, *map(Text, _more(view))]
    parts.append(Text("\nCtrl-C exits.", style="dim"))
    return Group(*parts)


def _no_workers(view: View) -> str:
    note = "" if view.jobs else view.note
    return f"No worker has published its status to this queue. The state of its workers is unknown (not idle).{note}"


def _more(view: View) -> list[str]:
    """Return a line if the queue has more jobs than the view shows."""
    num_active = sum(number for state, number in view.stats.jobs.items() if not state.is_over)
    num_more = num_active - min(len(view.jobs), _MOST_JOBS)
    if num_more <= 0:
        return []
    more = counted(num_more, "more job is", "more jobs are")
    return [f"{more} not over: `ballast jobs --active{view.options}` lists all."]


def bar(worker: WorkerStatus, width: int) -> str:
    """Draw the slots: `#` online, `=` offline, `.` free."""
    online, offline = _cells(worker, width)
    return "[" + "#" * online + "=" * offline + "." * (width - online - offline) + "]"


def _coloured(worker: WorkerStatus, width: int) -> Text:
    online, offline = _cells(worker, width)
    text = Text("█" * online, style="cyan").append("█" * offline, style="green")
    return text.append("·" * (width - online - offline), style="dim")


def _cells(worker: WorkerStatus, width: int) -> tuple[int, int]:
    slots = max(1, worker.slots)
    online = min(width, round(worker.online.running * width / slots))
    offline = min(width - online, round(worker.offline.running * width / slots))
    return online, offline


def _queue_line(view: View) -> str:
    stats, items = view.stats, view.stats.items
    at_risk = f", {counted(stats.jobs_at_risk, 'job')} AT RISK" if stats.jobs_at_risk else ""
    oldest = f", oldest {duration(stats.oldest_waiting_seconds)}" if stats.oldest_waiting_seconds else ""
    return (
        f"queue {view.queue}: {stats.depth:,} waiting{oldest}, {items.leased:,} leased, {items.succeeded:,} succeeded, "
        f"{items.failed:,} failed, {counted(stats.dead_letters, 'dead letter')}{at_risk}"
    )


def _worker_line(worker: WorkerStatus) -> str:
    state = "draining" if worker.is_draining else "ready" if worker.is_ready else "not ready"
    kv = worker.kv_blocks_total - worker.kv_blocks_free
    return (
        f"worker {worker.worker_id}  {worker.model}  {worker.address}  {state}  "
        f"ceiling {worker.batch_ceiling}  KV {kv:,}/{worker.kv_blocks_total:,} blocks"
    )


def _slots(worker: WorkerStatus) -> str:
    free = worker.slots - worker.online.running - worker.offline.running
    return f"{worker.online.running} online, {worker.offline.running} offline, {free} free of {worker.slots}"


def _class_line(load: ClassLoad) -> str:
    return (
        f"{load.running} running, {load.parked} parked, {load.waiting} waiting, {load.reserved} reserved, "
        f"{load.borrowed} borrowed  {load.requests_per_second:.1f} requests/s  "
        f"prefill {load.prefill_tokens_per_second:,.0f} decode {load.decode_tokens_per_second:,.0f} tokens/s"
    )


def _reservation(worker: WorkerStatus) -> str:
    found = worker.reservation
    others = "may run" if worker.offline.waiting + worker.offline.parked else "waits"
    idle = f", no other offline request {others}" if found.is_met and found.in_use < found.slots else ""
    if found.is_met_by_tokens:
        idle = ", reserved tokens taken"
    return f"  reservation {'met' if found.is_met else 'NOT MET'}: {found.in_use} of {found.slots} slots in use{idle}"


def _latencies(worker: WorkerStatus) -> str:
    slo, known = worker.slo, []
    for name, seconds, met, judged in (
        ("TTFT", worker.ttft_p99_seconds, slo.ttft_met, slo.ttft_judged),
        ("TPOT", worker.tpot_p99_seconds, slo.tpot_met, slo.tpot_judged),
        ("latency", worker.latency_p99_seconds, slo.latency_met, slo.latency_judged),
    ):
        if seconds is not None:
            attained = f", {100 * met / judged:.1f} % met the SLO" if judged else ""
            known.append(f"{name} p99 {seconds * 1000:.1f} ms{attained}")
    return "  " + "; ".join(known) if known else ""
