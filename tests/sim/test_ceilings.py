"""The batch that a latency SLO allows: computed, and found again by simulating one size after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from ceilings import measured

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.batch_ceiling import CeilingCase, drawn, largest
from ballast_sim.planner.encoder import ApiServer
from ballast_sim.planner.inputs import CEILINGS, CeilingInput, EngineInput, PlanInputs
from ballast_sim.replay.step_model import BatchWork

GPU_ALONE = PlanInputs(engine=EngineInput(api_server_milliseconds=0))
BIG, PUBLISHED, ENCODER = (CeilingCase.of(GPU_ALONE, asked) for asked in CEILINGS)


def test_the_ceiling_of_a_7b_model_on_an_a100_with_50_ms_is_near_what_operators_report():
    ceiling = BIG.ceiling()

    assert ceiling.batch == 15
    assert BIG.slowest(15) <= 0.050 < BIG.slowest(16)
    assert "12.8 ms for the weights" in ceiling.because[0]
    assert "99% are answered within 49.9 ms of 50 ms" in ceiling.because[1]


@pytest.mark.parametrize("case", [BIG, ENCODER, PUBLISHED])
def test_trying_batch_sizes_on_newcomers_drawn_one_by_one_finds_the_computed_ceiling(case):
    computed = case.ceiling().batch

    assert largest(case, partial(drawn, case), near=computed) == computed


def test_a_sweep_over_encoder_batches_finds_the_computed_ceiling():
    found = {batch: measured(ENCODER, batch, requests=4000) for batch in range(46, 53)}
    kept = [batch for batch, seconds in found.items() if seconds <= ENCODER.seconds]

    assert abs(max(kept) - ENCODER.ceiling().batch) <= 1
    assert all(seconds == pytest.approx(ENCODER.slowest(batch), rel=0.02) for batch, seconds in found.items())


def test_a_first_token_takes_in_the_simulator_what_the_steps_as_a_chain_say():
    shorter = replace(BIG, prompt=64, context=96, rate=12.0)

    for batch in (4, 12):
        assert measured(shorter, batch, requests=2000) == pytest.approx(shorter.slowest(batch), rel=0.04)


def test_an_encoder_waits_at_most_one_step_and_takes_another():
    step = ENCODER.step(49, 0)

    assert (
        step == ENCODER.step(49, 20) == ENCODER.step_model.predict(BatchWork(49 * 256, 49 * 256 * 128.5, num_chunks=49))
    )
    assert ENCODER.slowest(49) == pytest.approx(1.95 * step)


@pytest.mark.parametrize("case", [BIG, ENCODER, PUBLISHED])
def test_more_prompt_and_a_higher_rate_never_allow_a_larger_batch(case):
    longer = replace(case, prompt=int(1.1 * case.prompt))
    busier = replace(case, rate=1.5 * case.rate)

    assert longer.ceiling().batch < case.ceiling().batch
    assert busier.ceiling().batch <= case.ceiling().batch


@pytest.mark.parametrize("near", [1, 2, 30, 49, 50, 51, 200, 256])
def test_the_largest_batch_is_found_from_wherever_the_search_begins(near):
    assert largest(BIG, lambda batch: 0.001 * batch, near) == 50
    assert largest(BIG, lambda _: 1.0, near) == 0
    assert largest(BIG, lambda _: 0.0, near) == 256


@pytest.mark.parametrize(
    ("engine", "batch", "because"),
    [
        ({}, 15, "15 is the largest within 50 ms"),
        ({"slots": 10}, 10, "10 is the most that engine.slots allows"),
        ({"memory_percent": 18.3}, 9, "9 is the most decodes of 225 tokens that 2,219 tokens of KV hold"),
    ],
)
def test_slots_and_kv_limit_a_batch(engine, batch, because):
    ceiling = CeilingCase.of(PlanInputs(engine=EngineInput(**engine)), CEILINGS[0]).ceiling()

    assert (ceiling.batch, ceiling.because[-1]) == (batch, because)


def test_small_batches_that_queue_do_not_hide_the_largest():
    assert largest(BIG, lambda batch: 0.001 * batch if batch > 40 else 1.0, near=49) == 50


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.1])
def test_the_rarest_newcomers_wait_as_the_chain_says(rate):
    rare = replace(BIG, rate=rate)

    assert drawn(rare, 10, requests=20_000) == pytest.approx(rare.slowest(10), rel=0.01)


def test_many_newcomers_in_a_step_wait_as_the_chain_says():
    many = replace(BIG, prompt=5, context=30, rate=1500.0)

    assert drawn(many, 200, requests=100_000) == pytest.approx(many.slowest(200), rel=0.02)


@pytest.mark.parametrize(("case", "rate"), [(BIG, 8.0), (ENCODER, 2800.0)])
def test_where_steps_bring_more_newcomers_than_the_batch_there_is_no_ceiling(case, rate):
    with pytest.raises(Impossible, match="bring more newcomers than a batch of"):
        replace(case, rate=rate).ceiling()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"milliseconds": 20}, "20 ms is below the fastest answer. A step takes 13.0 ms .* and needs the second"),
        ({"requests_per_second": 9000}, "9000 requests/s arrive, but a batch of .* within 50 ms, serves"),
        ({"model": "bge-base"}, "bge-base is an encoder: outputTokens is 0"),
        ({"prompt_tokens": 4000}, "prompt and answer have 4,150 tokens, but llama-2-7b takes at most 4,096"),
        ({"steps": "published"}, "published are the steps of llama-3-8b on a100"),
    ],
)
def test_a_ceiling_that_cannot_be_is_refused_with_its_figure(change, found):
    asked = CEILINGS[0].model_copy(update=change)

    with pytest.raises((BadInput, Impossible), match=found):
        CeilingCase.of(PlanInputs(), asked).ceiling()


def test_a_decoder_has_a_ceiling_of_embeddings_if_its_output_tokens_are_given_as_zero():
    left_out = CeilingInput(name="e", model="llama-2-7b", prompt_tokens=150, milliseconds=99, requests_per_second=1)
    case = CeilingCase.of(PlanInputs(), left_out.model_copy(update={"output_tokens": 0}))

    assert case.is_encoder
    with pytest.raises(BadInput, match="llama-2-7b generates: outputTokens is 1 or more, or given as 0 if it serves"):
        CeilingCase.of(PlanInputs(), left_out)


def test_full_batches_that_the_api_server_cannot_fill_are_stated():
    ceiling = CeilingCase.of(PlanInputs(), CEILINGS[2]).ceiling()

    assert ceiling.batch == ENCODER.ceiling().batch
    assert "with 1.6 ms for each text it serves 625 texts/s, and the GPU 3," in ceiling.because[-1]
    assert not any("API server" in reason for reason in (*ENCODER.ceiling().because, *BIG.ceiling().because))


def test_more_requests_than_the_api_server_serves_have_no_ceiling():
    with pytest.raises(Impossible, match=r"500 requests/s arrive, but one API server process, with 2 ms .* serves 500"):
        replace(ENCODER, api_server=ApiServer(2.0)).ceiling()


def test_the_api_server_limits_no_model_that_generates():
    case = CeilingCase.of(PlanInputs(engine=EngineInput(api_server_milliseconds=9000)), CEILINGS[0])

    assert case.ceiling().batch == BIG.ceiling().batch
