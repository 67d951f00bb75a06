"""The simulator against the real engine: by one clock they compute the same steps and hand out the same tokens."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

import ballast_cli
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import BadInput
from ballast_sim.replay.attainment import Percentiles
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import BatchWork
from ballast_sim.replay.traffic import excerpt, read, read_lengths
from ballast_sim.validation.engine_replay import EngineReplay, EngineUnderTest, MeasuredStep, ReplayClock
from ballast_sim.validation.validator import Validation, fit_steps, kinds, noise

COST = CostModel(2e-3, 6e-5, 2.5e-8, 6e-5, 2e-7, is_trusted=True)
CONFIG = PolicyConfig(slots=8, num_blocks=8 * 64, chunk_tokens=128, ttft=0.15, tpot=0.02)
DIRECTORY = Path(ballast_cli.__file__).parent / "demo" / "model"


def shortened(lengths):
    return [replace(a, num_prompt=ceil(a.num_prompt / 16), num_output=ceil(a.num_output / 16)) for a in lengths]


@pytest.fixture(scope="module")
def online():
    return excerpt(shortened(read(ONLINE_TRACE)), wanted=1000.0, seconds=3.0)


@pytest.fixture(scope="module")
def offline():
    return shortened(read_lengths(OFFLINE_TRACE))


@pytest.fixture(scope="module")
def engine():
    return EngineUnderTest(DIRECTORY, CONFIG)


@pytest.fixture(scope="module")
def replays(engine, online, offline):
    return [engine.replay(online, offline, ReplayClock("model", COST)) for _ in range(2)]


def test_by_the_clock_of_a_step_model_every_replay_computes_the_same_steps(replays, online):
    one, two = replays

    assert [step.work for step in one.steps] == [step.work for step in two.steps]
    assert one.waits == two.waits
    assert len(one.waits) == len(online)
    assert noise(replays, "cpu") > 0


def test_by_one_clock_simulator_and_engine_hand_out_first_tokens_at_the_same_moments(replays, online, offline):
    scenario = Scenario(
        config=replace(CONFIG, can_suspend=False),
        model=COST,
        policy=Ballast,
        online=online,
        offline=lambda: [SimulatedJob.endless("offline", offline)],
        seconds=online[-1].seconds + 5.0,
        cost=COST,
    )

    waits = [item.first_token - item.request.arrival for item in simulate(scenario).online]

    assert waits == pytest.approx(replays[0].waits, abs=1e-9)


def make_steps(model: CostModel, factor: float = 1.0) -> list[MeasuredStep]:
    works = [BatchWork(16 * i % 200, 1000.0 * i % 7000, 1 + i % 8, 300 * (1 + i % 8), num_chunks=1) for i in range(80)]
    works += [BatchWork(0, 0.0, 1 + i % 8, (200 + i) * (1 + i % 8)) for i in range(40)]
    return [MeasuredStep(work, seconds := factor * model.predict(work), seconds / 2) for work in works]


def test_coefficients_are_found_again_on_the_chosen_clock():
    steps = make_steps(COST)

    assert kinds(fit_steps(steps, "wall"), steps, "wall")[0].error < 0.01
    assert fit_steps(steps, "cpu").k0 == pytest.approx(COST.k0 / 2, rel=0.05)


def test_errors_are_told_by_kind_of_step_with_their_bias():
    found = {kind.name: kind for kind in kinds(COST, make_steps(COST, factor=1.25), "wall")}

    assert set(found) == {"all steps", "mixed", "decodes"}
    assert found["all steps"].number == found["mixed"].number + found["decodes"].number
    assert found["decodes"].error == pytest.approx(0.2)
    assert found["decodes"].bias == pytest.approx(-0.2)


def test_noise_is_the_mean_difference_of_the_same_steps_and_of_no_others():
    one, two = make_steps(COST), make_steps(COST, factor=1.1)

    assert noise([EngineReplay(one, []), EngineReplay(two, [])], "wall") == pytest.approx(0.1 / 1.05)
    with pytest.raises(BadInput, match="computed different steps"):
        noise([EngineReplay(one, []), EngineReplay(two[1:], [])], "wall")


def make_validation(*, step_factor=1.0, ttft_factor=1.0, structure=0.0, is_ttft_limited=True):
    return Validation(
        model=COST,
        kinds=kinds(COST, make_steps(COST, step_factor), "wall"),
        noise=0.0,
        structure=structure,
        measured=[Percentiles(1.0, 1.0, 1.0)],
        predicted=Percentiles(ttft_factor, ttft_factor, ttft_factor),
        wall_over_cpu=1.0,
        num_requests=1,
        step_limit=0.15,
        is_ttft_limited=is_ttft_limited,
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (make_validation(step_factor=1.1, ttft_factor=1.15), True),
        (make_validation(step_factor=1.3), False),
        (make_validation(ttft_factor=1.25), False),
        (make_validation(ttft_factor=1.25, is_ttft_limited=False), True),
        (make_validation(structure=0.25, is_ttft_limited=False), False),
        (make_validation(step_factor=1.3, is_ttft_limited=False), False),
    ],
    ids=["both within", "steps", "TTFT", "TTFT without a limit", "TTFT by the same step times", "steps alone"],
)
def test_a_simulator_is_valid_within_its_limits(found, expected):
    assert found.is_valid == expected
