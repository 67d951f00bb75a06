"""`ballast explain`: why a resource is not ready or a job waits, as operator, workers and queue report it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ballast_api.conditions import HEALTHY
from ballast_cli.cluster import Context, Json, Namespace, events, resource, when
from ballast_cli.connection import AsJson, CaFile, PasswordFile, Place, QueueName, RedisUrl, Running, open_queue
from ballast_cli.console import examples, print_json, printable, say
from ballast_cli.errors import CliError, NotFound, Unreachable
from ballast_cli.get import condition
from ballast_openai.errors import counted
from ballast_queue.errors import CommandForbidden, JobNotFound
from ballast_queue.job import Job
from ballast_worker.forecast import duration
from ballast_worker.waiting_reasons import Scene, why

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast explain job-1f3a",
    "ballast explain chat",
    "ballast explain chat -n inference --redis-url redis://127.0.0.1:6379  # with its jobs",
)
LAST_EVENTS = 8
MOST_JOBS = 5
"""Jobs of a resource's queue that are explained."""
FURTHER = "\n" + 8 * " "
"""Start of each further line of a message."""


def explain(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An InferenceDeployment, or the id of a job.")],
    namespace: Namespace = None,
    context: Context = None,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a job waits, or why a resource is not ready, which promises it breaks, and its last Events.

    The command first looks for a job of this name if it knows a queue (from a running `ballast up`, or --redis-url),
    then for a resource in the cluster. With --redis-url, it also explains the jobs of the resource.
    """
    place = (
        Place.of(redis_url, queue, password_file, ca_file=ca_file) if redis_url or Running.read() is not None else None
    )
    unreachable: Unreachable | None = None
    try:
        if place is not None and _explain_job(place, name, as_json=as_json):
            return
    except Unreachable as error:
        unreachable = error  # a resource needs no queue
    found = _resource(partial(resource, name, namespace, context), name, place, unreachable)
    happened = events(found, context)
    jobs: list[tuple[Job, list[str]]] = []
    try:
        # A user of the resource's queue only could not look for a job in the default queue.
        if unreachable is not None and not (queue is None and isinstance(unreachable.__cause__, CommandForbidden)):
            raise unreachable
        if redis_url and place is not None:
            # Whatever queue the environment names.
            jobs = _jobs(Place.of(redis_url, queue_of(found), password_file, ca_file=ca_file))
    except Unreachable as error:
        say(f"ballast: cannot explain the jobs of the resource: {error}")
    if as_json:
        explained = [{"job": job.model_dump(mode="json"), "because": because} for job, because in jobs]
        print_json({"version": 1, "resource": found, "events": happened, "jobs": explained})
        return
    for line in lines(found, happened, datetime.now(UTC)):
        _show(line)
    for job, because in jobs:
        _show(f"  {job_line(job)}")
        for sentence in because:
            _show(f"    {sentence}")


def _resource(read: Callable[[], Json], name: str, place: Place | None, unreachable: Unreachable | None) -> Json:
    """Return the resource of that name. If there is none, the error also covers the search among the jobs."""
    try:
        return read()
    except CliError as error:
        if unreachable is not None:
            raise unreachable from None
        if place is None:
            raise type(error)(
                f"{name!r} cannot be explained. To find a job, add --redis-url and --queue. "
                f"No resource was found: {error}"
            ) from None
        raise NotFound(f"Queue {place.queue} has no job {name!r}, and no resource was found: {error}") from None


def _explain_job(place: Place, job_id: str, *, as_json: bool) -> bool:
    """Explain the job of that id. Return False if it does not exist."""
    with open_queue(place) as connected:
        try:
            job = connected.jobs.get(job_id)
        except JobNotFound:
            return False
        because = why(job, scene(connected), place.options)
    if as_json:
        print_json({"version": 1, "queue": place.queue, "job": job.model_dump(mode="json"), "because": because})
        return True
    _show(job_line(job))
    for sentence in because:
        _show(f"  {sentence}")
    return True


def _show(text: str) -> None:
    """Write a line of this program. A message at its end controls no terminal, and its further lines are indented more
    than any line of this program.
    """
    for line in text.rstrip("\n").replace("\n", FURTHER).split("\n"):
        typer.echo(printable(line))


def _jobs(place: Place) -> list[tuple[Job, list[str]]]:
    """Return the jobs with waiting items, the oldest first, and why they wait."""
    with open_queue(place) as connected:
        seen = scene(connected)
    waiting = sorted((job for job in seen.active if job.counts.waiting), key=lambda job: (job.created, job.id))
    return [(job, why(job, seen, place.options)) for job in waiting[:MOST_JOBS]]


def scene(queue: Queue) -> Scene:
    """Return the state of a queue that explains why its jobs wait."""
    return Scene(
        stats=queue.stats(),
        workers=queue.workers.statuses(),
        active=queue.jobs.active(),
        held=queue.claimable.demand().held,
        settings=queue.settings.read(),
        is_read_only=queue.is_read_only(),
    )


def job_line(job: Job) -> str:
    """Return a job in one line."""
    counts = job.counts
    figures = f"{counts.done:,} of {counts.total:,} items done, {counts.leased:,} with workers, {counts.waiting:,} wait"
    return f"{job.id}: {job.state.value}, tenant {job.tenant}, priority {job.priority}; {figures}"


def queue_of(manifest: Json) -> str:
    """Return the queue of a resource."""
    metadata = manifest["metadata"]
    named = manifest["spec"].get("offline", {}).get("queue")
    return str(named or f"{metadata['namespace']}/{metadata['name']}")


def lines(manifest: Json, happened: list[Json], now: datetime) -> Iterator[str]:
    """Yield the explanation of a resource, problems first."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    yield f"{metadata['namespace']}/{metadata['name']}: {manifest['spec']['model']['uri']}"
    seen, wanted = status.get("observedGeneration", 0), metadata.get("generation", 0)
    if metadata.get("deletionTimestamp"):
        yield f"  has been terminating for {ago(metadata['deletionTimestamp'], now)}"
    if seen < wanted:
        yield f"  The operator has not observed generation {wanted} yet (last: {seen or 'none'}); check that it runs"
    reported = [(kind, condition(manifest, kind)) for kind in HEALTHY]
    wrong = [(kind, each) for kind, each in reported if each and each["status"] != HEALTHY[kind]]
    well = [(kind, each) for kind, each in reported if each and each["status"] == HEALTHY[kind]]
    for mark, group in (("!", wrong), (" ", well)):
        for kind, each in group:
            yield f"{mark} {kind}: {each['status']} ({each['reason']}) for {ago(each['lastTransitionTime'], now)}"
            yield f"    {each['message']}"
    scaling = status.get("scaling")
    if scaling:
        yield f"  Scaling: {counted(scaling['replicas'], 'replica')}: {scaling['because']}"
    if happened:
        yield "  Last events:"
    for event in happened[-LAST_EVENTS:]:
        yield f"    {ago(when(event), now)} ago  {event['reason']}: {event['message']}"


def ago(timestamp: str, now: datetime) -> str:
    """Return the time since an RFC 3339 timestamp."""
    return duration(max(0.0, (now - datetime.fromisoformat(timestamp)).total_seconds()))
