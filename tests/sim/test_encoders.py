"""An encoder's batch follows from its latency SLO, and a batch window collects what comes."""

from __future__ import annotations

import pytest
from ceilings import highest_rate, serve

from ballast_sim.errors import Impossible
from ballast_sim.planner.encoder import MOST_BATCH, EncoderSlo, batch_seconds, encoder_limit
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import SHAPES
from ballast_sim.replay.step_model import Roofline

MODEL = Roofline(SHAPES["bge-base"], GPUS["a100"])
PROMISE = EncoderSlo(latency=0.030)


def slowest(batch, promise):
    step = batch_seconds(MODEL, batch, 256)
    return promise.share * max(promise.window, step) + step


@pytest.mark.parametrize(
    "promise", [PROMISE, EncoderSlo(0.030, window=0.02), EncoderSlo(0.030, 0.99), EncoderSlo(0.100)]
)
def test_an_encoder_batch_is_the_largest_whose_wait_and_step_fit(promise):
    limit = encoder_limit(MODEL, 256, promise)

    assert slowest(limit.batch, promise) <= promise.latency < slowest(limit.batch + 1, promise)
    assert limit.batch < MOST_BATCH
    assert limit.requests_per_second == limit.batch / batch_seconds(MODEL, limit.batch, 256)


@pytest.mark.parametrize(
    ("promise", "found"),
    [
        (EncoderSlo(0.001), "a latency of 1 ms is below the fastest answer: bge-base takes .* one such step first"),
        (EncoderSlo(0.010, window=0.010), "may wait for the batch window of 10 ms first: 11.9 ms for 95%"),
    ],
)
def test_a_latency_below_the_fastest_answer_is_refused_with_its_figure(promise, found):
    with pytest.raises(Impossible, match=found):
        encoder_limit(MODEL, 256, promise)


def test_one_gpu_serves_the_rate_that_the_batch_promises_within_a_tenth():
    limit = encoder_limit(MODEL, 256, PROMISE)

    def keeps(rate):
        served = serve(MODEL, 256, PROMISE, rate=rate, most=limit.batch, requests=3000)
        return served.latency <= PROMISE.latency

    most = highest_rate(keeps, 1.5 * limit.requests_per_second, precision=0.04)
    assert 0.9 * limit.requests_per_second <= most <= 1.05 * limit.requests_per_second


def test_a_batch_window_collects_more_for_each_step_and_keeps_the_latency():
    def run(window):
        promise = EncoderSlo(0.030, window=window)
        limit = encoder_limit(MODEL, 256, promise)
        return serve(MODEL, 256, promise, rate=500, most=limit.batch, requests=1500)

    none, short, long = run(0.0), run(0.010), run(0.020)

    assert none.mean_batch < 2
    assert 5 < short.mean_batch < 10 < long.mean_batch
    assert none.busy_share > 2 * short.busy_share > 2 * long.busy_share
    assert none.latency < short.latency < long.latency <= 0.030


def test_a_full_batch_does_not_wait_for_its_window():
    served = serve(MODEL, 256, EncoderSlo(5.0, window=1.0), rate=2000, most=8, requests=400)

    assert served.mean_batch > 7
    assert served.latency < 1.0
