"""Jobs, items, leases and results: the values that submitters, Redis and workers exchange.

Payloads in Redis are JSON of these models with a `version`. Times are Unix seconds by the Redis server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST = 10**12
MOST_ACTIVE = 2000
"""Jobs that `Jobs.active` returns by default."""
LAST_DEADLINE = 1e11
"""Unix seconds that every deadline is before."""
Count = Annotated[int, AfterValidator(lambda found: min(max(found, 0), MOST))]
"""A number of items or of resources. A value in Redis may be anything, so one out of bounds becomes the bound."""


class JobState(StrEnum):
    """State of a job: OpenAI's batch states, and `paused`. Each member names what moves the job on."""

    VALIDATING = "validating"
    """Lines still arrive, and the stored ones may run already. The end of the lines, a pause, a cancel, the deadline,
    or no change for `abandonedDays` moves it on."""
    IN_PROGRESS = "in_progress"
    """Items wait or are leased. The last result, a pause, a cancel, the deadline, or no worker of its model for
    `abandonedDays` moves it on."""
    PAUSED = "paused"
    """Workers claim no item. Leased items finish. `resume`, the last result, a cancel, the deadline, or no change for
    `abandonedDays` moves it on."""
    FINALIZING = "finalizing"
    """The deadline passed, or the job was paused, open, or without a worker of its model for `abandonedDays`. The items
    that are left get their error results. `Timers.run_due` moves it on."""
    COMPLETED = "completed"
    FAILED = "failed"
    """None of its lines was accepted."""
    EXPIRED = "expired"
    """The end of `finalizing`. The finished results are kept."""
    CANCELLING = "cancelling"
    """Waiting items get their error results. Leased items finish, or end at their next heartbeat. The last item moves
    it on."""
    CANCELLED = "cancelled"

    @property
    def is_claimable(self) -> bool:
        """Whether workers claim its items."""
        return self in {JobState.VALIDATING, JobState.IN_PROGRESS}

    @property
    def is_over(self) -> bool:
        """True in the four final states. Only `redrive` leaves one: completed."""
        return self in {JobState.COMPLETED, JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED}

    @property
    def is_cut_short(self) -> bool:
        """Whether the job ended, or ends, before its last line may have arrived. It takes no lines and runs no item."""
        return self in {JobState.CANCELLING, JobState.CANCELLED, JobState.FINALIZING, JobState.EXPIRED}


class ItemState(StrEnum):
    """State of an item."""

    WAITING = "waiting"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Outlook(StrEnum):
    """Whether a job will meet its deadline, by the latest forecast of a worker."""

    YES = "yes"
    AT_RISK = "at_risk"
    """It will not, because of other work."""
    NO = "no"
    """It will not, even without other work."""
    UNKNOWN = "unknown"
    """No rate is measured yet."""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1


class RequestCounts(_Wire):
    """Items of a job by state. `total` is the sum of the others."""

    total: Count = 0
    waiting: Count = 0
    leased: Count = 0
    succeeded: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    expired: Count = 0

    @property
    def done(self) -> int:
        """Items with a result."""
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
    """Waiting items whose backoff has not ended."""
    tokens_in: int = 0
    tokens_out: int = 0
    output_left: int = 0
    """Estimated tokens that its remaining items will generate; 0 if unknown."""
    outlook: Outlook | None = None
    """None: the job has no deadline, or no worker has made a forecast yet."""
    because: str = ""
    """The reason of the outlook: a sentence with its figures."""
    appraised: float | None = None
    """When the outlook was recorded."""
    reason: str = ""
    """Why the job failed or expired, or that no worker serves its model: a sentence."""
    key: str = ""
    """Idempotency key of its submission. Empty: a job from an inbox, or submitted without one."""

    @property
    def is_at_risk(self) -> bool:
        """True if the job is not over and will miss its deadline at the current rates."""
        return not self.state.is_over and self.outlook in {Outlook.AT_RISK, Outlook.NO}


class Prefix(_Wire):
    """The tokens that an attempt generated before its worker gave the item back."""

    token_ids: tuple[int, ...] = ()
    seed: int = 0
    model_revision: str = ""
    """A worker with another revision discards the prefix."""
    num_computed: int = 0
    """Tokens of prompt and answer that earlier attempts computed. Last, because the Lua functions rewrite it."""


ENOUGH_SUCCEEDED = 8
"""Results after which their mean output predicts more than the limits that the requests state."""


def output_left(remaining: int, *, stored: int, asked: int | None, succeeded: int, generated: int) -> int:
    """Estimate the tokens that `remaining` items will generate: `remaining` times the mean of results or of limits.

    `asked` is the sum of the limits of the `stored` items, None if an item states no limit. Return 0 if unknown.
    """
    if succeeded >= ENOUGH_SUCCEEDED or (succeeded and asked is None):
        return round(remaining * generated / succeeded)
    return round(remaining * asked / stored) if asked and stored else 0


Lease = tuple[str, int, int]
"""One lease of one item: job id, index, fencing token."""


class Claimed(_Wire):
    """One item under lease."""

    job_id: str
    index: int
    """Position of the item in its job, from 0."""
    custom_id: str
    url: str
    body: dict[str, Any]
    tenant: str
    priority: int = 0
    attempt: int = Field(default=1, ge=1)
    token: int
    """Fencing token: larger than the token of every earlier lease of this item."""
    seed: int
    """The body's seed, or a hash of job and index, so that every attempt samples the same tokens."""
    prefix: Prefix | None = None

    @property
    def lease(self) -> Lease:
        """The lease of the item."""
        return (self.job_id, self.index, self.token)


class Result(_Wire):
    """The one visible outcome of an item, in the shape of OpenAI's batch output line."""

    custom_id: str
    status_code: int
    """200 with `body`, or the HTTP status that an online client would get."""
    body: dict[str, Any] | None = None
    body_text: bytes = Field(default=b"", exclude=True, repr=False)
    """The JSON text of the body of a result that is to be stored, if the body is not decoded."""
    error: dict[str, Any] | None = None
    """`{"code": ..., "message": ...}`; None on success."""
    tokens_in: int = 0
    tokens_out: int = 0
    worker: str = ""

    def as_openai(self, job_id: str) -> dict[str, Any]:
        """Return the line of OpenAI's batch output file."""
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
    """An item whose attempts are spent, or that no attempt can serve. `redrive` puts it back."""

    job_id: str
    index: int
    custom_id: str
    attempts: int
    code: str
    message: str
    worker: str = ""
    """The last worker that held it."""
    is_retryable: bool = True
    """False: no attempt can serve it, because the request itself is wrong."""
    at: float
    """When it became a dead letter."""


@dataclass(frozen=True, slots=True)
class JobHead:
    """The part of a job with claimable items that the choice of a job needs."""

    job_id: str
    tenant: str
    priority: int
    created: float
    deadline: float | None
    waiting: int
    """Items that workers can claim now."""
    remaining: int
    """Items without a result."""
    output_left: int = 0
    """See `Job.output_left`."""
    prefix_key: int = 0
    """Prefix key of its first item; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Redriven:
    """The result of a redrive."""

    returned: int
    """Items that wait again."""
    left: int
    """Dead letters that no attempt can serve."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of a submission."""

    job_id: str
    accepted: int
    rejected: int
    """Lines that became error results at once."""
    is_new: bool
    """False: the idempotency key names an existing job. Lines stored before are not stored again."""
    was_closed: bool = False
    """True: the existing job takes no more lines, so nothing was stored."""
