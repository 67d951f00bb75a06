"""What the policy knows of one request.

The engine owns these records and updates them in place between two steps; `plan` only reads them. Nothing is copied
into the snapshot, so its cost does not grow with what a request has already produced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf


class RequestClass(StrEnum):
    """Who waits for the answer: a person (online) or a job (offline)."""

    ONLINE = "online"
    OFFLINE = "offline"

    __hash__ = str.__hash__  # not that of Enum, which is a call in Python


class Phase(IntEnum):
    """Where a request stands. WAITING holds no KV; RUNNING holds KV and a slot; PARKED holds KV and no slot."""

    WAITING = 0
    RUNNING = 1
    PARKED = 2


ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
WAITING, RUNNING, PARKED = Phase.WAITING, Phase.RUNNING, Phase.PARKED
"""For the loops of the planner: Python 3.11 takes 20 times as long to look a member up in its class."""


@dataclass(slots=True, eq=False)
class Request:
    """One request as the policy sees it. Times are seconds on the engine's monotonic clock, sizes are tokens or blocks.

    `num_tokens - num_computed` is what a step may compute of it: 1 is a decode, more is prefill (a preempted request
    prefills its prompt and what it had generated).
    """

    seq: int
    """Submission order, unique in an engine; the last tie-break."""
    request_class: RequestClass
    arrival: float
    num_prompt: int
    max_output: int
    """Tokens it may generate in all."""
    tenant: str = "default"
    priority: int = 0
    """Band within the class: higher is more important, negative is sheddable."""
    ttft: float = inf
    """SLO: seconds from arrival to the first token."""
    tpot: float = inf
    """SLO: seconds for each token after the first."""
    slack: float = inf
    """Seconds a job can still lose before its deadline is at risk, as of the claim; of online see `Backlog`."""
    prefix_key: int | None = None
    """Groups requests with the same prompt prefix; None if no group is known."""
    prefix_seq: int = -1
    """`seq` of the request that opened the group; without a group its own `seq`, which the default stands for."""

    phase: Phase = Phase.WAITING
    num_tokens: int = 0
    """Prompt and generated tokens known so far."""
    num_computed: int = 0
    """Tokens whose KV lies in this request's blocks."""
    num_output: int = 0
    first_token: float = inf
    """When its first token was there; what the mean time per output token is counted from."""
    num_blocks: int = 0
    num_private_blocks: int = 0
    """Blocks that nobody else uses: what preempting it would free."""
    num_cached: int = 0
    """Waiting: tokens the prefix cache would give on admission (whole blocks, fewer than `num_tokens`)."""
    num_cached_idle: int = 0
    """Waiting: how many of those cached blocks count as free now, and would not any more."""
    steps_waited: int = 0
    """Steps since it last held a slot while runnable."""
    admitted: float = inf
    """When it first got a slot."""
    num_prompt_cached: int = 0
    """Prompt tokens that the prefix cache gave when it first got a slot."""
    most_computed: int = 0
    """Largest `num_computed` so far: tokens below it are computed again after a preemption."""

    def __post_init__(self) -> None:
        if self.prefix_seq < 0:
            self.prefix_seq = self.seq

    @property
    def remaining(self) -> int:
        """Tokens of it still to compute."""
        return self.num_tokens - self.num_computed

    @property
    def next_deadline(self) -> float:
        """When its next token is due: `arrival + ttft + num_output * tpot` (inf without an SLO)."""
        first = self.arrival + self.ttft
        return first + self.num_output * self.tpot if self.num_output else first

    @property
    def paced_deadline(self) -> float:
        """When its next token is due so that its mean time per token holds: `first_token + num_output * tpot`."""
        return self.first_token + self.num_output * self.tpot


def computed(request: Request) -> int:
    """Give the tokens that need no computing if the request takes part in the next step."""
    return request.num_cached if request.phase is WAITING else request.num_computed


def is_overdue(request: Request, now: float) -> bool:
    """Tell whether its first token should have been there; one that had it is not overdue."""
    return not request.num_output and request.arrival + request.ttft < now
