"""The planner answers from the trace, or says which figure makes the question impossible."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path
from types import SimpleNamespace

import pytest

from ballast_api.errors import InvalidConfig
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.plan_tables import advice, fleet_figures, growth_figures, print_options
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.alternatives import Alternative, alternatives, chunks
from ballast_sim.planner.deployment import Deployment
from ballast_sim.planner.fleet import MaximumThroughputs, plan_fleet
from ballast_sim.planner.forecast import draw_lengths, plan_ahead
from ballast_sim.planner.inputs import (
    AheadInput,
    EnergyInput,
    EngineInput,
    FleetInput,
    MoneyInput,
    PlanInputs,
    ServiceInput,
    SloInput,
)
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import Quantization
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.traffic import Arrival, read, read_lengths, tokens_per_second

SMALL = EngineInput(slots=48)
"""Fills within a minute of simulated time."""
ONLINE = [Arrival(0.5 * i, 300 + 37 * i % 900, 40 + 11 * i % 200) for i in range(600)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"model": "llama-3-70b"},
            "does not fit: 141.1 GB of weights .* one a100 has 73.6 GB of 80 GB .* int4 weights take 39.8 GB",
        ),
        ({"slo": SloInput(tpot_milliseconds=10)}, "TPOT of 10 ms is below the fastest step: .* takes 14.4 ms"),
        (
            {"slo": SloInput(ttft_milliseconds=20)},
            "TTFT of 20 ms is below the fastest step: a prompt of 1,1.. tokens, the longest of 99% of requests,",
        ),
        ({"slo": SloInput(ttft_milliseconds=1)}, "no known weights or GPU keep it, and the fastest is [0-9.]+ ms with"),
        ({"slo": SloInput(tpot_milliseconds=10)}, r"It would take [0-9]\.[0-9] ms with"),
        ({"gpu": "l4"}, "TPOT of 50 ms is below the fastest step: .* 85.6 ms on one l4"),
        ({"model": "bge-base"}, "is an encoder"),
        (
            {"model": "llama-2-7b", "gpu": "h100", "engine": EngineInput(memory_percent=16)},
            r"does not fit: 13.5 GB .* 2 such GPUs together hold it \(engine.tensorParallel 2\)",
        ),
        (
            {"engine": EngineInput(adapters=1000, adapter_rank=512)},
            r"one a100 has 0.0 GB of 80 GB for them \(92 %, less [0-9.]+ GB of adapters\)",
        ),
        (
            # The 28 heads of the model cannot be shared by 8 GPUs.
            {"model": "qwen2.5-7b", "gpu": "h100", "engine": EngineInput(memory_percent=3)},
            "does not fit: 15.2 GB .* [Nn]o known single GPU holds it, and no 16 such GPUs do",
        ),
    ],
)
def test_what_physics_forbids_is_refused_with_its_figure(change, found):
    with pytest.raises((BadInput, Impossible), match=found):
        Deployment.of(PlanInputs(**change), ONLINE)


def test_traffic_that_is_longer_than_the_context_of_the_model_is_refused():
    few = [*ONLINE, *[Arrival(400.0, 10**6, 10)] * 6]  # no GPU has the memory for one of them

    assert Deployment.of(PlanInputs(), few).kv_tokens
    with pytest.raises(BadInput, match=r"1 of 2 requests have more tokens"):
        Deployment.of(PlanInputs(), few, [ONLINE[0], few[-1]])
    with pytest.raises(BadInput, match=r"7 of 607 requests have more tokens .* than llama-3-8b takes, 8,192"):
        Deployment.of(PlanInputs(), [*few, few[-1]])


def test_mfu_of_fp8_weights_counts_the_operations_that_the_gpu_does_in_fp8():
    found = PlanInputs(gpu="h100", quantization=Quantization.FP8).roofline("llama-3-8b")

    assert found.rated_flops == GPUS["h100"].fp8_flops == 2 * GPUS["h100"].flops + 1e12


@pytest.mark.parametrize(("prompt", "output"), [(1155, 211), (6000, 500), (100, 5000), (8191, 1), (1, 1)])
def test_drawn_lengths_have_the_means_of_the_service_and_fit_the_context(prompt, output):
    service = ServiceInput(
        name="chat",
        model="llama-3-8b",
        requests_per_second=(1, 1),
        prompt_tokens=prompt,
        output_tokens=output,
    )
    drawn = draw_lengths(service, seed=0)

    assert sum(one.num_prompt for one in drawn) / len(drawn) == pytest.approx(prompt, rel=0.001)
    assert sum(one.num_output for one in drawn) / len(drawn) == pytest.approx(output, rel=0.001)
    assert max(one.num_tokens for one in drawn) <= 8192


def test_answers_of_one_token_have_no_tpot_to_keep():
    deployment = Deployment.of(PlanInputs(engine=EngineInput(slots=16)), ONLINE)
    online = [replace(arrival, num_output=1) for arrival in ONLINE[:60]]
    result = deployment.alone(online, seconds=30.0)

    assert isnan(result.tpot_attainment)
    assert deployment.fits(result)
    assert result.goodput == pytest.approx(result.num_online / result.seconds)
    assert not deployment.fits(replace(result, ttft_attainment=0.5))
    assert not deployment.fits(replace(result, tpot_attainment=0.5))


def test_online_alone_may_prefill_as_much_in_a_step_as_ballast_does():
    deployment = Deployment.of(PlanInputs(slo=SloInput(ttft_milliseconds=420), engine=SMALL), ONLINE)
    online = [Arrival(3.0 * (i // 6), 700, 40) for i in range(180)]
    small = deployment.run(partial(Fill, deployment.config.chunk_tokens), online=online, seconds=90.0)

    assert not deployment.fits(small)
    assert deployment.fits(deployment.alone(online, seconds=90.0))


def test_traffic_without_a_request_after_the_warm_up_is_refused():
    sparse = [Arrival(1e9 * i, 4000, 10) for i in range(9)]
    inputs = PlanInputs(
        fleet=FleetInput(online_utilization_percent=1), slo=SloInput(ttft_milliseconds=5000), traffic_minutes=0.3
    )

    with pytest.raises(BadInput, match="no online request arrives at one of 8 GPUs after the warm-up"):
        plan_fleet(inputs.model_copy(update={"throughput_minutes": 1}), sparse, ONLINE[:50])


def test_an_alternative_in_which_no_request_ends_has_no_price():
    found = SimpleNamespace(mixed=None, maximums=None, deployment=SimpleNamespace(model=None))
    inputs = PlanInputs(engine=EngineInput(slots=4), throughput_minutes=0.05, slo=SloInput(ttft_milliseconds=1e5))
    tried = alternatives(inputs, found, [Arrival(0.0, 1000, 2000)], ONLINE, lambda _: None)

    assert "throughputMinutes is 0.05: answers need" in tried[0].problem
    assert all(one.problem for one in tried)


def test_the_plan_itself_is_not_simulated_again_as_an_alternative():
    inputs = PlanInputs(engine=EngineInput(slots=4), throughput_minutes=0.05, slo=SloInput(ttft_milliseconds=1e5))
    offline = [Arrival(0.0, 1000, 2000)]
    sized = inputs.model_copy(update={"fleet": FleetInput(online_gpus=3)})  # by the trace
    found = SimpleNamespace(
        mixed=None, maximums=MaximumThroughputs(3.0, 2.0, 1.0), deployment=Deployment.of(sized, ONLINE, offline)
    )
    tried = alternatives(inputs, found, offline, ONLINE, lambda _: None)

    assert (tried[0].full, tried[0].bound, tried[0].problem) == (2.0, 1.0, "")
    assert all(one.problem for one in tried[1:])


def test_advice_compares_estimates_with_the_estimate_of_the_plan_itself():
    found = SimpleNamespace(
        mixed=SimpleNamespace(gpus=5, dollars_per_hour=9.0),
        deployment=SimpleNamespace(
            model=SimpleNamespace(gpu=GPUS["a100"]), config=SimpleNamespace(objective=0.99, chunk_tokens=512)
        ),
    )
    given = Alternative("as given", 75.0, 100.0, 0.08, 4, 7.2)
    same, less = replace(given, name="int4 weights"), replace(given, name="h100 instead", gpus=2, dollars_per_hour=6.0)

    [line] = advice(found, [given, same, less], [])

    assert "Right-size the GPU (h100 instead)" in line
    assert "about 2 mixed GPUs at $6.00 an hour instead of about 4 at $7.20" in line


def test_the_batch_ceiling_is_the_largest_batch_a_sweep_finds():
    deployment = Deployment.of(PlanInputs(), ONLINE)
    context = sum(a.num_prompt + a.num_output / 2 for a in ONLINE) / len(ONLINE)
    prompt = round(sum(a.num_prompt for a in ONLINE) / len(ONLINE))
    cost = deployment.cost

    def fits(batch):
        tpot = cost.k0 + batch * (cost.k3 + cost.k4 * context)
        ttft = 2 * cost.k0 + (2 * batch - 1) * (cost.k3 + cost.k4 * context) + cost.prefill(0, prompt)
        return tpot <= deployment.config.tpot and ttft <= deployment.config.ttft

    ceiling, because = deployment.batch_ceiling(ONLINE)

    assert ceiling == max(batch for batch in range(1, 257) if fits(batch))
    assert "bound by" in because


def test_holding_steps_to_the_slo_costs_throughput_and_faster_weights_win_it_back():
    def kept(quantization):
        slo = SloInput(tpot_milliseconds=25)
        inputs = PlanInputs(quantization=quantization, slo=slo, engine=SMALL, throughput_minutes=1)
        deployment = Deployment.of(inputs, ONLINE)
        return deployment.slo_bound(ONLINE) / deployment.unbounded(ONLINE)

    plain, quantized = kept(Quantization.NONE), kept(Quantization.INT4)

    assert plain < quantized < 1.0


@pytest.mark.parametrize(
    ("slo", "apart", "verdict"),
    [
        (SloInput(tpot_milliseconds=25), "2 online + 1 offline", "apart need at least 3|mixing does not pay"),
        (
            SloInput(tpot_milliseconds=17),
            None,
            "No number of mixed GPUs up to 2 .* separate online GPUs up to 2 meet.* 2 do the offline work, with TTFT",
        ),
    ],
)
def test_both_fleets_are_searched_up_to_all_gpus_and_one_that_misses_the_slo_is_no_option(slo, apart, verdict):
    inputs = PlanInputs(
        slo=slo,
        engine=SMALL,
        fleet=FleetInput(online_gpus=1, online_utilization_percent=99, offline_gpus=1, offline_utilization_percent=10),
        traffic_minutes=0.7,
        throughput_minutes=1,
    )
    found = plan_fleet(inputs, ONLINE, ONLINE[:100])
    notes = {option.name: option.note for option in found.options}

    assert notes.get("apart, fewest GPUs") == apart
    assert any(re.search(verdict, line) for line in found.because), found.because


def test_a_large_offline_fleet_beside_little_online_traffic_is_planned():
    inputs = PlanInputs(
        engine=SMALL,
        fleet=FleetInput(
            online_gpus=1, online_utilization_percent=1.5, offline_gpus=30, offline_utilization_percent=20
        ),
        traffic_minutes=0.7,
        throughput_minutes=1,
    )
    found = plan_fleet(inputs, ONLINE, ONLINE[:100])
    apart, mixed = found.options[1:3]

    assert len(found.traffic.online) < 12  # fewer than the GPUs that the work needs
    assert apart.note == "1 online + 6 offline"
    assert mixed.name == "mixed, fewest GPUs"
    assert mixed.offline_tokens >= found.offline_tokens
    assert "nan" not in str(found.options + found.because)


def test_the_busiest_minutes_of_a_trace_set_the_load_unless_the_inputs_do():
    quiet, pause = [replace(one, seconds=3 * one.seconds) for one in ONLINE[:60]], 6 * 3600.0
    trace = [*quiet, *[replace(one, seconds=pause + one.seconds / 4) for one in ONLINE]]
    fleet = FleetInput(online_gpus=2, online_utilization_percent=40, offline_gpus=0)
    inputs = PlanInputs(engine=SMALL, traffic_minutes=0.7, throughput_minutes=1, fleet=fleet)
    rate = sum(one.num_tokens for one in ONLINE) / (ONLINE[-1].seconds / 4)
    own = plan_fleet(inputs, trace, ONLINE[:100], has_own_load=True)
    given = plan_fleet(inputs, trace, ONLINE[:100])

    assert own.traffic.tokens == pytest.approx(rate, rel=0.05)
    assert own.deployment.inputs.fleet.online_utilization_percent <= 40
    assert given.traffic.tokens == pytest.approx(2 * 0.4 * given.maximums.online_full)
    assert "These minutes set the load" in own.because[0]
    for found in (own, given):
        assert "up to " in found.because[0]
        assert f" the load, {found.traffic.tokens:,.0f} tokens/s: the plan replays" in found.because[0]
        gaps = [late.seconds - early.seconds for early, late in pairwise(found.traffic.online)]
        assert max(gaps) < 2  # the pause is not in it, nor does all arrive after it at once


def test_a_trace_that_is_too_sparse_is_refused_before_the_simulations():
    seen = list[str]()

    for trace in ([Arrival(each * i, 2, 2) for i in range(100)] for each in (3600.0, 3e7)):
        with pytest.raises(BadInput, match=r"fewer than 3 requests arrive in this time\. Increase it"):
            plan_fleet(PlanInputs(), trace, ONLINE[:50], seen.append, has_own_load=True)

    assert not seen


def test_offline_work_as_a_rate_is_the_same_on_every_gpu():
    fleet = FleetInput(online_gpus=1, online_utilization_percent=10, offline_tokens_per_second=3000)
    inputs = PlanInputs(engine=SMALL, traffic_minutes=0.7, throughput_minutes=1, fleet=fleet)
    slow, fast = (
        plan_fleet(inputs.model_copy(update={"gpu": gpu}), ONLINE, ONLINE[:100], has_own_load=False)
        for gpu in ("a100", "h100")
    )

    for found in (slow, fast):
        fleet = found.deployment.inputs.fleet
        assert found.offline_tokens == pytest.approx(3000)
        assert 20 < fleet.offline_utilization_percent <= 30
        assert f" at {fleet.offline_utilization_percent:.4g} % are " in found.because[1]
        assert found.options[0].gpus == 1 + fleet.offline_gpus
        assert "fleet.onlineGpus and fleet.onlineUtilizationPercent set the load" in found.because[0]
    assert slow.options[0].gpus > fast.options[0].gpus


@pytest.fixture(scope="module")
def small_fleet():
    inputs = PlanInputs(
        fleet=FleetInput(online_gpus=3, online_utilization_percent=20, offline_gpus=2, offline_utilization_percent=30),
        traffic_minutes=0.7,
        throughput_minutes=1.5,
        engine=SMALL,
        energy=EnergyInput(budget_kilowatts=1.4),
    )
    return plan_fleet(inputs, ONLINE, [Arrival(0.0, 800 + 97 * i % 1500, 50 + 13 * i % 200) for i in range(200)])


def test_utilization_counts_work_and_the_given_fleet_has_the_given_one(small_fleet):
    given = small_fleet.options[0]

    assert small_fleet.work == pytest.approx(3 * 0.2 + 2 * 0.3)
    assert given.utilization == pytest.approx(small_fleet.work / 5)


def test_mixed_gpus_keep_the_slo_do_the_work_and_are_fewer_than_today(small_fleet):
    mixed = next(option for option in small_fleet.options if option.name == "mixed, fewest GPUs")

    assert mixed.gpus < 5
    assert min(mixed.ttft_attainment, mixed.tpot_attainment) >= 0.99
    assert mixed.offline_tokens >= small_fleet.offline_tokens
    assert mixed.utilization < 1.0


def test_figures_that_were_not_measured_are_null_and_shown_as_a_dash(small_fleet, capsys):
    options = tuple(replace(option, tpot_attainment=nan) for option in small_fleet.options)
    found = replace(small_fleet, options=options)

    print_options(found)

    assert "nan" not in capsys.readouterr().out
    assert fleet_figures(found, [], [])["options"][0]["tpot_attainment"] is None


def test_options_above_the_power_budget_are_named(small_fleet):
    above = [option.name for option in small_fleet.options if option.kilowatts > 1.4]
    named = [line for line in small_fleet.because if "above energy.budgetKilowatts, 1.4 kW" in line]

    assert 0 < len(above) < len(small_fleet.options)
    assert [line.partition(":")[0] for line in named] == above


def test_chunks_are_compared_with_the_traffic_of_the_plan(small_fleet):
    lengths = [Arrival(0.0, 800 + 97 * i % 1500, 50 + 13 * i % 200) for i in range(200)]
    one, mixed = small_fleet.deployment, small_fleet.mixed
    same = next(chunk for chunk in chunks(small_fleet, mixed, lengths) if chunk.tokens == one.config.chunk_tokens)
    result = one.run(
        Ballast,
        online=small_fleet.traffic.of(1, mixed.gpus),
        offline=lengths,
        seconds=small_fleet.traffic.seconds,
        config=replace(one.config, tpot_share=mixed.step_share),
    )

    assert same.offline_tokens == result.offline.total * mixed.gpus


def test_money_per_token_adds_up_to_money_per_hour(small_fleet):
    for option in small_fleet.options:
        per_hour = (
            3600 / 1e6 * (option.online_tokens * option.online_dollars + option.offline_tokens * option.offline_dollars)
        )
        assert per_hour == pytest.approx(option.dollars_per_hour)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"throughput_minutes": 0.01}, "throughputMinutes is 0.01: answers need .* s count. "),
        ({"throughput_minutes": 0.08}, r"throughputMinutes is 0.08: answers need .* and 3 s count. Set it to 2"),
        ({"traffic_minutes": 0.05, "throughput_minutes": 1}, "trafficMinutes is 0.05: answers need .* and 2 s count"),
        (
            {"traffic_minutes": 1e-4, "throughput_minutes": 1},
            "trafficMinutes is 0.0001: fewer than 3 requests arrive",
        ),
    ],
)
def test_times_that_are_too_short_to_measure_are_refused_by_name(change, found):
    with pytest.raises(BadInput, match=found):
        plan_fleet(PlanInputs(engine=EngineInput(slots=16), **change), ONLINE, ONLINE[:50])


def test_of_a_large_fleet_some_gpus_are_simulated_with_their_part_of_the_traffic():
    inputs = PlanInputs(
        fleet=FleetInput(online_gpus=32, online_utilization_percent=4, offline_gpus=0),
        traffic_minutes=0.2,
        throughput_minutes=1,
        engine=EngineInput(slots=16),
    )
    found = plan_fleet(inputs, ONLINE, ONLINE[:100])
    same = next(option for option in found.options if option.name == "mixed on the same 32")

    assert "16 of them simulated" in same.note
    assert same.online_tokens == pytest.approx(32 * 0.04 * found.maximums.online_full)
    assert 0.5 * 32 < same.offline_tokens / found.maximums.offline_full < 32
    assert found.offline_tokens == 0
    for gpus in (1, 20, 31, 40):
        part = found.traffic.of(min(gpus, 16), gpus)
        assert part[-1].seconds == pytest.approx(found.traffic.seconds, rel=0.1)
        assert tokens_per_second(part) == pytest.approx(found.traffic.tokens * min(gpus, 16) / gpus, rel=0.1)


EMBEDDINGS = ServiceInput(
    name="embeddings", kind="encoder", model="bge-large", requests_per_second=(8000, 20000), prompt_tokens=128
)


def outlooks(**fields):
    return plan_ahead(PlanInputs(ahead=AheadInput(months=18, services=(EMBEDDINGS,)), **fields))


def test_a_growing_service_needs_more_gpus_each_month_and_fewer_with_each_way_added():
    alone, batched, quantized, mixed = outlooks()

    counts = [month.gpus for month in batched.months]
    assert counts == sorted(counts)
    assert counts[-1] / counts[0] == pytest.approx(20000 / 8000, rel=0.15)
    assert alone.months[-1].gpus > batched.months[-1].gpus >= quantized.months[-1].gpus >= mixed.months[-1].gpus
    assert alone.dollars > batched.dollars >= quantized.dollars
    assert "nothing to mix: no offline service has the model of an online service or an encoder" in mixed.because


@pytest.mark.parametrize("kind", ["encoder", "offline"])
def test_a_service_with_hardly_any_requests_needs_one_gpu(kind):
    rates = {"kind": kind, "requests_per_second": (1e-6, 1e-6), "output_tokens": 0}
    inputs = PlanInputs(
        gpu="h200",
        engine=EngineInput(api_server_milliseconds=0),
        ahead=AheadInput(months=2, services=(EMBEDDINGS.model_copy(update=rates),)),
    )

    assert [month.gpus for plan in plan_ahead(inputs) for month in plan.months] == [1] * 8


def test_figures_of_a_plan_ahead_that_are_not_finite_are_null():
    [plan, *_] = outlooks()
    dear = replace(plan, months=(replace(plan.months[0], power_dollars=inf), *plan.months[1:]))
    figures = growth_figures(dear)

    assert (figures["version"], figures["dollars"], figures["months"][0]["power_dollars"]) == (1, None, None)
    assert figures["months"][1]["power_dollars"] == plan.months[1].power_dollars


def test_rates_grow_by_an_equal_factor_from_the_first_to_the_last_month():
    rates = [EMBEDDINGS.rate(month, 18) for month in range(18)]

    assert (rates[0], rates[-1]) == (8000, pytest.approx(20000))
    assert rates[1] / rates[0] == pytest.approx(rates[17] / rates[16])


def test_gpus_that_are_needed_long_are_bought_and_the_others_rented():
    dear = outlooks(money=MoneyInput(way="cheapest"), gpus={"a100": {"purchaseDollars": 30_000}})[1]
    first, last = dear.months[0], dear.months[-1]

    assert first.rented == 0
    assert last.rented > 0
    assert all(month.owned + month.rented >= month.gpus for month in dear.months)


def test_a_power_budget_names_the_month_that_breaks_it():
    batched = outlooks()[1]
    kilowatts = [month.kilowatts for month in batched.months]

    assert batched.over_budget(None) is None
    assert batched.over_budget(kilowatts[-1] + 1) is None
    assert batched.over_budget((kilowatts[4] + kilowatts[5]) / 2).number == 6


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute of one free core
@pytest.mark.parametrize(("most_used", "found"), [(30, "mixed, its utilization is"), (100, "not mixed: offline work")])
def test_online_gpus_are_mixed_only_if_they_keep_the_slo_at_the_peak(most_used, found):
    service = ServiceInput(
        name="chat",
        model="llama-3-8b",
        requests_per_second=(5, 5),
        prompt_tokens=700,
        output_tokens=60,
        peak_factor=3,
    )
    ahead = AheadInput(months=1, most_used_percent=most_used, services=(service,))
    engine = EngineInput(slots=48, reserved_percent=50)

    inputs = PlanInputs(ahead=ahead, engine=engine, quantization=Quantization.NONE, throughput_minutes=1)
    *_, mixed = plan_ahead(inputs)

    assert found in mixed.because[0]


def test_a_plan_ahead_without_services_or_with_the_wrong_kind_is_refused():
    with pytest.raises(BadInput, match="name at least one service"):
        plan_ahead(PlanInputs(ahead=AheadInput(services=())))


def test_offline_services_have_no_slo_and_a_way_that_does_not_fit_is_named_with_the_reason():
    service = ServiceInput(
        name="bulk", kind="offline", model="llama-3-70b", requests_per_second=(1, 1), prompt_tokens=99, output_tokens=9
    )
    inputs = PlanInputs(gpu="h100", quantization=Quantization.INT4, slo=SloInput(tpot_milliseconds=1), engine=SMALL)
    ahead = {"ahead": AheadInput(months=1, services=(service,)), "throughput_minutes": 1}

    first, second = plan_ahead(inputs.model_copy(update=ahead))

    assert (first.way.name, second.way.name) == ("and int4 weights", "and mixing")
    assert "'dynamic batching' is left out: llama-3-70b does not fit" in first.because[1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kind": "online", "output_tokens": 9}, "bge-large is an encoder: outputTokens is 0"),
        ({"prompt_tokens": 600}, "prompt and answer have 600 tokens, but bge-large takes at most 512"),
        ({"latency_milliseconds": 2}, "a latency of 2 ms is below the fastest answer: bge-large takes 2"),
    ],
)
def test_a_service_that_its_model_cannot_give_is_refused_with_the_figure(change, found):
    service = EMBEDDINGS.model_copy(update=change)

    with pytest.raises((BadInput, Impossible), match=found):
        plan_ahead(PlanInputs(ahead=AheadInput(services=(service,))))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpus: {mine: {teraflops: 100}}\ngpu: mine\n", "gpus.mine is not a known GPU, so it needs all figures"),
        ("gpus: {H100: {watts: 1}, h100: {watts: 2}, l4: {watts: 3}}\n", "differ only in case: H100, h100. Use one"),
        ("slo: {tpotMilliseconds: -1}\n", "slo.tpotMilliseconds: Input should be greater than 0"),
        ("fleet: {offlineGpus: 1, offlineTokensPerSecond: 9}\n", "Leave out one of these two ways"),
        ("speed: 9\n", "speed: Extra inputs are not permitted"),
        ("- 1\n", "found list, expected a mapping"),
        (
            "ahead: {services: [{name: a, model: b, requestsPerSecond: [0, 1], promptTokens: 1}]}",
            "requestsPerSecond.0: Input should be greater than or equal",
        ),
    ],
)
def test_wrong_inputs_are_refused_by_name(tmp_path, text, found):
    path = tmp_path / "plan.yaml"
    path.write_text(text)

    with pytest.raises((InvalidConfig, BadInput), match=found):
        PlanInputs.load(path).find_gpu("mine")


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes of one free core
def test_the_known_case_of_twelve_gpus_comes_out_near_the_arithmetic():
    inputs = PlanInputs(traffic_minutes=1.5, throughput_minutes=6)
    found = plan_fleet(inputs, read(Path(ONLINE_TRACE)), read_lengths(Path(OFFLINE_TRACE)))
    by_name = {option.name: option for option in found.options}

    assert found.work == pytest.approx(2.8)
    assert by_name["mixed, fewest GPUs"].gpus in (4, 5)
    assert 0.6 < by_name["mixed, fewest GPUs"].utilization < 0.85
    assert 0.65 < by_name["mixed on the same 8"].utilization < 0.85
    assert 3.0 < by_name["mixed on the same 8"].offline_tokens / found.offline_tokens < 4.1
