"""Figures of the planner against the same figures computed by hand from data sheets and prices."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_sim.planner.batch_ceiling import CeilingCase
from ballast_sim.planner.costs import GpuPrice, buy_or_rent, is_bought
from ballast_sim.planner.deployment import Deployment
from ballast_sim.planner.forecast import plan_ahead
from ballast_sim.planner.inputs import (
    SERVICES,
    AheadInput,
    CeilingInput,
    EnergyInput,
    EngineInput,
    GpuInput,
    MoneyInput,
    PlanInputs,
)
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import SHAPES, Quantization
from ballast_sim.replay.step_model import Efficiency
from ballast_sim.replay.traffic import Arrival

EMBEDDINGS = SERVICES[0]
GPU_ALONE = EngineInput(api_server_milliseconds=0)


def test_a_token_of_llama_3_8b_takes_128_kib_of_kv_and_an_80_gb_gpu_holds_439_thousand():
    assert SHAPES["llama-3-8b"].kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072

    weights = 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 128256 * 4096)
    kv = Deployment.of(PlanInputs(), [Arrival(0, 100, 10)]).kv_tokens

    assert weights == pytest.approx(16.06e9, rel=1e-3)
    assert kv == int((0.92 * 80e9 - weights) / 131_072) == 438_995


def test_a_bought_a100_costs_69_cents_an_hour_and_7_of_electricity():
    price = GpuPrice(GPUS["a100"], EnergyInput(), MoneyInput(way="buy"))

    kilowatts = (60 + (400 - 60) * 0.5) / 1000 * 1.4 * 1.3
    assert price.kilowatts(0.5) == pytest.approx(kilowatts) == pytest.approx(0.4186)
    assert price.per_hour(1.0) == pytest.approx(18_000 / (36 * 730) + 0.400 * 1.4 * 1.3 * 0.12)


def test_renting_is_dearer_from_the_eighth_month_on():
    price = GpuPrice(GPUS["a100"], EnergyInput(), MoneyInput(way="cheapest"))

    def buys(months):
        return is_bought(price, num_needed=months, num_held=months)

    def by_hand(months):
        return 18_000 * (1 - 0.5 * (1 - months / 36)) + months * 730 * 0.08736 < months * 730 * 1.8

    assert [buys(months) for months in range(1, 19)] == [by_hand(months) for months in range(1, 19)]
    assert not buys(8)
    assert buys(9)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    way=st.sampled_from(["rent", "buy", "cheapest"]),
    months=st.integers(1, 60),
)
def test_gpus_decided_together_are_paid_for_as_if_each_were_decided_alone(counts, way, months):
    price = GpuPrice(GPUS["a100"], EnergyInput(), MoneyInput(way=way, amortization_months=months))
    owned, rented, dollars = [0] * len(counts), [0] * len(counts), 0.0
    for index in range(max(counts)):
        needed = [month for month, count in enumerate(counts) if count > index]
        held = range(needed[0], len(counts))
        bought = is_bought(price, num_needed=len(needed), num_held=len(held))
        for month in held if bought else needed:
            (owned if bought else rented)[month] += 1
        dollars += price.purchase_for(len(held)) if bought else len(needed) * 730 * 1.8

    paid = buy_or_rent(counts, price)

    assert (list(paid.owned), list(paid.rented)) == (owned, rented)
    assert sum(paid.dollars) == pytest.approx(dollars)
    assert sum(paid.bought) == owned[-1]


def test_a_billion_gpus_are_paid_for_at_once():
    price = GpuPrice(GPUS["a100"], EnergyInput(), MoneyInput())

    assert buy_or_rent([10**9, 2 * 10**9], price).rented == (10**9, 2 * 10**9)


def test_gpus_and_cost_of_embeddings_in_the_first_month_by_hand():
    inputs = PlanInputs(ahead=AheadInput(months=18, services=(EMBEDDINGS,)), engine=GPU_ALONE)
    _, batched, _, _ = plan_ahead(inputs)
    first = batched.months[0]

    weights = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    read = 2 * weights / (2.039e12 * 0.6)
    each = (2 * weights * 128 + 4 * 24 * 16 * 64 * 128 * 128) / (312e12 * 0.6) + 30e-6
    batch = int((0.030 / 1.95 - 0.002 - read) / each)
    rate = batch / (0.002 + read + batch * each)
    gpus = ceil(8000 * 2 / (rate * 0.9))

    assert first.gpus == gpus
    assert f"one GPU serves {rate:,.1f} requests/s within the SLO" in batched.because[0]
    assert first.hardware_dollars == pytest.approx(gpus * 730 * 1.8)
    assert first.power_dollars == 0  # in the rent
    full = 1024 / (0.002 + read + 1024 * each)
    assert first.utilization == pytest.approx(8000 / full / gpus)
    assert first.kilowatts == pytest.approx(gpus * (60 + 340 * 8000 / full / gpus) / 1000 * 1.4 * 1.3)
    (cost,) = batched.services
    embeddings = sum(EMBEDDINGS.rate(month, 18) for month in range(18)) * 730 * 3600 / 1e6
    assert cost.hardware_dollars == pytest.approx(batched.dollars / embeddings)
    assert cost.kilowatt_hours == pytest.approx(sum(month.kilowatts for month in batched.months) * 730 / embeddings)


@pytest.mark.parametrize(("milliseconds", "rate"), [(1.6, 625), (0.6, 1666.7)])
def test_the_api_server_limits_the_embeddings_of_a_replica(milliseconds, rate):
    def plan(engine):
        return plan_ahead(PlanInputs(ahead=AheadInput(months=18, services=(EMBEDDINGS,)), engine=engine))[1]

    limited, unlimited = plan(EngineInput(api_server_milliseconds=milliseconds)), plan(GPU_ALONE)
    first, other = limited.months[0], unlimited.months[0]

    assert first.gpus == ceil(8000 * 2 / (1e3 / milliseconds * 0.9)) > other.gpus
    assert f"one GPU serves {rate:,.1f} requests/s within the SLO" in limited.because[0]
    assert f"with {milliseconds:g} ms for each text it serves {rate:,.0f} texts/s, and the GPU" in limited.because[0]
    assert not any("API server" in line for line in unlimited.because)
    assert first.utilization * first.gpus == pytest.approx(other.utilization * other.gpus)  # the same texts


def test_bulk_embeddings_use_the_time_of_the_api_server_that_online_leaves():
    bulk = EMBEDDINGS.model_copy(update={"name": "bulk", "kind": "offline", "requests_per_second": (3000, 3000)})
    _, _, apart, mixed = plan_ahead(PlanInputs(ahead=AheadInput(months=2, services=(EMBEDDINGS, bulk))))
    online = ceil(8000 * 2 / (625 * 0.9))

    assert online * 625 > 8000 + 3000
    assert apart.months[0].gpus == online + ceil(3000 / 625)
    assert mixed.months[0].gpus == online


def test_short_bulk_texts_use_the_api_servers_before_the_gpus():
    online = EMBEDDINGS.model_copy(update={"prompt_tokens": 512, "latency_milliseconds": 100})
    changes = {"name": "bulk", "kind": "offline", "prompt_tokens": 32, "requests_per_second": (6000, 6000)}
    bulk = EMBEDDINGS.model_copy(update=changes)
    _, _, _, mixed = plan_ahead(PlanInputs(ahead=AheadInput(months=2, services=(online, bulk))))
    num_online = plan_ahead(PlanInputs(ahead=AheadInput(months=2, services=(online,))))[2].months[0].gpus

    assert mixed.months[0].gpus >= (8000 + 6000) / 625
    assert mixed.months[0].gpus == num_online + max(0, ceil((6000 - (num_online * 625 - 8000)) / 625))


def test_bulk_embeddings_fill_what_the_encoders_leave_over():
    bulk = EMBEDDINGS.model_copy(
        update={"name": "bulk", "kind": "offline", "requests_per_second": (3000, 3000), "peak_factor": 1.0}
    )
    inputs = PlanInputs(ahead=AheadInput(months=2, services=(EMBEDDINGS, bulk)), engine=GPU_ALONE)

    _, _, apart, mixed = plan_ahead(inputs)

    alone = plan_ahead(inputs.model_copy(update={"ahead": AheadInput(months=2, services=(EMBEDDINGS,))}))[2]
    assert apart.months[0].gpus == alone.months[0].gpus + 2
    assert mixed.months[0].gpus == alone.months[0].gpus
    assert [cost.unit for cost in mixed.services] == ["embeddings", "embeddings"]


def test_a_power_budget_says_how_many_gpus_it_feeds():
    inputs = PlanInputs(ahead=AheadInput(services=(EMBEDDINGS,)), energy=EnergyInput(budget_kilowatts=4.0))
    batched = plan_ahead(inputs)[1]
    over = batched.over_budget(4.0)

    fed = int(4.0 / (over.kilowatts / over.gpus))
    assert (
        f"4 kW feed {fed} GPUs as busy as those of month {over.number}, which needs {over.gpus}" in batched.because[-1]
    )


def test_a_ceiling_without_overheads_is_what_arithmetic_says():
    bare = PlanInputs(
        efficiency=Efficiency(compute=1, bandwidth=1, kv_bandwidth=1, step_milliseconds=0, sequence_microseconds=0)
    )
    asked = CeilingInput(
        name="bare", model="bge-base", prompt_tokens=100, milliseconds=20, percentile=50, requests_per_second=1
    )
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    each = (2 * weights * 100 + 4 * 12 * 768 * 100 * 100) / 312e12

    ceiling = CeilingCase.of(bare, asked).ceiling()

    assert ceiling.batch == int((0.020 / 1.5 - 2 * weights / 2.039e12) / each)


def test_each_service_pays_for_its_own_gpus_and_for_shared_ones_by_the_work_on_them():
    small = EMBEDDINGS.model_copy(update={"name": "small", "model": "bge-base", "requests_per_second": (9.0, 9.0)})
    bulk = EMBEDDINGS.model_copy(update={"name": "bulk", "kind": "offline", "requests_per_second": (50.0, 50.0)})

    def plans(*services):
        return plan_ahead(PlanInputs(ahead=AheadInput(months=1, services=services), engine=GPU_ALONE))

    (_, _, quantized, mixed), alone = plans(EMBEDDINGS, small, bulk), plans(small)[2]
    for plan in (quantized, mixed):
        embeddings, its_own, offline = plan.services
        paid = (embeddings.dollars * 8000 + its_own.dollars * 9 + offline.dollars * 50) * 730 * 3600 / 1e6
        assert paid == pytest.approx(plan.dollars)
        assert its_own.dollars == pytest.approx(alone.services[0].dollars)
    assert quantized.services[2].dollars * 50 * 730 * 3600 / 1e6 == pytest.approx(730 * 1.8)  # a GPU of its own
    assert mixed.services[2].dollars == pytest.approx(mixed.services[0].dollars)  # the same work, on the same GPUs


def test_a_format_without_quantization_is_kept_and_an_a100_with_fewer_operations_has_no_fp8():
    ahead = AheadInput(months=1, services=(EMBEDDINGS,))
    ways = [plan.way.name for plan in plan_ahead(PlanInputs(ahead=ahead, quantization=Quantization.NONE))]
    less = plan_ahead(PlanInputs(ahead=ahead, gpus={"a100": GpuInput(teraflops=250)}))

    assert ways == ["one request at a time", "dynamic batching", "and mixing"]
    assert less[2].way.name == "and int8 weights"
