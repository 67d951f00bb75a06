from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nextafter
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ballast_policy.learning.cost import CostModel, Fit, StepWork, attended, non_negative_least_squares

MODEL = CostModel(0.01, 6e-5, 2e-8, 4e-5, 1e-7, is_trusted=True)
coefficients = st.floats(0, 1e-3) | st.just(0.0)


def test_a_chunk_attends_to_what_was_there_and_to_itself_up_to_each_token():
    assert attended(num_computed=10, num_tokens=3) == 11 + 12 + 13


def test_a_prediction_is_the_sum_of_its_parts():
    work = StepWork(num_prefill=100, prefill_context=attended(50, 100), num_decode=2, decode_context=700)

    parts = MODEL.k0 + MODEL.prefill(50, 100) + MODEL.decode(300) + MODEL.decode(400)

    assert MODEL.predict(work) == pytest.approx(parts)
    assert MODEL.predict(StepWork()) == 0


@given(coefficients, coefficients, st.floats(0, 0.2), st.integers(0, 4000), st.integers(0, 3000))
def test_the_largest_chunk_is_the_one_a_search_finds(k1: float, k2: float, seconds: float, computed: int, limit: int):
    model = CostModel(0.0, k1, k2)

    chunk = model.largest_chunk(seconds, computed, limit)

    assert 0 <= chunk <= limit
    assert model.prefill(computed, chunk) <= seconds
    # One more would not fit, but for the last bit of a rounded root.
    assert chunk == limit or model.prefill(computed, chunk + 1) > seconds * (1 - 1e-12)


def test_no_time_is_no_chunk():
    assert MODEL.largest_chunk(-1.0, 0, 512) == MODEL.largest_chunk(-1.0, 0, 1) == 0
    assert MODEL.largest_chunk(inf, 0, 512) == 512
    assert CostModel().largest_chunk(0.0, 0, 512) == 512


@given(
    k0=st.floats(0.001, 0.05),
    k3=st.floats(1e-6, 1e-3),
    k4=st.floats(0, 1e-6),
    tpot=st.sampled_from([inf, 0.01, 0.05, 0.1]),
    ttft_and_prompt=st.tuples(st.sampled_from([inf, 0.05, 0.2, 1.0]), st.integers(0, 1000)),
)
def test_the_batch_ceiling_is_what_a_sweep_finds(k0, k3, k4, tpot, ttft_and_prompt):
    model = CostModel(k0, 5e-5, 1e-9, k3, k4, is_trusted=True)
    ttft, prompt = ttft_and_prompt

    def slack(batch: int) -> float:
        step = model.predict(StepWork(num_decode=batch, decode_context=batch * 500))
        beside = StepWork(prompt, attended(0, prompt), batch - 1, (batch - 1) * 500)
        return min(tpot - step, ttft - step - max(k0, model.predict(beside)))

    def holds(batch: int) -> bool:
        return slack(batch) >= 0

    ceiling = model.batch_ceiling(slots=300, mean_context=500, tpot=tpot, ttft=ttft, prompt=prompt)

    assert ceiling == 1 or holds(ceiling) or abs(slack(ceiling)) < 1e-12
    assert ceiling == 300 or not holds(ceiling + 1)


def steps(number: int) -> Iterator[StepWork]:
    """Draw steps with up to 200 decodes, every second one with prefill."""
    rng = np.random.default_rng(7)
    for step in range(number):
        prefill = int(rng.integers(1, 512)) if step % 2 else 0
        context = attended(int(rng.integers(0, 4000)), prefill)
        decodes = int(rng.integers(1, 200))
        yield StepWork(prefill, context, decodes, decodes * int(rng.integers(50, 3000)))


def fed(model: CostModel, *, noise: float = 0.0, spikes: float = 0.0, num_steps: int = 400) -> Fit:
    rng = np.random.default_rng(7)
    fit = Fit()
    for work in steps(num_steps):
        seconds = model.predict(work) * (1 + noise * rng.standard_normal())
        fit.add(work, seconds * (5 if rng.random() < spikes else 1))
    fit.refit()
    return fit


def test_a_fit_finds_the_coefficients_back():
    fitted = fed(MODEL).model

    assert fitted.is_trusted
    for name in ("k0", "k1", "k2", "k3", "k4"):
        assert getattr(fitted, name) == pytest.approx(getattr(MODEL, name), rel=1e-3)


def test_a_fit_is_not_led_astray_by_steps_that_another_process_interrupted():
    clean, disturbed = fed(MODEL, noise=0.05), fed(MODEL, noise=0.05, spikes=0.05)
    work = StepWork(256, attended(0, 256), 64, 64 * 1000)

    assert disturbed.model.is_trusted
    assert disturbed.model.predict(work) == pytest.approx(clean.model.predict(work), rel=0.05)


def test_steps_that_took_twice_their_prediction_are_left_out():
    work = StepWork(256, attended(0, 256), 64, 64 * 1000)

    assert fed(MODEL, spikes=0.15).model.predict(work) == pytest.approx(MODEL.predict(work), rel=1e-3)
    assert fed(MODEL, spikes=0.3).model.predict(work) > 1.02 * MODEL.predict(work), "more than a fifth of them count"


