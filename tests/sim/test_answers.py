"""Attainment by prompt length, and reports of several runs pooled."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import pytest
from pooled import pooled

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.attainment import RequestLatency, thirds, worst_lost
from ballast_sim.replay.report import report
from ballast_sim.replay.traffic import Arrival

SLO = {"ttft": 1.0, "tpot": 0.05}
CONFIG = PolicyConfig(slots=8, num_blocks=400, ttft=0.05, tpot=0.02)
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(30)]


def make_answers(*lengths: int, ttft: float = 0.5, tpot: float = 0.02) -> list[RequestLatency]:
    return [RequestLatency(length, ttft, tpot) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        (range(1, 10), [(1, 3, 3), (4, 6, 3), (7, 9, 3)]),
        (range(1, 11), [(1, 4, 4), (5, 7, 3), (8, 10, 3)]),
        ([400] * 95 + [8000] * 5, [(400, 400, 95), (8000, 8000, 5)]),
        ([10, 20, 20, 30], [(10, 10, 1), (20, 20, 2), (30, 30, 1)]),
        ([512] * 7, [(512, 512, 7)]),
        ([100] * 90 + [200, 300, 400], [(100, 100, 90), (200, 400, 3)]),
        ([1, 2, 3] + [900] * 90, [(1, 900, 93)]),
        ([], []),
    ],
    ids=["even", "uneven", "few long", "three", "one", "mostly short", "mostly long", "none"],
)
def test_equal_prompts_stay_together_and_three_lengths_are_three_groups(lengths, groups):
    found = thirds(make_answers(*lengths), **SLO)

    assert [(third.shortest, third.longest, third.num_online) for third in found] == groups


def test_a_third_counts_its_own_requests_alone():
    answers = [
        *make_answers(10, 10, 10),
        RequestLatency(20, 2.0, 0.02),
        *make_answers(20),
        RequestLatency(30, 0.5, nan),
    ]

    short, middle, long = thirds(answers, **SLO)

    assert (short.ttft_attainment, middle.ttft_attainment, long.ttft_attainment) == (1.0, 0.5, 1.0)
    assert (short.tpot_attainment, middle.tpot_attainment) == (1.0, 1.0)
    assert isnan(long.tpot_attainment)


def test_the_worst_third_loses_what_the_total_hides():
    alone = thirds(make_answers(*[400] * 95, *[8000] * 5), **SLO)
    mixed = thirds([*make_answers(*[400] * 95), *make_answers(*[8000] * 4), RequestLatency(8000, 1.5, 0.06)], **SLO)

    lost = worst_lost(mixed, alone)

    assert (lost.ttft, lost.tpot) == pytest.approx((0.2, 0.2))
    assert lost.worst == max(lost.ttft, lost.tpot)


def test_other_traffic_has_no_worst_third():
    lost = worst_lost(thirds(make_answers(1, 2), **SLO), thirds(make_answers(1), **SLO))

    assert isnan(lost.worst)


def test_a_run_judges_every_request_in_one_third(run):
    online = [Arrival(0.2 * i, 20 + 13 * i % 90, 5) for i in range(40)]

    found = report(run(online=online, offline=POOL))

    assert sum(third.num_online for third in found.thirds) == found.num_online == len(found.answers)
    met = sum(third.ttft_attainment * third.num_online for third in found.thirds) / found.num_online
    assert met == pytest.approx(found.ttft_attainment)


@pytest.fixture
def two(run):
    config = {"ttft": 0.05, "tpot": 0.02}
    online = [Arrival(0.2 * i, 20 + 13 * i % 90, 2 + i % 9) for i in range(60)]
    return [
        report(run(online=part, offline=POOL, seconds=seconds, config=config))
        for part, seconds in ((online[:20], 4.0), (online, 12.0))
    ]


def test_pooled_latencies_are_those_of_all_requests(two):
    whole = pooled(two, CONFIG)
    met = sum(each.ttft_attainment * each.num_online for each in two) / sum(each.num_online for each in two)

    assert whole.num_online == sum(each.num_online for each in two)
    assert whole.ttft_attainment == pytest.approx(met)
    assert min(each.ttft.p99 for each in two) <= whole.ttft.p99 <= max(each.ttft.p99 for each in two)
    assert sum(third.num_online for third in whole.thirds) == whole.num_online


def test_pooled_rates_are_means_over_time(two):
    short, long = two
    whole = pooled(two, CONFIG)
    tokens = short.total_tokens * short.seconds + long.total_tokens * long.seconds

    assert whole.seconds == short.seconds + long.seconds
    assert whole.total_tokens == pytest.approx(tokens / whole.seconds)


def test_the_report_of_one_run_pools_to_itself(two):
    alike = replace(two[0], deadline_hits=1.0)  # nan is not equal to itself

    assert pooled([alike], CONFIG) == alike
