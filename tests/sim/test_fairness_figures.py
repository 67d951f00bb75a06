"""Service gap and Jain's index say what they are defined to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_sim.replay.attainment import Percentiles
from ballast_sim.replay.fairness import jain, service_gap


def test_the_gap_is_the_largest_difference_over_a_span_in_which_both_waited():
    samples = [{"a": 0.0, "b": 0.0}, {"a": 50.0, "b": 10.0}, {"a": 50.0, "b": 80.0}]

    assert service_gap(samples) == 70.0


def test_a_tenant_that_ran_dry_starts_a_new_span():
    samples = [{"a": 0.0, "b": 0.0}, {"a": 100.0}, {"a": 200.0, "b": 0.0}, {"a": 205.0, "b": 1.0}]

    assert service_gap(samples) == 4.0


@given(st.lists(st.lists(st.floats(0, 100), min_size=2, max_size=2), min_size=2, max_size=12))
def test_the_gap_equals_the_brute_force_over_all_spans(gains):
    totals, samples = [0.0, 0.0], []
    for a, b in gains:
        totals = [totals[0] + a, totals[1] + b]
        samples.append({"a": totals[0], "b": totals[1]})

    brute = max(
        abs((later["a"] - earlier["a"]) - (later["b"] - earlier["b"]))
        for i, earlier in enumerate(samples)
        for later in samples[i:]
    )
    assert service_gap(samples) == pytest.approx(brute)


@pytest.mark.parametrize(
    ("gained", "index"), [({"a": 10.0, "b": 10.0}, 1.0), ({"a": 10.0, "b": 0.0}, 0.5), ({"a": 3.0, "b": 1.0}, 0.8)]
)
def test_jain_is_one_when_even_and_one_over_n_when_one_takes_all(gained, index):
    assert jain([dict.fromkeys(gained, 0.0), gained]) == pytest.approx(index)


def test_jain_counts_only_tenants_that_always_waited():
    assert jain([{"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 1.0}, {"a": 9.0, "b": 9.0}]) == 1.0


def test_percentiles_are_those_of_the_sorted_values():
    assert Percentiles.of(range(100)) == Percentiles(49, 94, 98)
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0)
