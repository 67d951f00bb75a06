from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from ballast_policy.budget import OnlineStep, step_budget
from ballast_policy.cost import CostModel
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, Snapshot

COST = CostModel(k0=0.001, k1=0.0001, k3=0.0005, is_trusted=True)
CONFIG = PolicyConfig(slots=16, num_blocks=1000, ttft=1.0, tpot=0.05)
ONLINE_ALONE = 0.01


def make_snapshot(**fields) -> Snapshot:
    usual = {"now": 10.0, "residents": (), "waiting": (), "free_blocks": 1000, "config": CONFIG, "cost": COST}
    return Snapshot(**{**usual, **fields})


def make_decode(**fields) -> Request:
    usual = {
        "seq": 1,
        "request_class": RequestClass.ONLINE,
        "arrival": 10.0,
        "num_prompt": 8,
        "max_output": 8,
        "ttft": 1.0,
        "tpot": 0.05,
        "phase": Phase.RUNNING,
        "num_tokens": 9,
        "num_computed": 8,
        "num_output": 1,
    }
    return Request(**{**usual, **fields})


def budget(*decodes: Request, vacancy: float = 1.0, snapshot: Snapshot | None = None) -> float:
    step = OnlineStep(decodes, (), ONLINE_ALONE, ONLINE_ALONE, vacancy)
    return step_budget(snapshot or make_snapshot(), step)


def test_a_step_beside_online_decodes_takes_at_most_a_share_of_their_tpot():
    assert budget(make_decode()) == pytest.approx(CONFIG.tpot_share * 0.05)


def test_an_online_request_about_to_miss_its_token_leaves_nothing_to_lend():
    late = make_decode(arrival=10.0 - 1.0 - 0.05 + 0.02)  # due in 20 ms, inside the reserve of slack

    assert budget(late) == ONLINE_ALONE


def test_an_overdue_request_does_not_freeze_the_batch():
    assert budget(make_decode(arrival=0.0)) == pytest.approx(CONFIG.tpot_share * 0.05)


@pytest.mark.parametrize(
    ("vacancy", "share"),
    [(1.0, 1.0), (0.5, 1.0), (0.25, 0.5), (0.1, 0.2), (0.0, 0.0)],
    ids=["all free", "as many free as wanted", "half of that", "few free", "none free"],
)
def test_less_time_is_lent_the_fewer_slots_are_free_for_newcomers(vacancy: float, share: float):
    lent = budget(make_decode()) - ONLINE_ALONE

    assert budget(make_decode(), vacancy=vacancy) == pytest.approx(ONLINE_ALONE + share * lent)


def test_without_an_slo_full_slots_bound_nothing():
    free = make_snapshot(config=replace(CONFIG, ttft=inf, tpot=inf))

    assert budget(make_decode(ttft=inf, tpot=inf), vacancy=0.0, snapshot=free) == inf
