"""Jobs as `ballast.lua` records them, and as callers see them."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_queue.functions import FIELDS, HEAD
from ballast_queue.job import Job, JobHead, JobState, Outlook, RequestCounts, output_left

SUMMED = ("total", "waiting", "leased", "succeeded", "failed", "cancelled", "expired")


def parse_record(reply: bytes) -> dict[str, str] | None:
    """Split what `read` gives for one job; None: there is no such job."""
    if not reply:
        return None
    return dict(zip(FIELDS, reply.decode().split("\x1f"), strict=True))


def counts_of(fields: Mapping[str, str]) -> RequestCounts:
    """Read the counts of a job, or their sums over the queue."""
    return RequestCounts(**{name: int(float(fields.get(name, 0))) for name in SUMMED})


def job_of(fields: Mapping[str, str]) -> Job:
    """Show a job's record as `Job`."""
    return Job(
        id=fields["id"],
        tenant=fields["tenant"],
        priority=int(fields["priority"]),
        state=JobState(fields["state"]),
        created=float(fields["created"]),
        deadline=float(fields["deadline"]) or None,
        finished=float(fields["finished"]) or None,
        counts=counts_of(fields),
        delayed=int(fields["delayed"]),
        tokens_in=int(fields["tokens_in"]),
        tokens_out=int(fields["tokens_out"]),
        output_left=_output_left(fields),
        outlook=Outlook(fields["outlook"]) if fields["outlook"] else None,
        because=fields["because"],
        appraised=float(fields["appraised"]) or None,
        reason=fields["reason"],
    )


def _output_left(fields: Mapping[str, str]) -> int:
    return output_left(
        int(fields["waiting"]) + int(fields["leased"]),
        stored=int(fields["stored"]),
        asked=None if int(fields["unbounded"]) else int(fields["asked_out"]),
        succeeded=int(fields["succeeded"]),
        generated=int(fields["tokens_out"]),
    )


def head_of(job_id: str, reply: bytes) -> JobHead:
    """Read what `heads` gives for one job."""
    fields = dict(zip(HEAD, reply.decode().split("\x1f"), strict=True))
    waiting, leased = int(fields["waiting"]), int(fields["leased"])
    return JobHead(
        job_id=job_id,
        tenant=fields["tenant"],
        priority=int(fields["priority"]),
        created=float(fields["created"]),
        deadline=float(fields["deadline"]) or None,
        waiting=waiting - int(fields["delayed"]),
        remaining=waiting + leased,
        leased=leased,
        output_left=_output_left(fields),
        prefix_key=int(fields["prefix_key"]),
    )
