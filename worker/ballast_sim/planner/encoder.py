"""An encoder on one GPU: the batch that a latency SLO and a batch window allow, and the API server before the GPU."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

from ballast_sim.errors import Impossible
from ballast_sim.replay.step_model import BatchWork, Roofline

MOST_BATCH = 4096
TEXT_MILLISECONDS = 1.6
"""CPU time of vLLM's API server for a request with one text: `benchmarks/vllm_api_server.py`."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The one API server process of vLLM in a replica. It reads, tokenizes and answers the texts of both classes."""

    text_milliseconds: float = TEXT_MILLISECONDS
    """CPU time for one text; 0 sets no limit."""

    @property
    def texts_per_second(self) -> float:
        """Return the rate at which the process takes a whole core."""
        return 1e3 / self.text_milliseconds if self.text_milliseconds else inf

    def limit(self, rate: float) -> str:
        """Return a sentence if the process is slower than a GPU that computes `rate` texts per second; else ""."""
        if rate <= self.texts_per_second:
            return ""
        return (
            f"the API server process limits this, not the GPU: with {self.text_milliseconds:g} ms for each text it "
            f"serves {self.texts_per_second:,.0f} texts/s, and the GPU {rate:,.0f}"
        )


@dataclass(frozen=True, slots=True)
class EncoderLimit:
    """The largest batch within the latency."""

    batch: int
    seconds: float
    """Time of one step with that batch."""
    because: str

    @property
    def requests_per_second(self) -> float:
        """Rate with batches that are always full."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class EncoderSlo:
    """The latency that an encoder's requests are promised, and the batch window."""

    latency: float
    """Seconds from arrival to answer."""
    share: float = 0.95
    """Share of the requests that must meet the latency."""
    window: float = 0.0
    """Seconds that the first request of a batch waits for others, unless the batch is full."""


def encoder_limit(model: Roofline, prompt: int, slo: EncoderSlo, most: int = MOST_BATCH) -> EncoderLimit:
    """Compute the largest batch that the latency allows: `share * max(window, step) + step <= latency`.

    A request arrives at any moment of a step or of a window. It waits for the end of it, and then for its own step.

    Raises:
        Impossible: a batch of one misses the latency.
    """

    def step(batch: int) -> float:
        return model.predict(BatchWork.of_prompts(batch, prompt))

    def slowest(batch: int) -> float:
        return slo.share * max(slo.window, step(batch)) + step(batch)

    one = step(1)
    if slowest(1) > slo.latency:
        waits = "one such step" if one >= slo.window else f"the batch window of {1e3 * slo.window:g} ms"
        raise Impossible(
            f"a latency of {1e3 * slo.latency:g} ms is below the fastest answer: {model.shape.name} takes "
            f"{1e3 * one:.1f} ms for one prompt of {prompt} tokens on one {model.gpu.name}, and a request may wait for "
            f"{waits} first: {1e3 * slowest(1):.1f} ms for {slo.share:.0%} of them"
        )
    batch = bisect_right(range(1, most + 1), slo.latency, key=slowest)
    seconds = step(batch)
    return EncoderLimit(
        batch,
        seconds,
        f"a batch of {batch} prompts of {prompt} tokens takes {1e3 * seconds:.1f} ms; a newcomer waits for one batch "
        f"and is in the next, {1e3 * slowest(batch):.1f} ms of {1e3 * slo.latency:g} ms for {slo.share:.0%}",
    )
