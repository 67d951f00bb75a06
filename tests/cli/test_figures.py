from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast_cli.demo.figures import Ratio, percentiles, ratio_of_percentiles, verdict

VALUES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40)


def test_percentiles_are_those_of_numpy():
    assert percentiles(list(range(101))) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_nothing_measured_has_no_percentile():
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_equal_sides_have_a_ratio_of_one_with_no_width():
    segments = [[1.0, 2.0], [3.0, 50.0], [], [4.0]]

    assert ratio_of_percentiles(segments, segments, q=99) == Ratio(1.0, 1.0, 1.0)


def test_twice_as_slow_everywhere_is_exactly_two():
    base = [[1.0, 2.0, 9.0], [3.0, 5.0]]
    found = ratio_of_percentiles(base, [[2 * v for v in one] for one in base], q=95)

    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(5)
    covered = 0
    for round_ in range(60):
        base = [list(random.lognormal(0, 0.5, 8)) for _ in range(30)]
        other = [list(1.3 * random.lognormal(0, 0.5, 8)) for _ in range(30)]
        found = ratio_of_percentiles(base, other, q=50, seed=round_, rounds=300)
        covered += found.low <= 1.3 <= found.high

    assert covered >= 50  # 57 expected of 60


def test_bursts_make_the_interval_wider_than_independent_requests_would():
    random = np.random.default_rng(1)
    bursts = [[v] * 20 for v in random.lognormal(0, 1, 30)]
    single = [[v] for one in bursts for v in one]
    other = [[v * 1.1 for v in one] for one in bursts[::-1]]
    wide = ratio_of_percentiles(bursts, other, q=50)
    narrow = ratio_of_percentiles(single, [[v] for one in other for v in one], q=50)

    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


@settings(max_examples=50)
@given(VALUES, VALUES, st.integers(0, 99), st.floats(1, 99))
def test_a_drawn_multiset_has_the_percentile_of_its_values(
    first: list[float], second: list[float], seed: int, q: float
):
    from ballast_cli.demo.figures import _Pool

    drawn = np.random.default_rng(seed).integers(0, 4, 2)
    expected = first * int(drawn[0]) + second * int(drawn[1])
    found = _Pool.of([first, second]).percentile(drawn, q)

    if expected:
        assert found == pytest.approx(np.percentile(expected, q), rel=1e-9)
    else:
        assert found is None


def test_the_seed_makes_the_interval_reproducible():
    base, other = [[1.0, 4.0], [2.0], [9.0, 1.0]], [[2.0, 4.0], [3.0], [8.0, 2.0]]

    assert ratio_of_percentiles(base, other, q=95, seed=3) == ratio_of_percentiles(base, other, q=95, seed=3)


def test_different_numbers_of_segments_are_refused():
    with pytest.raises(ValueError, match="found 1 and 2 segments"):
        ratio_of_percentiles([[1.0]], [[1.0], [2.0]], q=50)


def test_a_side_without_values_is_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        ratio_of_percentiles([[]], [[1.0]], q=50)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Ratio(1.0, 0.9, 1.1), "within 1.25x."),
        (Ratio(1.2, 1.0, 1.4), "interval reaches beyond it"),
        (Ratio(1.3, 1.1, 1.5), "interval reaches below it"),
        (Ratio(1.5, 1.3, 1.7), "beyond 1.25x."),
    ],
)
def test_the_verdict_says_no_more_than_the_interval_does(ratio: Ratio, said: str):
    assert said in verdict(ratio, 1.25)
    assert not math.isnan(ratio.value)