def test_noise_beyond_prediction_is_not_trusted():
    rng = np.random.default_rng(3)
    fit = Fit()
    for step in range(200):
        fit.add(StepWork(num_prefill=10 * (step % 2), num_decode=5, decode_context=500), float(rng.uniform(0.001, 0.1)))

    assert not fit.refit().is_trusted
    assert fit.model.error > 0.25


@pytest.mark.parametrize("prefill", [0, 100])
def test_one_kind_of_step_alone_is_not_trusted(prefill: int):
    fit = Fit()
    for decodes in range(1, 100):
        work = StepWork(prefill, attended(0, prefill), decodes, decodes * 100)
        fit.add(work, MODEL.predict(work))

    assert not fit.refit().is_trusted


def filled(decodes: int, prefill: int) -> StepWork:
    """A step of offline work, whose prefill fills what the decodes leave."""
    return StepWork(prefill, attended(0, prefill), decodes, decodes * 80)


def test_prompts_alone_are_trusted_if_their_steps_differ_and_the_first_decodes_are_learned():
    """All requests ask for one token, as in a classification. Then answers of many tokens come."""
    rng = np.random.default_rng(5)
    fit = Fit()
    for _ in range(300):
        work = StepWork(size := int(rng.integers(100, 2048)), attended(0, size))
        fit.add(work, MODEL.predict(work) * (1 + 0.03 * rng.standard_normal()))
    found = fit.refit()
    assert found.is_trusted
    assert (found.k0, found.k1) == pytest.approx((MODEL.k0, MODEL.k1), rel=0.2)

    for step in range(8):
        work = StepWork(0, 0.0, 10 + step, 500 * (10 + step))
        fit.add(work, MODEL.predict(work))
    found, work = fit.refit(), StepWork(0, 0.0, 64, 64 * 500)
    assert found.is_trusted
    assert found.predict(work) == pytest.approx(MODEL.predict(work), rel=0.2)


def test_full_steps_alone_do_not_tell_what_an_empty_step_takes():
    fit = Fit()
    for step in range(200):
        fit.add(filled(step % 32, 512 - step % 32), MODEL.predict(filled(step % 32, 512 - step % 32)))

    assert not fit.refit().is_trusted


def test_a_few_steps_of_other_sizes_after_hours_of_full_steps_are_enough():
    """A worker has computed offline work alone. Its first online requests must not wait for 16 small steps."""
    rng = np.random.default_rng(11)
    fit = Fit()
    works = [filled(32, 480) for _ in range(200)]
    works += [filled(int(rng.integers(2, 32)), int(rng.integers(60, 480))) for _ in range(8)]
    for work in works:
        fit.add(work, MODEL.predict(work) * (1 + 0.05 * rng.standard_normal()))
    found = fit.refit()

    assert found.is_trusted
    small = StepWork(num_decode=8, decode_context=800)
    assert found.predict(small) == pytest.approx(MODEL.predict(small), abs=0.25 * MODEL.predict(filled(32, 480)))


def test_hours_of_decodes_do_not_forget_what_prefill_costs():
    fit = fed(MODEL)
    for step in range(2000):
        work = StepWork(num_decode=1 + step % 90, decode_context=400 * (1 + step % 90))
        fit.add(work, MODEL.predict(work))

    assert fit.refit().k1 == pytest.approx(MODEL.k1, rel=0.01)


def test_a_model_follows_a_machine_that_becomes_slower():
    fit = fed(MODEL)
    for work in steps(1200):
        fit.add(work, 2 * MODEL.predict(work))
    found = fit.refit()

    for work in steps(10):
        assert found.predict(work) == pytest.approx(2 * MODEL.predict(work), rel=1e-3)


def test_empty_steps_and_no_steps_teach_nothing():
    fit = Fit()
    for _ in range(32):
        fit.add(StepWork(), 0.01)
        fit.add(StepWork(num_decode=1, decode_context=10), 0.0)

    assert fit.refit() == CostModel()


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=3, max_size=20))
@example(rows=[(0.1, 1.0, 0.0), (0.2, 0.0, 0.5), (0.5, 0.5, 0.5)]).via("the first variable leaves when others enter")
def test_least_squares_are_not_negative_and_no_nudge_improves_them(rows: list[tuple[float, ...]]):
    matrix = np.array(rows)
    matrix[np.abs(matrix) < 1e-3] = 0.0

    def error(x: np.ndarray) -> float:
        return float(np.sum((matrix @ x - 1.0) ** 2))

    best = non_negative_least_squares(matrix)

    assert (best >= 0).all()
    for index in range(3):
        for nudge in (-1e-4, 1e-4):
            nudged = best.copy()
            nudged[index] = max(0.0, nudged[index] + nudge)
            assert error(best) <= error(nudged) + 1e-6


