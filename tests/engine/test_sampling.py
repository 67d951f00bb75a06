"""Sampling draws from the right distribution, over the right tokens, from (seed, position, logits) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast_engine.batch import SampleRow
from ballast_engine.native.library import kernels
from ballast_engine.request import SamplingParams
from ballast_engine.sampling import sample as sample_with
from ballast_engine.sampling import uniforms

VOCABULARY = 40


IMPLEMENTATIONS = {"torch": None, "kernels": kernels()}


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def sample(request):
    implementation = IMPLEMENTATIONS[request.param]
    return lambda logits, rows: sample_with(logits, rows, implementation)


def draw(sample, logits, count=4000, **changes):
    """How often each token comes when the same logits are sampled at `count` positions."""
    params = SamplingParams(**{"seed": 11, **changes})
    rows = [SampleRow(params, position) for position in range(count)]
    tokens = sample(torch.as_tensor(logits).expand(count, -1), rows)
    return np.bincount(tokens, minlength=len(logits))


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by definition, in float64, one step after the other."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    order = np.argsort(-chances, kind="stable")
    is_kept = chances >= min_p * chances.max()
    if top_k:
        is_kept[order[top_k:]] = False
    left = np.where(is_kept, chances, 0.0)
    left /= left.sum()
    order = np.argsort(-left, kind="stable")
    before = np.cumsum(left[order]) - left[order]
    if top_p < 1.0:
        left[order[before >= top_p]] = 0.0
    return left / left.sum()


def chi_square(counts, chances):
    expected = chances * counts.sum()
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(sample, changes):
    chances = probabilities(LOGITS.numpy(), **changes)
    counts = draw(sample, LOGITS, **changes)

    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(chances))
    # 40 tokens at most: a chi-square with 39 degrees of freedom is above 85 once in 30,000 runs, and seeds are fixed.
    assert chi_square(counts, chances) < 85


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    width=st.sampled_from([8, 300, 1000]),
)
@settings(max_examples=150)
def test_only_tokens_of_the_filtered_distribution_are_drawn(
    sample, *, seed, spread, temperature, top_k, top_p, min_p, width
):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(width, generator=generator) * spread * 8).round() / 8  # many ties
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    counts = draw(sample, logits, count=200, temperature=temperature, **filters)
    # A token on the very edge of top_p may fall on either side of it by rounding.
    generous = probabilities(
        logits.numpy(),
        temperature=temperature,
        **{**filters, "top_p": min(1.0, top_p + 1e-5), "min_p": min_p * (1 - 1e-5)},
    )

    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(generous))


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 4, "top_p": 0.75}], ids=str)
def test_of_equal_tokens_the_lowest_ids_are_kept(sample, changes):
    logits = torch.zeros(10)
    counts = draw(sample, logits, **changes)

    assert np.flatnonzero(counts).tolist() == [0, 1, 2]


def test_a_nucleus_wider_than_the_first_look_is_found(sample):
    logits = torch.zeros(2000)
    logits[:100] = 0.01
    counts = draw(sample, logits, count=1500, top_p=0.6)

    wanted = probabilities(logits.numpy(), top_p=0.6)
    assert int(np.flatnonzero(counts).max()) <= int(np.flatnonzero(wanted).max())
    assert counts[1100:1190].sum() > 0


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(sample, temperature):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 3.0, 1.0, 3.0]])
    row = SampleRow(SamplingParams(temperature=temperature), 5)

    assert sample(logits, [row, row]).tolist() == [1, 0]


def test_top_k_of_one_is_greedy_at_any_temperature(sample):
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(SamplingParams(temperature=5.0, top_k=1, seed=index), index) for index in range(50)]

    assert sample(logits, rows).tolist() == logits.argmax(-1).tolist()


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 300, 5000]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(rows=st.lists(st.tuples(params, st.integers(0, 100_000)), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(sample, rows, seed):
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(seed)) * 3
    samples = [SampleRow(one, position) for one, position in rows]
    alone = [int(sample(logits[index : index + 1], [row])[0]) for index, row in enumerate(samples)]

    assert sample(logits, samples).tolist() == alone
    assert sample(logits.flip(0), samples[::-1]).tolist() == alone[::-1]


def test_extreme_logits_and_temperatures_draw_possible_tokens(sample):
    logits = torch.tensor([[-torch.inf, 1e30, 1e30, -1e30], [-torch.inf, 0.0, -torch.inf, -torch.inf]])
    for temperature in (2e-5, 1.0, 100.0):
        rows = [SampleRow(SamplingParams(temperature=temperature, seed=3), 9)] * 2
        first, second = sample(logits, rows).tolist()

        assert first in {1, 2}
        assert second == 1


def test_uniforms_are_uniform_over_positions_and_seeds():
    positions = np.arange(20_000, dtype=np.uint64)
    along = uniforms(np.full(20_000, 7, dtype=np.uint64), positions)
    across = uniforms(positions, np.full(20_000, 7, dtype=np.uint64))
    for numbers in (along, across):
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]

        assert chi_square(counts, np.full(50, 1 / 50)) < 100
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(along, across)[0, 1]) < 0.03


def test_both_implementations_draw_the_same_tokens():
    logits = torch.randn(2000, 500, generator=torch.Generator().manual_seed(8)) * 2
    filters = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "temperature": 1.4}]
    rows = [SampleRow(SamplingParams(seed=index, **filters[index % 5]), index) for index in range(2000)]
    ours, theirs = (sample_with(logits, rows, one) for one in IMPLEMENTATIONS.values())

    assert int((ours != theirs).sum()) <= 2
