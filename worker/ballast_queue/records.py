"""Convert replies of `ballast.lua` into jobs and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from ballast_queue.errors import UnreadableValue
from ballast_queue.functions import FIELDS, HEAD
from ballast_queue.job import Job, JobHead, JobState, Outlook, RequestCounts, output_left
from ballast_queue.status import QueueStats
from ballast_queue.unreadable import UNREADABLE, text_of

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)
SUMMED = ("total", "waiting", "leased", "succeeded", "failed", "cancelled", "expired")


def readable(place: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator for a function that reads a value. A failure names the place and quotes nothing."""

    def decorate(read: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(read)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return read(*args, **kwargs)
            except UNREADABLE:
                pass  # the text quotes the value
            raise UnreadableValue(place)

        return checked

    return decorate


def parse(model: type[_Model], text: bytes, place: str) -> _Model:
    """Return the model in a stored JSON text.

    Raises:
        UnreadableValue: names the place and the field, and quotes nothing.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        field = error.errors(include_input=False)[0]["loc"]
    raise UnreadableValue(place, field)


@readable("a job")
def parse_record(reply: bytes) -> dict[str, str] | None:
    """Return the fields in the reply of `read` for one job, or None if there is no such job."""
    if not reply:
        return None
    return dict(zip(FIELDS, text_of(reply).split("\x1f"), strict=True))


def whole(text: str) -> int:
    """Return a whole number that Lua wrote. It writes large ones with an exponent."""
    return int(float(text))


def counts_of(fields: Mapping[str, str]) -> RequestCounts:
    """Return the counts of a job, or their sums over the queue."""
    return RequestCounts(**{name: whole(fields.get(name, "0")) for name in SUMMED})


@readable("a job")
def job_of(fields: Mapping[str, str]) -> Job:
    """Return the job of a record."""
    return Job(
        id=fields["id"],
        tenant=fields["tenant"],
        priority=whole(fields["priority"]),
        state=JobState(fields["state"]),
        created=float(fields["created"]),
        deadline=float(fields["deadline"]) or None,
        finished=float(fields["finished"]) or None,
        counts=counts_of(fields),
        delayed=whole(fields["delayed"]),
        tokens_in=whole(fields["tokens_in"]),
        tokens_out=whole(fields["tokens_out"]),
        output_left=_output_left(fields),
        outlook=Outlook(fields["outlook"]) if fields["outlook"] else None,
        because=fields["because"],
        appraised=float(fields["appraised"]) or None,
        reason=fields["reason"],
        key=fields["key"],
    )


def _output_left(fields: Mapping[str, str]) -> int:
    return output_left(
        whole(fields["waiting"]) + whole(fields["leased"]),
        stored=whole(fields["stored"]),
        asked=None if whole(fields["unbounded"]) else whole(fields["asked_out"]),
        succeeded=whole(fields["succeeded"]),
        generated=whole(fields["tokens_out"]),
    )


@readable("a job")
def head_of(job_id: str, reply: bytes) -> JobHead:
    """Return the head of a job from the reply of `heads`."""
    fields = dict(zip(HEAD, text_of(reply).split("\x1f"), strict=True))
    waiting = whole(fields["waiting"])
    return JobHead(
        job_id=job_id,
        tenant=fields["tenant"],
        priority=whole(fields["priority"]),
        created=float(fields["created"]),
        deadline=float(fields["deadline"]) or None,
        waiting=waiting - whole(fields["delayed"]),
        remaining=waiting + whole(fields["leased"]),
        output_left=_output_left(fields),
        prefix_key=whole(fields["prefix_key"]),
    )


@readable("the figures of the queue")
def stats_of(reply: Sequence[Any]) -> QueueStats:
    """Return the figures of a queue from the reply of `stats`."""
    at, inbox, oldest, entry, pairs = reply
    totals = {text_of(name): text_of(value) for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
    since = [float(oldest)] if oldest else []
    if entry:
        since.append(int(entry.split(b"-")[0]) / 1000)
    return QueueStats(
        at=float(at),
        items=counts_of(totals),
        inbox=inbox,
        oldest_waiting_seconds=max(0.0, float(at) - min(since)) if since else 0.0,
        dead_letters=whole(totals.get("dead", "0")),
        jobs_at_risk=whole(totals.get("at_risk", "0")),
        unclaimable=whole(totals.get("unclaimable", "0")),
        unclaimable_at_risk=whole(totals.get("unclaimable_at_risk", "0")),
        is_exhausted="exhausted" in totals,
        jobs={state: whole(totals.get(f"jobs:{state}", "0")) for state in JobState},
    )
