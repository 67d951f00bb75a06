"""The record of one request. The engine updates it in place between two steps; a plan only reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf


class RequestClass(StrEnum):
    """Whether a person (online) or a job (offline) waits for the answer."""

    ONLINE = "online"
    OFFLINE = "offline"

    __hash__ = str.__hash__  # the hash of Enum is a call in Python


class Phase(IntEnum):
    """WAITING holds no KV; RUNNING holds KV and a slot; PARKED holds KV and no slot."""

    WAITING = 0
    RUNNING = 1
    PARKED = 2


ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
WAITING, RUNNING, PARKED = Phase.WAITING, Phase.RUNNING, Phase.PARKED
"""For hot loops: Python 3.11 takes 20 times as long to look a member up in its class."""


@dataclass(slots=True, eq=False)
class Request:
    """One request. Times are seconds on the engine's monotonic clock, sizes are tokens or blocks.

    A step may compute `num_tokens - num_computed` tokens: 1 is a decode, more is prefill, also of generated tokens.
    """

    seq: int
    """Submission order, unique in an engine; the last tie-break."""
    request_class: RequestClass
    arrival: float
    num_prompt: int
    max_output: int
    tenant: str = "default"
    priority: int = 0
    """Band within the class: higher is more important, negative is sheddable."""
    ttft: float = inf
    """SLO: seconds from arrival to the first token."""
    tpot: float = inf
    """SLO: seconds for each token after the first."""
    slack: float = inf
    """Seconds that its job could lose without risk to the deadline when it was claimed; for online see `Backlog`."""
    prefix_key: int | None = None
    """Groups requests with the same prompt prefix; None if no group is known."""
    prefix_seq: int = -1
    """`seq` of the first request of its group; its own `seq` by default."""

    phase: Phase = Phase.WAITING
    num_tokens: int = 0
    """Prompt and generated tokens known so far."""
    num_computed: int = 0
    """Tokens whose KV lies in this request's blocks."""
    num_output: int = 0
    first_token: float = inf
    """Time of its first token, from which the mean time per output token counts."""
    num_blocks: int = 0
    num_private_blocks: int = 0
    """Blocks that no other request uses: a preemption frees them."""
    num_cached: int = 0
    """Waiting: tokens that the prefix cache holds (whole blocks, fewer than `num_tokens`)."""
    num_cached_idle: int = 0
    """Waiting: those of the cached blocks that count as free until it is admitted."""
    steps_waited: int = 0
    """Steps in which it was among the first to wait and got no slot."""
    admitted: float = inf
    """Time of its first slot."""
    num_prompt_cached: int = 0
    """Prompt tokens that the prefix cache held when it got its first slot."""
    most_computed: int = 0
    """Largest `num_computed` so far: a preempted request computes the tokens below it again."""

    def __post_init__(self) -> None:
        if self.prefix_seq < 0:
            self.prefix_seq = self.seq

    @property
    def remaining(self) -> int:
        """Return the known tokens that are not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def next_deadline(self) -> float:
        """Return when its next token is due: `arrival + ttft + num_output * tpot` (inf without an SLO)."""
        first = self.arrival + self.ttft
        return first + self.num_output * self.tpot if self.num_output else first


def computed(request: Request) -> int:
    """Return the tokens that need no computing if the request takes part in the next step."""
    return request.num_cached if request.phase is WAITING else request.num_computed


def is_overdue(request: Request, now: float) -> bool:
    """Return whether its first token is missing and late."""
    return not request.num_output and request.arrival + request.ttft < now
