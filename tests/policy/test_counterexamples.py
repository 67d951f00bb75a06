"""Runs that once broke a law, as hypothesis shrank them; each is named for what was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import FakeEngine
from laws import lawful
from workloads import EXACT, UNTRUSTED, Arrival

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare


def online(prompt: int, output: int = 1, **fields) -> Arrival:
    return Arrival(fields.pop("at", 0.0), RequestClass.ONLINE, prompt, output, **fields)


def offline(prompt: int, output: int = 1, **fields) -> Arrival:
    return Arrival(fields.pop("at", 0.0), RequestClass.OFFLINE, prompt, output, **fields)


def make_config(slots: int, num_blocks: int, **fields) -> PolicyConfig:
    usual = {"block_tokens": 1, "chunk_tokens": 4, "offline_share": 0.1, "tail_tokens": 0, "watermark": 0.05}
    return PolicyConfig(slots=slots, num_blocks=num_blocks, **{**usual, **fields})


def make_host(config: PolicyConfig, cost: CostModel = EXACT) -> Host:
    return Host(config, cost=cost, planner=lawful)


CASES = {
    "online waited for the end of offline requests that shared their KV": (
        make_config(8, 64),
        [*[offline(41, 20, prefix_key=1, shared=40)] * 4, online(36, at=0.06)],
    ),
    "a request beyond the reservation took the block that the one inside needed": (
        make_config(16, 24, block_tokens=4, chunk_tokens=8, tpot=0.02),
        [online(37, 9, tpot=0.02), offline(1, 10), offline(21, 5), online(2, 8, at=0.01), online(1, at=0.05)],
    ),
    "a request that fits the reservation only until it grows counted for one that does not fit before": (
        make_config(4, 16, block_tokens=4, chunk_tokens=16, offline_share=0.5),
        [
            online(10, 5, priority=1),
            online(32),
            online(22, 4, prefix_key=2, shared=16),
            offline(2, 3, tenant="a"),
            offline(27, 3, tenant="a", prefix_key=2, shared=24),
        ],
    ),
    "a small request waited behind one that fits the reservation with its cached prefix": (
        make_config(4, 200, chunk_tokens=16, offline_share=0.5, tpot=0.02),
        [
            online(1, 9),
            offline(91, prefix_key=2, shared=91),
            online(26, 3, tenant="b"),
            offline(39, 7, tenant="a", priority=1, prefix_key=2, shared=36),
            offline(2, tenant="a"),
            online(22, 10, tenant="a"),
            online(87, 7, at=0.01, priority=1, prefix_key=2, shared=62),
        ],
    ),
    "a prompt longer than a whole step of an encoder did not stop a shorter one of a lower priority": (
        make_config(2, 32, chunk_tokens=16, offline_share=0.0, max_interference=0.1, is_encoder=True),
        [
            *[offline(1)] * 2,
            offline(2, at=0.1, priority=-1),
            offline(10, at=0.1),
            online(1),
            online(1, at=0.01),
            online(1, at=0.1),
            online(17),
        ],
    ),
    "blocks for answers of unknown length were not among those that a newcomer needs": (
        make_config(4, 96, chunk_tokens=16, tpot=0.02),
        [
            offline(32, 15, prefix_key=2, shared=23),
            online(59, 16, prefix_key=2, shared=56),
            offline(3, 12, at=0.02),
            online(3, 16),
        ],
    ),
    "one admitted within the reservation was admitted again as lent": (make_config(2, 32), [offline(1)]),
    "a parked request was told why and the waiting one behind it was not": (
        make_config(1, 32, offline_share=0.0, offline_max_share=0.3),
        [offline(1), offline(1), offline(1, 2), online(1, 2, at=0.01, ttft=0.01, tpot=0.007), offline(1)],
    ),
    "who lost its KV to a higher priority lost its slot a second time": (
        make_config(1, 48, offline_share=0.0, offline_max_share=0.3),
        [*[offline(1)] * 5, online(4, at=0.1, priority=1), online(44), online(1, 10)],
    ),
    "prefill tokens stayed reserved for a request that was preempted": (
        make_config(7, 32, offline_share=0.3, offline_max_share=0.3),
        [*[offline(1)] * 3, offline(11), offline(20), online(16, at=0.01)],
    ),
    "offline was admitted on the KV that a waiting online request needed": (
        make_config(2, 48, offline_share=0.0, offline_max_share=0.3),
        [offline(1), offline(4), online(35), online(12, 2)],
    ),
    "a reserved slot was kept for a request that could not grow": (
        make_config(2, 32),
        [offline(1), offline(22, 2), online(1, at=0.01, ttft=0.01, tpot=0.007), online(6, 5, at=0.01)],
    ),
    "a request parked in this step was not asked for its KV": (
        make_config(2, 64, offline_max_share=0.3),
        [*[offline(1)] * 7, offline(1, 13), offline(1), online(1), online(54)],
    ),
    "the slot of a preempted reservation was lent only in the next step": (
        make_config(3, 80, offline_max_share=0.3),
        [offline(1), offline(1), offline(6, 5, prefix_key=1), online(1), online(30), online(39, 2)],
    ),
    "growth beyond the KV reservation counted as covered by it": (
        make_config(2, 12, block_tokens=4, chunk_tokens=16, offline_max_share=0.3),
        [*[offline(1)] * 5, offline(2, 8, at=0.01, slack=1.0), online(1), online(29, 9)],
    ),
    "a slot on lent KV counted as the reserved one, and the one on reserved KV was parked": (
        make_config(3, 5, block_tokens=16),
        [offline(1), offline(1), offline(1, 15), offline(33), offline(1, 12), offline(7, 18), online(33, at=0.1)],
    ),
    "nobody's preemption seemed to suffice because the blocks they would begin counted": (
        make_config(3, 3, block_tokens=16, offline_share=0.5),
        [offline(2, 16), offline(18, 16), offline(4)],
    ),
    "offline parked one by one until nobody could go on": (
        make_config(4, 48, chunk_tokens=16, offline_share=1.0),
        [*[offline(1)] * 4, offline(1, 2), offline(5, 6), offline(18, 6), offline(14, 4, prefix_key=1)],
    ),
    "time stayed reserved for prefill that found no block": (
        make_config(4, 3, block_tokens=16, chunk_tokens=16, offline_share=1.0),
        [offline(1), offline(1), offline(17), offline(18), online(1), online(1), online(2, 2, ttft=0.01, tpot=0.007)],
    ),
    "time was kept for a reserved prefill without a block while a higher priority asked for it": (
        make_config(6, 37, chunk_tokens=16, offline_share=0.5),
        [
            offline(10, at=0.01),
            offline(20, priority=1),
            online(1, 4),
            online(3, 4, tpot=0.007),
            online(10, 4),
            online(3, 4),
        ],
    ),
    "one admitted into the reservation began with the reserved tokens alone on an idle engine": (
        make_config(2, 64, chunk_tokens=16, offline_share=0.5),
        [offline(20)],
    ),
    "the reservation's prefill was left out of the budget": (
        make_config(5, 48, block_tokens=4, tpot=0.02, tail_tokens=64, tenants={"a": TenantShare()}),
        [
            offline(37, 22, tenant="a", abort_after=14),
            online(20, 8, tenant="c", priority=-1, ttft=0.05, tpot=0.007, prefix_key=1, shared=9),
            offline(56, 19, at=0.05, tenant="b", slack=-1.0, prefix_key=2, shared=45, abort_after=16),
            offline(21, 5, tenant="b", abort_after=12),
            offline(55, 8, at=0.1, tenant="b", priority=1, slack=1.0),
            offline(30, tenant="b", priority=-1, slack=1.0, prefix_key=2, shared=9),
            online(9, 14, at=0.01, tenant="b", ttft=0.2, tpot=0.02),
            offline(31, 11, tenant="c", slack=1.0),
            online(7, 10, tenant="a", priority=-1, prefix_key=2, shared=4, abort_after=13),
            offline(5, 19, at=0.1, tenant="a", slack=-1.0, prefix_key=1, shared=1),
            offline(10, 9, tenant="b", slack=-1.0, prefix_key=2, shared=3),
        ],
    ),
}


@pytest.mark.parametrize("watermark", [0.0, 0.05])
@pytest.mark.parametrize("name", CASES)
def test_what_once_broke_a_law_obeys_all(name: str, watermark: float):
    config, arrivals = CASES[name]

    FakeEngine(make_host(replace(config, watermark=watermark)), arrivals).run(max_steps=500)


def test_a_single_slot_is_lent_while_the_cost_model_is_untrusted():
    config = make_config(1, 32, offline_share=0.0, tpot=0.02)

    FakeEngine(make_host(config, UNTRUSTED), [offline(1), online(1)]).run(max_steps=10)


IDLE = {
    "the step was over a cap's budget right after the last online request": {"max_interference": 0.25, "tpot": 0.0052},
    "a cap of nothing kept offline from an engine without online": {"max_interference": 0.0},
    "a TTFT below two empty steps left no time for a token": {"ttft": 0.0001},
    "a TTFT hardly above two empty steps left no time for a token": {"ttft": 0.0101},
    "a TPOT below an empty step left no time for a token": {"ttft": 0.0001, "tpot": 0.0001},
}


@pytest.mark.parametrize("cost", [EXACT, replace(EXACT, k0=0.0), replace(EXACT, k3=0.3)], ids=["usual", "free", "slow"])
@pytest.mark.parametrize("name", IDLE)
def test_what_once_left_an_engine_idle_beside_offline_work_leaves_none(name: str, cost: CostModel):
    config = make_config(2, 32, offline_share=0.0, **IDLE[name])
    engine = FakeEngine(make_host(config, cost), [online(4, 2), offline(6, 3), offline(6, 3)])

    engine.run(max_steps=20)


def test_a_cap_that_gave_nothing_more_left_no_engine_idle():
    config = make_config(2, 32, offline_share=0.0, max_interference=0.1, tpot=0.006)
    host = make_host(config)
    host.interference.allowance = replace(host.interference.allowance, share=0.0, lending_ratio=0.1, typical=0.005)

    FakeEngine(host, [online(4, 2), offline(6, 3)]).run(max_steps=20)


@pytest.mark.parametrize("context", range(9, 33))
def test_a_budget_of_one_token_that_rounding_made_too_short_left_no_engine_idle(context: int):
    cost = CostModel(k0=1e-9, k4=1.0, is_trusted=True)
    config = make_config(1, 48, offline_share=0.0, ttft=0.05)

    FakeEngine(make_host(config, cost), [offline(context, 3)]).run(max_steps=20)
