"""Jobs as `ballast.lua` records them, and as callers see them."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_queue.functions import FIELDS
from ballast_queue.job import Job, JobHead, JobState, RequestCounts

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
        tokens_in=int(fields["tokens_in"]),
        tokens_out=int(fields["tokens_out"]),
        reason=fields["reason"],
    )


def head_of(job_id: str, reply: bytes) -> JobHead:
    """Read what `heads` gives for one job."""
    tenant, priority, created, deadline, waiting, delayed, leased, group = reply.decode().split("\x1f")
    return JobHead(
        job_id=job_id,
        tenant=tenant,
        priority=int(priority),
        created=float(created),
        deadline=float(deadline) or None,
        waiting=int(waiting) - int(delayed),
        remaining=int(waiting) + int(leased),
        leased=int(leased),
        prefix_group=int(group),
    )
