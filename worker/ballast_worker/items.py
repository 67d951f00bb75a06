"""Items between queue and engine: what the feeder needs of an engine, and how Ballast's own engine runs an item.

Another engine brings an `ItemLoop` and an `ItemReader`, and the feeder serves it in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from ballast_engine.request import GenerationRequest, Output
from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.job import Claimed, Prefix
from ballast_worker.openai import Caller, PublishedModel
from ballast_worker.responses import AnswerBuffer, ResponseFormat

if TYPE_CHECKING:
    from ballast_worker.loop import Ended


NO_PLACE = "no_place"
"""The code of a refusal of an item that this worker serves, and could not run now. The item waits in the queue."""


class ItemEngine(Protocol):
    """The part of an engine that the feeder uses, from any thread. No call waits for a step to end."""

    @property
    def policy(self) -> PolicyConfig:
        """The policy in force. `slots`, `num_blocks` and `block_tokens` are those of the engine."""

    def stats(self) -> EngineStats:
        """Return all counters. The call is cheap, and two counters may differ by one step."""

    def num_computed(self, request_id: str) -> int:
        """Return the tokens of a request computed so far, by this or an earlier attempt; 0 for an unknown id."""

    def give_back(self, request_ids: Sequence[str]) -> None:
        """End requests with `FinishReason.GIVEN_BACK`, so that another worker can continue them.

        The last output of each has all its generated tokens in `generated`, and the number of computed tokens in
        `num_computed`. Ids that are not in the engine are ignored.
        """


class ItemLoop(Protocol):
    """The part of `EngineLoop` that the feeder uses."""

    @property
    def engine(self) -> ItemEngine: ...
    @property
    def num_started(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def is_healthy(self) -> bool: ...
    def abort(self, request_id: str) -> None: ...
    def wake_feeder(self) -> None: ...
    def wait_as_feeder(self, timeout: float) -> bool: ...
    def take_ended(self) -> list[Ended]: ...


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item without an answer."""

    claimed: Claimed
    code: str
    message: str
    is_retryable: bool
    status_code: int


class PreparedItem(Protocol):
    """An item that is ready to enter the engine."""

    @property
    def seed(self) -> int:
        """The seed of its samples. A prefix is continued only under the same seed."""

    @property
    def num_requests(self) -> int:
        """The requests that the engine makes of it, without those that ended. Each of them takes a slot."""

    @property
    def has_begun(self) -> bool:
        """Whether the engine knows that a request of it has an output; False if an item is always one request."""

    @property
    def num_held_up(self) -> int:
        """The requests of it that can take no slot, while other requests can: they hold up no item behind them."""

    def submit(self) -> None:
        """Start the item. Its end comes from `ItemLoop.take_ended`.

        Raises:
            InvalidRequest: the engine can never serve it. The message is a sentence for the user.
        """

    def whole(self, answer: AnswerBuffer) -> dict[str, object] | bytes:
        """Return the body of the answer, or its JSON text."""

    def failure(self, claimed: Claimed, output: Output) -> ItemFailure:
        """Return the failure of an item that ended with `FinishReason.FAILED`."""


class ItemReader(Protocol):
    """Turns claimed items into items for one engine."""

    @property
    def revision(self) -> str:
        """The name of the weights. A prefix is continued only under the same revision."""

    def crowded(self) -> Collection[str]:
        """Return the models of which `prepare` refuses further items now, with the code `NO_PLACE`."""

    def prepare(self, request_id: str, claimed: Claimed, slack: float) -> PreparedItem:
        """Return the item, with `slack` as the slack of its job.

        Raises:
            Refused: no attempt can serve it, unless the code is `NO_PLACE`.
        """


@dataclass(frozen=True, slots=True)
class Generation:
    """An item for Ballast's own engine."""

    request: GenerationRequest
    format: ResponseFormat
    submit_request: Callable[[GenerationRequest], None]
    num_requests: ClassVar[int] = 1
    has_begun: ClassVar[bool] = False
    num_held_up: ClassVar[int] = 0

    @property
    def seed(self) -> int:
        return self.request.sampling.seed

    def submit(self) -> None:
        self.submit_request(self.request)

    def whole(self, answer: AnswerBuffer) -> dict[str, object]:
        return self.format.whole(answer)

    def failure(self, claimed: Claimed, output: Output) -> ItemFailure:
        return ItemFailure(claimed, "engine_failed", output.error, is_retryable=True, status_code=500)


@dataclass(frozen=True, slots=True)
class GenerationReader:
    """Prepares items for Ballast's own engine."""

    served: PublishedModel
    submit_request: Callable[[GenerationRequest], None]

    @property
    def revision(self) -> str:
        return self.served.revision

    def crowded(self) -> Collection[str]:
        return ()

    def prepare(self, request_id: str, claimed: Claimed, slack: float) -> Generation:
        served = self.served
        body = served.read(claimed.url, claimed.body)
        prompt = served.tokens(body)
        caller = Caller(claimed.tenant, RequestClass.OFFLINE, claimed.priority)
        request = served.request(request_id, body, prompt, caller, seed=claimed.seed)
        earlier = claimed.prefix or Prefix()
        can_continue = earlier.model_revision == served.revision and earlier.seed == request.sampling.seed
        request = replace(
            request,
            generated=earlier.token_ids if can_continue else (),
            num_computed=earlier.num_computed,
            slack=slack,
            stream=False,  # its text comes at the end
        )
        is_chat = claimed.url.endswith("/chat/completions")
        form = ResponseFormat(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{claimed.job_id}-{claimed.index}",
            created=int(time.time()),
            model=served.name,
        )
        return Generation(request, form, self.submit_request)
