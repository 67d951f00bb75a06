"""Jobs, items, claims and results: the values that travel between submitters, Redis and workers.

Payloads in Redis are JSON of these models with a `version`. Times are Unix seconds by the Redis server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class JobState(StrEnum):
    """Where a job stands: OpenAI's batch states, and `paused`. Each member says who moves it on."""

    VALIDATING = "validating"
    """Lines are still being taken in, and those that are in may run already; the job's end mark moves it on."""
    IN_PROGRESS = "in_progress"
    """Items wait or are leased; the last finish moves it on, or pause, cancel, the deadline."""
    PAUSED = "paused"
    """Nothing is claimed; leased items finish; `resume` moves it on."""
    FINALIZING = "finalizing"
    """The deadline passed: nothing new is claimed, and what is left gets its error result; `reap` moves it on."""
    COMPLETED = "completed"
    FAILED = "failed"
    """No line of it could be taken."""
    EXPIRED = "expired"
    """The deadline passed; what was done is kept."""
    CANCELLING = "cancelling"
    """Nothing new is claimed, what waits gets its error result, leased items finish or are let go at the next
    heartbeat; the last of them moves it on."""
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """True in the four states that nothing leaves (but `redrive`, from completed)."""
        return self in {JobState.COMPLETED, JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED}


class ItemState(StrEnum):
    """Where an item stands."""

    WAITING = "waiting"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Outlook(StrEnum):
    """Whether a job will meet its deadline, as a worker saw it last."""

    YES = "yes"
    AT_RISK = "at_risk"
    """Not with what goes before it or beside it."""
    NO = "no"
    """Not even alone."""
    UNKNOWN = "unknown"
    """No rate was measured: nothing is promised."""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1


class RequestCounts(_Wire):
    """Items of a job by state; the sum of all but `total` is `total`."""

    total: int = 0
    waiting: int = 0
    leased: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def done(self) -> int:
        """Items that have their result."""
        return self.succeeded + self.failed + self.cancelled + self.expired


class Job(_Wire):
    """A job as `ballast job` shows it."""

    id: str
    tenant: str
    priority: int = 0
    state: JobState
    created: float
    deadline: float | None = None
    finished: float | None = None
    counts: RequestCounts = RequestCounts()
    delayed: int = 0
    """Of those that wait: items whose next attempt comes after a pause."""
    tokens_in: int = 0
    tokens_out: int = 0
    output_left: int = 0
    """Tokens that what is left of it will generate, about; 0 where nothing is known of it."""
    outlook: Outlook | None = None
    """None: it has no deadline, or no worker has looked at it yet."""
    because: str = ""
    """The outlook as a sentence, with its figures."""
    appraised: float | None = None
    """When the outlook was said."""
    reason: str = ""
    """Why it failed or expired: a sentence."""

    @property
    def is_at_risk(self) -> bool:
        """True while it runs and will miss its deadline at the present rates."""
        return not self.state.is_over and self.outlook in {Outlook.AT_RISK, Outlook.NO}


class Prefix(_Wire):
    """What an attempt generated before its item was given back."""

    token_ids: tuple[int, ...] = ()
    seed: int = 0
    model_revision: str = ""
    """A worker whose revision differs discards the prefix."""
    num_computed: int = 0
    """Tokens of prompt and answer that earlier attempts computed. Last, because the queue's functions rewrite it."""


ENOUGH_SUCCEEDED = 8
"""Results after which the mean of what they generated says more than the limits that the requests state."""


def output_left(remaining: int, *, stored: int, asked: int | None, succeeded: int, generated: int) -> int:
    """Estimate the tokens that `remaining` items will generate: so many times the mean, of results or of limits.

    `asked` sums the limits of the `stored` items, None where one states none. 0: nothing is known.
    """
    if succeeded >= ENOUGH_SUCCEEDED or (succeeded and asked is None):
        return round(remaining * generated / succeeded)
    return round(remaining * asked / stored) if asked and stored else 0


Lease = tuple[str, int, int]
"""Names one claim of one item: job id, index, fencing token."""


class Claimed(_Wire):
    """One item under lease."""

    job_id: str
    index: int
    """Position of the item in its job, from 0; with `job_id` its identity."""
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]
    tenant: str
    priority: int = 0
    attempt: int = Field(default=1, ge=1)
    token: int
    """Fencing token: larger than that of every earlier lease of this item."""
    expires: float
    seed: int
    """The body's own, or drawn from job and index, so that every attempt samples the same."""
    prefix: Prefix | None = None

    @property
    def lease(self) -> Lease:
        """What a heartbeat names."""
        return (self.job_id, self.index, self.token)


class Result(_Wire):
    """The one visible outcome of an item, in the shape of OpenAI's batch output line."""

    custom_id: str
    status_code: int
    """200 with `body`, else the HTTP status that an online client would have got."""
    body: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    """`{"code": ..., "message": ...}`; None on success."""
    tokens_in: int = 0
    tokens_out: int = 0
    worker: str = ""

    def as_openai(self, job_id: str) -> dict[str, Any]:
        """The line of OpenAI's batch output file."""
        response = None
        if self.error is None or self.body is not None:
            response = {"status_code": self.status_code, "request_id": f"{job_id}:{self.custom_id}", "body": self.body}
        return {
            "id": f"batch_req_{job_id}_{self.custom_id}",
            "custom_id": self.custom_id,
            "response": response,
            "error": self.error,
        }


class DeadLetter(_Wire):
    """An item whose attempts are spent, or that no attempt can serve; `redrive` puts it back."""

    job_id: str
    index: int
    custom_id: str
    attempts: int
    code: str
    message: str
    worker: str = ""
    """Who held it last."""
    is_retryable: bool = True
    """False: no attempt can serve it, as the request itself is wrong."""
    at: float
    """When it was given up."""


@dataclass(frozen=True, slots=True)
class JobHead:
    """What the claim's decision needs of one job that has claimable items."""

    job_id: str
    tenant: str
    priority: int
    created: float
    deadline: float | None
    waiting: int
    """Items that could be claimed now."""
    remaining: int
    """Items without a result."""
    leased: int
    output_left: int = 0
    """As `Job.output_left`."""
    prefix_key: int = 0


@dataclass(frozen=True, slots=True)
class Redriven:
    """What `redrive` did."""

    returned: int
    """Items that wait again."""
    left: int
    """Dead letters that no attempt can serve."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What `submit` did."""

    job_id: str
    accepted: int
    rejected: int
    """Lines that became an error result at once."""
    is_new: bool
    """False: the idempotency key was known. Lines that were stored before are not stored again."""