@pytest.mark.parametrize("factor", [5, 30, 300])
@pytest.mark.parametrize("num", [1, 10])
def test_steps_that_were_measured_too_short_do_not_count(num: int, factor: float):
    random, fit = Random(1), Fit()
    for i in range(512):
        prefill = i % 2 * random.randint(10, 512)
        work = StepWork(prefill, attended(0, prefill), random.randint(1, 64), random.randint(100, 60_000))
        fit.add(work, MODEL.predict(work) * random.uniform(0.95, 1.05) / (factor if i < num else 1))

    found = fit.refit()

    assert found.is_trusted
    assert found.k0 == pytest.approx(MODEL.k0, rel=0.05)


def test_the_next_float_is_not_a_slot():
    """A ceiling of exactly 8 stays 8 when rounding puts the quotient just below."""
    model = CostModel(0.0, 0.0, 0.0, 0.1, 0.0, is_trusted=True)

    assert model.batch_ceiling(slots=100, mean_context=0, tpot=nextafter(0.8, 0)) == 8


def test_the_batch_ceiling_is_one_to_all_slots():
    model = CostModel(k1=1.0, k3=0.1, is_trusted=True)

    assert [model.batch_ceiling(slots=6, mean_context=1, tpot=tpot) for tpot in (0.01, 0.2, 9.0)] == [1, 2, 6]
    assert model.batch_ceiling(slots=100, mean_context=1, ttft=1.5) == 8, "7 or 8 decodes in each of two steps"


def test_a_batch_of_prompts_waits_for_the_batch_before_it():
    """A prompt takes three seconds: a batch of five takes 15, that of four before it 12."""
    assert CostModel(k2=1.0).batch_ceiling(slots=10, mean_context=0, ttft=30.0, prompt=2) == 5


EXPERTS = replace(MODEL, k0=0.003, k1=1e-5, k3=3e-5, k5=0.03, missed=1 - 4 / 128)


def test_a_step_reads_the_experts_that_its_tokens_touch_once():
    work = StepWork(num_prefill=100, prefill_context=attended(50, 100), num_decode=2, decode_context=700)

    parts = EXPERTS.k0 + EXPERTS.decode(300) + EXPERTS.decode(400, beside=1) + EXPERTS.prefill(50, 100, beside=2)

    assert EXPERTS.predict(work) == pytest.approx(parts)
    assert EXPERTS.predict(StepWork(100, attended(0, 100))) == pytest.approx(EXPERTS.k0 + EXPERTS.prefill(0, 100))
    assert EXPERTS.experts(inf) == pytest.approx(EXPERTS.k5)
    assert EXPERTS.experts(2, beside=3) + EXPERTS.experts(-2, beside=5) == pytest.approx(0.0, abs=1e-15)
    assert EXPERTS.decode(300, num=2, beside=3) == pytest.approx(EXPERTS.decode(300, 3) + EXPERTS.decode(300, 4))


def test_a_chunk_beside_many_tokens_may_be_larger_because_they_read_the_experts():
    alone, beside = (EXPERTS.largest_chunk(0.005, 0, 512, beside=number) for number in (0, 100))

    assert EXPERTS.prefill(0, alone) <= 0.005 < EXPERTS.prefill(0, alone + 1)
    assert EXPERTS.largest_chunk(0.005, 0, 512) == alone < beside
    assert EXPERTS.prefill(0, beside, 100) <= 0.005 < EXPERTS.prefill(0, beside + 1, 100)
    assert EXPERTS.largest_chunk(0.005, 0, beside, 100) == beside


def test_the_batch_ceiling_counts_the_experts():
    ceiling = EXPERTS.batch_ceiling(slots=256, mean_context=500, tpot=0.02)

    step, next_step = (StepWork(num_decode=n, decode_context=500 * n) for n in (ceiling, ceiling + 1))
    assert EXPERTS.predict(step) <= 0.02 < EXPERTS.predict(next_step)
    halves = CostModel(k3=0.1, k5=1.0, missed=0.5)  # three decodes: 0.3 + 0.2 + 2 - 1/8 - 1/4, and the prompt 1/8
    assert [halves.batch_ceiling(slots=9, mean_context=1, ttft=t, prompt=1) for t in (1.9, 2.2, 2.3)] == [2, 2, 3]


@pytest.mark.parametrize("choice", [1.0, 0.5])
def test_a_fit_finds_the_experts_and_how_alike_tokens_choose(choice: float):
    model = replace(EXPERTS, missed=(1 - 4 / 128) ** choice)
    knowing, linear = Fit(expert_share=4 / 128), Fit()
    for fit in (knowing, linear):
        for work in steps(200):
            fit.add(work, model.predict(work))
        fit.refit()

    assert knowing.model.missed == pytest.approx(model.missed)
    assert knowing.model.k5 == pytest.approx(model.k5, rel=0.01)
    assert knowing.model.error < 0.001
    assert linear.model.error > 0.02


def test_a_fit_of_a_dense_model_has_no_experts():
    assert fed(MODEL).model.k5 == 0
