"""`ballast explain`: why a resource is not ready, or a job waits, in the words of operator, workers and queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ballast_api.conditions import ConditionType
from ballast_cli.cluster import Json, Namespace, events, resource, when
from ballast_cli.connection import AsJson, PasswordFile, Place, QueueName, RedisUrl, Running, open_queue
from ballast_cli.console import examples, print_json, say
from ballast_cli.errors import CliError, NotFound, Unreachable
from ballast_cli.get import condition
from ballast_queue.errors import JobNotFound
from ballast_queue.job import Job
from ballast_worker.forecast import duration
from ballast_worker.waiting_reasons import Scene, why

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

EXAMPLES = examples(
    "ballast explain job-1f3a",
    "ballast explain chat",
    "ballast explain chat -n inference --redis-url redis://127.0.0.1:6379  # and its jobs, through a port-forward",
)
WISHED = {
    ConditionType.READY: "True",
    ConditionType.PROGRESSING: "False",
    ConditionType.DEGRADED: "False",
    ConditionType.CONFIG_APPLIED: "True",
    ConditionType.OFFLINE_RESERVATION_SATISFIED: "True",
    ConditionType.SLO_MET: "True",
    ConditionType.DEADLINE_AT_RISK: "False",
}
"""What each condition says when all is well."""
LAST_EVENTS = 8
MOST_JOBS = 5
"""Of a resource's queue."""


def explain(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An InferenceDeployment, or the id of a job.")],
    namespace: Namespace = None,
    redis_url: RedisUrl = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Say why a job waits; or why a resource is not ready, what is not as promised, and what happened to it.

    A name is looked up among the jobs where a queue is at hand (a running `ballast up`, or --redis-url), then in the
    cluster. Of a resource the jobs are explained too where --redis-url leads to its queue.
    """
    place = Place.of(redis_url, queue, password_file) if redis_url or Running.read() is not None else None
    away: Unreachable | None = None
    try:
        if place is not None and _explain_job(place, name, as_json=as_json):
            return
    except Unreachable as error:
        away = error  # a resource can be explained all the same
    found = _resource(name, namespace, place, away)
    happened = events(found)
    jobs: list[tuple[Job, list[str]]] = []
    if away is not None:
        say(f"ballast: its jobs are not explained: {away}")
    elif redis_url and place is not None:
        jobs = _jobs(place, queue or queue_of(found))
    if as_json:
        told = [{"job": job.model_dump(mode="json"), "because": because} for job, because in jobs]
        print_json({"version": 1, "resource": found, "events": happened, "jobs": told})
        return
    for line in lines(found, happened, datetime.now(UTC)):
        typer.echo(line)
    for job, because in jobs:
        typer.echo(f"  {job_line(job)}")
        for sentence in because:
            typer.echo(f"    {sentence}")


def _resource(name: str, namespace: str | None, place: Place | None, away: Unreachable | None) -> Json:
    """The resource of that name; where there is none, say of the jobs, too, why it was not found there."""
    try:
        return resource(name, namespace)
    except CliError as error:
        if away is not None:
            raise away from None
        if place is None:
            raise type(error)(f"{error}; for a job, add --redis-url and --queue") from None
        raise NotFound(f"{error}; nor is there such a job in queue {place.queue}") from None


def _explain_job(place: Place, job_id: str, *, as_json: bool) -> bool:
    """Explain the job of that id; False where there is none."""
    with open_queue(place) as connected:
        try:
            job = connected.jobs.get(job_id)
        except JobNotFound:
            return False
        because = why(job, scene(connected))
    if as_json:
        print_json({"version": 1, "queue": place.queue, "job": job.model_dump(mode="json"), "because": because})
        return True
    typer.echo(job_line(job))
    for sentence in because:
        typer.echo(f"  {sentence}")
    return True


def _jobs(place: Place, queue: str) -> list[tuple[Job, list[str]]]:
    """Jobs of a queue of which something waits, the oldest first, and why."""
    with open_queue(replace(place, queue=queue)) as connected:
        seen = scene(connected)
    waiting = sorted((job for job in seen.active if job.counts.waiting), key=lambda job: (job.created, job.id))
    return [(job, why(job, seen)) for job in waiting[:MOST_JOBS]]


def scene(queue: Queue) -> Scene:
    """Everything that tells why a job of this queue waits."""
    return Scene(
        stats=queue.stats(),
        workers=queue.workers.statuses(),
        active=queue.jobs.active(),
        held=queue.claimable.demand().held,
        settings=queue.settings.read(),
    )


def job_line(job: Job) -> str:
    """A job in one line."""
    counts = job.counts
    figures = f"{counts.done:,} of {counts.total:,} items done, {counts.leased:,} with workers, {counts.waiting:,} wait"
    return f"{job.id}: {job.state.value}, tenant {job.tenant}, priority {job.priority}; {figures}"


def queue_of(manifest: Json) -> str:
    """The queue of a resource."""
    metadata = manifest["metadata"]
    named = manifest["spec"].get("offline", {}).get("queue")
    return str(named or f"{metadata['namespace']}/{metadata['name']}")


def lines(manifest: Json, happened: list[Json], now: datetime) -> Iterator[str]:
    """The answer, what is wrong first."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    yield f"{metadata['namespace']}/{metadata['name']}: {manifest['spec']['model']['uri']}"
    seen, wanted = status.get("observedGeneration", 0), metadata.get("generation", 0)
    if metadata.get("deletionTimestamp"):
        yield f"  is being deleted since {ago(metadata['deletionTimestamp'], now)}"
    if seen < wanted:
        yield f"  The operator has not taken up generation {wanted} (last: {seen or 'none'}). Does it run?"
    reported = [(kind, condition(manifest, kind)) for kind in WISHED]
    wrong = [(kind, each) for kind, each in reported if each and each["status"] != WISHED[kind]]
    well = [(kind, each) for kind, each in reported if each and each["status"] == WISHED[kind]]
    for mark, group in (("!", wrong), (" ", well)):
        for kind, each in group:
            yield f"{mark} {kind}: {each['status']} ({each['reason']}) for {ago(each['lastTransitionTime'], now)}"
            yield f"    {each['message']}"
    scaling = status.get("scaling")
    if scaling:
        yield f"  Scaling: {scaling['replicas']} replicas, because {scaling['because']}"
    if happened:
        yield "  Last events:"
    for event in happened[-LAST_EVENTS:]:
        yield f"    {ago(when(event), now)} ago  {event['reason']}: {event['message']}"


def ago(timestamp: str, now: datetime) -> str:
    """How long since an RFC 3339 time."""
    return duration(max(0.0, (now - datetime.fromisoformat(timestamp)).total_seconds()))
