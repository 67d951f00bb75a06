"""The promises of the benchmark on a small engine: kept, and told to be broken where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.comparison.guarantee_runs import GuaranteeRuns
from ballast_sim.errors import BadInput
from ballast_sim.replay.simulation import warmup_of
from ballast_sim.replay.traffic import Arrival

TRACE = [Arrival(0.4 * i, 40 + 37 * i % 200, 10 + 7 * i % 40, tenant="abc"[i % 3]) for i in range(200)]
POOL = [Arrival(0.0, 60 + 29 * i % 300, 4 + 11 * i % 50) for i in range(120)]


@pytest.fixture
def runs():
    model = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)
    config = PolicyConfig(slots=32, num_blocks=1200, chunk_tokens=128, ttft=0.5, tpot=0.03)
    return GuaranteeRuns(config, model, TRACE, TRACE, POOL, seconds=15.0)


def test_ten_times_too_much_online_leaves_offline_its_reservation(runs):
    crowded = runs.reservation()
    kept = replace(runs, config=replace(runs.config, slots=64, num_blocks=2400)).reservation()
    nothing = replace(runs, offline=[Arrival(0.0, 19_000, 1)]).reservation()

    assert kept.is_kept, kept.sentence
    assert kept.figures["offline_tokens_per_s"] > 0
    # With all 32 slots in use, a slot that online borrowed returns only when an answer ends.
    assert crowded.figures["shortfall"] < 0.02, crowded.sentence
    assert not nothing.is_kept  # such a prompt does not fit the KV that is reserved
    assert nothing.figures["shortfall"] > 0.5


def test_tenants_share_as_their_weights_say(runs):
    for case in (runs.equal_tenants(), runs.unequal_tenants()):
        assert case.is_kept, case.sentence
        assert 0 < case.figures["service_gap"] <= case.figures["bound"]


def test_a_trace_without_tenants_cannot_show_fairness(runs):
    alone = replace(runs, tenants=[replace(arrival, tenant="one") for arrival in TRACE])

    with pytest.raises(BadInput, match="has 1, expected 2 or more"):
        alone.equal_tenants()


def test_a_tight_deadline_is_met_by_slack_and_missed_in_order_of_submission(runs):
    case = runs.deadline()

    assert case.is_kept, case.sentence
    assert case.figures["by_slack"] <= case.figures["deadline"] < case.figures["by_submission"]


def test_a_run_in_which_the_tight_job_does_not_end_is_refused(runs):
    with pytest.raises(BadInput, match=r"40 items of the tight job are not done in 2 s. Run longer"):
        replace(runs, seconds=0.5).deadline()


@pytest.mark.parametrize(("seconds", "expected"), [(120.0, 30.0), (300.0, 60.0), (6000.0, 60.0)])
def test_a_quarter_of_a_run_at_most_a_minute_does_not_count(seconds, expected):
    assert warmup_of(seconds) == expected
