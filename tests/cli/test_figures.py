from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast_cli.demo.figures import Attainment, Ratio, attainment, percentiles, ratio_of_percentiles, verdict

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
    from ballast_cli.demo.figures import PooledValues

    drawn = np.random.default_rng(seed).integers(0, 4, 2)
    expected = first * int(drawn[0]) + second * int(drawn[1])
    found = PooledValues.of([first, second]).percentile(drawn, q)

    if expected:
        assert found == pytest.approx(np.percentile(expected, q), rel=1e-9)
    else:
        assert found is None


def test_the_seed_makes_the_interval_reproducible():
    base, other = [[1.0, 4.0], [2.0], [9.0, 1.0]], [[2.0, 4.0], [3.0], [8.0, 2.0]]

    assert ratio_of_percentiles(base, other, q=95, seed=3) == ratio_of_percentiles(base, other, q=95, seed=3)


def test_attainment_is_the_share_of_requests_and_not_the_mean_of_segments():
    found = attainment([[True] * 30, [True, False]], [[True] * 30, [False, False]])

    assert (found.alone, found.mixed, found.lost) == pytest.approx((100 * 31 / 32, 100 * 30 / 32, 100 / 32))


def test_a_gain_is_a_negative_loss():
    assert attainment([[True, False]], [[True, True]]).lost == -50


@pytest.mark.parametrize("number", [60, 3000])
def test_a_run_without_a_miss_excludes_no_smaller_loss_than_three_in_its_requests(number: int):
    met = [[True] * 10] * (number // 10)
    found = attainment(met, met)

    assert (found.lost, found.low, found.high) == pytest.approx((0, -300 / number, 300 / number))


def test_the_interval_of_the_loss_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(3)
    covered = 0
    for round_ in range(60):
        alone, mixed = ([list(random.random(10) < share) for _ in range(40)] for share in (0.97, 0.92))
        found = attainment(alone, mixed, seed=round_, rounds=300)
        covered += found.low <= 5 <= found.high

    assert covered >= 50  # 57 expected of 60


def test_misses_that_come_in_bursts_make_the_interval_of_the_loss_wider():
    alone = [[True] * 20] * 30
    bursts = [[False] * 20] * 3 + [[True] * 20] * 27
    spread = [[False] * 2 + [True] * 18] * 30
    wide, narrow = attainment(alone, bursts), attainment(alone, spread)

    assert wide.lost == pytest.approx(narrow.lost)
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)


def test_what_both_sides_miss_in_the_same_segments_does_not_widen_the_interval():
    hard = [[False] * 20] * 3 + [[True] * 20] * 27
    found = attainment(hard, hard)

    assert (found.low, found.high) == pytest.approx((-0.5, 0.5))


@pytest.mark.parametrize(
    ("alone", "mixed", "said"),
    [([[True]], [[True], [True]], "found 1 and 2 segments"), ([[True]], [[]], "nothing to compare")],
)
def test_sides_that_do_not_match_are_refused(alone: list, mixed: list, said: str):
    with pytest.raises(ValueError, match=said):
        attainment(alone, mixed)
    with pytest.raises(ValueError, match=said):
        ratio_of_percentiles([[1.0 for _ in one] for one in alone], [[1.0 for _ in one] for one in mixed], q=50)


def make_attainment(lost: float, low: float, high: float) -> Attainment:
    return Attainment(alone=99, mixed=99 - lost, lost=lost, low=low, high=high)


HELD = make_attainment(0.2, -0.3, 0.6)


@pytest.mark.parametrize(
    ("ttft", "tpot", "said"),
    [
        (HELD, HELD, "The promise held:"),
        (make_attainment(0.5, -0.1, 1.0), HELD, "The promise held:"),
        (make_attainment(0.5, -0.1, 1.1), HELD, "too short or too noisy to decide"),
        (HELD, make_attainment(1.5, 0.9, 2.1), "too short or too noisy to decide"),
        (HELD, make_attainment(1.5, 1.1, 1.9), "The promise did not hold:"),
        (make_attainment(0.5, -1, 2), make_attainment(3, 1.1, 5), "The promise did not hold:"),
    ],
    ids=["both", "up to the bound", "ttft open", "tpot open", "tpot lost", "one lost and one open"],
)
def test_the_verdict_says_no_more_than_the_intervals_do(ttft: Attainment, tpot: Attainment, said: str):
    assert said in verdict(ttft, tpot, most_lost=1)


def test_the_verdict_names_both_sides_and_the_interval():
    said = verdict(HELD, make_attainment(0.4, 0.1, 0.8), most_lost=1)

    assert "TTFT: 99.0 % of the online requests met the SLO alone, 98.8 % with the offline job" in said
    assert "(0.4 points lost, 95 % interval of the loss 0.1 to 0.8)" in said


def test_the_verdict_names_a_gain_without_a_minus():
    said = verdict(HELD, make_attainment(-0.4, -0.8, 0.1), most_lost=1)

    assert "(0.4 points gained, 95 % interval of the loss -0.8 to 0.1)" in said
