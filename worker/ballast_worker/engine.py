"""The interface of an engine: one model that turns requests into tokens, one step at a time."""

from __future__ import annotations

from typing import Protocol

from ballast_engine.footprint import Footprint
from ballast_engine.request import GenerationRequest, Output
from ballast_engine.stats import StepRecord
from ballast_policy.snapshot import PolicyConfig
from ballast_worker.items import ItemEngine


class Engine(ItemEngine, Protocol):
    """An engine of one model.

    One thread, the engine's thread, calls `wait` and `step` and reads `last_step`. All other members are safe to use
    from any thread at any time, also during a step. None of them waits for a step to end.

    A request is in the engine from `submit` to its last output, the only output with a `finish_reason`.
    """

    # Fixed when the engine is built

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of one request, prompt and answer together."""

    @property
    def footprint(self) -> Footprint:
        """The cost of one token of the model on this machine. The first read measures it, which may take seconds."""

    # Requests

    def submit(self, request: GenerationRequest) -> None:
        """Check a request and add it to the engine. Its outputs come from later calls of `step`.

        The prompt is a tuple of at least one and fewer than `max_tokens` token ids. An answer that would exceed
        `max_tokens` is cut there, with `FinishReason.LENGTH`. If the request brings `generated` tokens, generation
        continues after them; they count as output and are not repeated in outputs.

        Raises:
            InvalidRequest: the engine can never serve the request as it is, or its id is in use. The message is a
                sentence for the user. The engine is unchanged.
        """

    def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORTED`. An id that is not in the engine is ignored."""

    # Policy

    def configure(self, policy: PolicyConfig) -> None:
        """Change the policy before a later step. `num_blocks` and `block_tokens` keep their values."""

    # Steps

    def wait(self, timeout: float) -> None:
        """Sleep until `step` has something to do, at most `timeout` seconds. A call of `submit` ends the sleep."""

    def step(self) -> list[Output]:
        """Compute one step and return its outputs, at most one for each request; none if nothing can run.

        A request with `stream` has an output for each of its tokens. A request without `stream` has an output for its
        first token, without text, and one at its end, with the whole text.

        If the computation fails, each request that took part ends with `FinishReason.FAILED` and a sentence for the
        user in `error`, and the next call goes on with the other requests.

        Raises:
            Exception: of any kind; the engine is unusable from then on.
        """

    @property
    def is_suspended(self) -> bool:
        """Whether a step is suspended for new requests. The next call of `step` resumes it."""

    @property
    def last_step(self) -> StepRecord:
        """The newest step that was computed without failure; a new object after each such step.

        Each request is among the `admissions` of exactly one record, unless it ends before it gets a slot.
        """
