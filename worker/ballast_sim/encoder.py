"""What an encoder does on one GPU: one latency SLO from arrival to answer, and the batch that it allows."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_policy.cost import attended
from ballast_sim.errors import Impossible
from ballast_sim.step_model import Roofline, Work

MOST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EncoderLimit:
    """The largest batch within the latency, and what it brings."""

    batch: int
    seconds: float
    """Of one step with that batch."""
    because: str

    @property
    def requests_per_second(self) -> float:
        """With batches always full."""
        return self.batch / self.seconds


def batch_seconds(model: Roofline, batch: int, prompt: int) -> float:
    """Time of one step over a batch of prompts."""
    return model.seconds(Work(batch * prompt, batch * attended(0, prompt), 0, 0, 0, batch))


def encoder_limit(model: Roofline, prompt: int, latency: float, most: int = MOST_BATCH) -> EncoderLimit:
    """Find the batch that the latency allows.

    A request that comes when a step has just begun waits for its end and then for its own: two steps within the SLO.

    Raises:
        Impossible: not even a batch of one fits.
    """
    one = batch_seconds(model, 1, prompt)
    if 2 * one > latency:
        raise Impossible(
            f"a latency of {1e3 * latency:g} ms is below the fastest answer: {model.shape.name} takes "
            f"{1e3 * one:.1f} ms for one prompt of {prompt} tokens on one {model.gpu.name}, and a request may wait for "
            "one such step first"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if 2 * batch_seconds(model, middle, prompt) <= latency else (low, middle - 1)
    seconds = batch_seconds(model, low, prompt)
    return EncoderLimit(
        low,
        seconds,
        f"{low} prompts of {prompt} tokens take {1e3 * seconds:.1f} ms; a newcomer waits for one step and needs "
        f"another, {2e3 * seconds:.1f} ms of {1e3 * latency:g} ms",
    )
