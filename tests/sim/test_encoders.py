"""An encoder's batch follows from its latency SLO, and a batch window collects what comes."""

from __future__ import annotations

from functools import cache

import pytest
from ceilings import highest_rate, serve

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.encoder import MOST_BATCH, EncoderSlo, encoder_limit
from ballast_sim.planner.encoder_runs import EncoderBench
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import SHAPES
from ballast_sim.replay.step_model import BatchWork, Roofline

MODEL = Roofline(SHAPES["bge-base"], GPUS["a100"])
PROMISE = EncoderSlo(latency=0.030)


def slowest(batch, promise):
    step = MODEL.predict(BatchWork.of_prompts(batch, 256))
    return promise.share * max(promise.window, step) + step


@pytest.mark.parametrize(
    "promise", [PROMISE, EncoderSlo(0.030, window=0.02), EncoderSlo(0.030, 0.99), EncoderSlo(0.100)]
)
def test_an_encoder_batch_is_the_largest_whose_wait_and_step_fit(promise):
    limit = encoder_limit(MODEL, 256, promise)

    assert slowest(limit.batch, promise) <= promise.latency < slowest(limit.batch + 1, promise)
    assert limit.batch < MOST_BATCH
    assert limit.requests_per_second == limit.batch / MODEL.predict(BatchWork.of_prompts(limit.batch, 256))


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


@cache
def bench(**options):
    return EncoderBench(
        **{"model": "bge-large", "gpu": "a100", "prompt": 128, "slo": EncoderSlo(0.030), "seconds": 6.0, **options}
    )


@pytest.mark.parametrize("policy", ["ballast", "ballast-fitted"])
@pytest.mark.parametrize("load", [0.2, 0.6])
def test_offline_work_takes_what_the_latency_of_online_leaves(policy, load):
    runs = bench(noise=0.05)
    mixed, alone = runs.row(policy, load), runs.row("online-only", load)

    assert alone.attainment == 1.0
    assert mixed.attainment > 0.99
    assert mixed.p95 <= 0.030
    assert mixed.online_rate + mixed.offline_rate > 0.8 * runs.maximum


def test_a_fixed_batch_and_priorities_lose_the_slo_beside_bulk_work():
    runs = bench(noise=0.05)

    assert runs.row("fixed-32", 0.4).attainment < 0.95
    assert runs.row("naive-priority", 0.4).attainment < 0.05


def test_a_reservation_gets_its_share_when_online_leaves_little():
    lent, reserved = (bench(reservation=share).row("ballast", 0.8).offline_rate for share in (0.0, 0.1))

    assert reserved > lent


def test_a_batch_window_makes_fewer_and_larger_steps_within_the_slo():
    eager, patient = (bench(slo=EncoderSlo(0.030, window=window)).row("online-only", 0.1) for window in (0.0, 0.010))

    assert eager.p50 < patient.p50
    assert patient.attainment > 0.99


def test_the_rate_that_is_found_by_trying_is_below_the_computed_rate_of_full_batches():
    found, computed = bench().highest().online_rate, bench().computed.requests_per_second

    assert 0.75 * computed < found < computed


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "llama-3-8b"}, BadInput, "generates text"),
        ({"prompt": 400}, BadInput, "needs 2 to 256"),
        ({"slo": EncoderSlo(0.001)}, Impossible, "below the fastest answer"),
    ],
)
def test_what_cannot_be_run_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        bench(**options)


def test_an_unknown_policy_is_refused():
    with pytest.raises(BadInput, match="known are online-only"):
        bench().row("fixed-64", 0.2)
