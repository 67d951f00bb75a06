"""Plans are changed where vLLM computes prompts in one piece, or some sizes of a step faster."""

from __future__ import annotations

import pytest

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, Phase, Request, RequestClass
from ballast_vllm.plan_limits import PlanLimits, even_step, whole_prompts


def make_request(seq: int, request_class: RequestClass = OFFLINE, **values: object) -> Request:
    return Request(seq, request_class, arrival=0.0, num_prompt=10, max_output=9, **values)


def test_a_chunk_becomes_the_whole_prompt_and_the_rest_waits():
    first, second, third = (make_request(i, num_tokens=n) for i, n in ((1, 60), (2, 60), (3, 30)))
    plan = StepPlan(grants=((first, 60), (second, 10), (third, 5)), admit=(first, second, third))

    found = whole_prompts(plan, 100)

    assert found.grants == ((first, 60), (third, 30))
    assert found.admit == (first, third)


@pytest.mark.parametrize(
    ("computed", "granted", "found"),
    [
        pytest.param(0, 30, 20, id="a chunk ends before an image"),
        pytest.param(20, 10, 40, id="an image at the start of the chunk is computed at once"),
        pytest.param(30, 10, 30, id="and the rest of one whose start is cached"),
        pytest.param(20, 40, 40, id="a chunk may end with an image"),
        pytest.param(20, 60, 60, id="and behind it"),
        pytest.param(60, 40, 40, id="or with the prompt"),
    ],
)
def test_no_chunk_ends_in_an_image(computed: int, granted: int, found: int):
    prompt = make_request(1, num_tokens=100, num_computed=computed, phase=RUNNING)

    limits = PlanLimits(512, find_images=lambda _: [range(20, 60), range(95, 100)])
    plan = limits.apply(StepPlan(grants=((prompt, granted),)), {1: None})

    assert plan.grants == ((prompt, found),)


@pytest.mark.parametrize(
    ("images", "computed", "granted", "found"),
    [
        pytest.param([range(20, 60)], 0, 20, 17, id="the drafter reads behind the chunk"),
        pytest.param([range(20, 60)], 17, 10, 43, id="vLLM ended the chunk before where the drafter would read"),
        pytest.param([range(20, 40), range(41, 60)], 10, 35, 50, id="an image begins where the one before it ends"),
        pytest.param([range(20, 40), range(41, 60)], 17, 10, 43, id="so both are computed together"),
        pytest.param([range(20, 40), range(50, 60)], 17, 10, 23, id="and others are not"),
    ],
)
def test_a_drafter_reads_no_part_of_an_image(images: list[range], computed: int, granted: int, found: int):
    prompt = make_request(1, num_tokens=100, num_computed=computed, phase=RUNNING)

    limits = PlanLimits(512, find_images=lambda _: images, num_ahead=3)
    plan = limits.apply(StepPlan(grants=((prompt, granted),)), {1: None})

    assert plan.grants == ((prompt, found),)


@pytest.mark.parametrize(
    ("most_tokens", "num_drafts", "fitting"),
    [
        (100, 0, "decode seeing last other"),
        (70, 0, "decode seeing last"),
        (63, 2, "decode seeing"),
        (62, 2, "seeing last"),
    ],
)
def test_the_first_image_that_does_not_fit_takes_the_step(most_tokens: int, num_drafts: int, fitting: str):
    decode = make_request(1, num_tokens=40, num_computed=39, phase=RUNNING)
    seeing, last, other = (make_request(seq, num_tokens=tokens) for seq, tokens in ((2, 80), (3, 70), (4, 90)))
    names = {1: "decode", 2: "seeing", 3: "last", 4: "other"}
    plan = StepPlan(grants=((decode, 1), (seeing, 10), (last, 2), (other, 30)), admit=(seeing, last, other))
    images = {"seeing": [range(60)]}
    limits = PlanLimits(most_tokens, find_images=lambda name: images.get(name, ()), num_drafts=num_drafts)

    found = limits.apply(plan, names)

    assert " ".join(names[record.seq] for record, _ in found.grants) == fitting
    assert dict(found.grants)[seeing] == 60
    assert set(found.admit) == {record for record, _ in found.grants} - {decode}


def test_a_step_has_a_multiple_of_the_tokens_where_an_offline_prompt_can_be_shorter():
    decode, online = make_request(1, ONLINE), make_request(2, ONLINE)
    whole, cut = make_request(3), make_request(4)
    plan = StepPlan(grants=((decode, 1), (online, 40), (whole, 30), (cut, 20)))

    assert even_step(plan, 32).grants == ((decode, 1), (online, 40), (whole, 3), (cut, 20))
    assert even_step(plan, 7) is plan
    assert even_step(plan, 16).grants == ((decode, 1), (online, 40), (whole, 30), (cut, 9))


def test_an_online_prompt_is_shorter_only_if_it_does_not_end_in_this_step():
    decode, ends = make_request(1, ONLINE), make_request(2, ONLINE, num_tokens=400)
    goes_on = make_request(3, ONLINE, num_tokens=290, num_cached=10)

    plan = StepPlan(grants=((decode, 1), (ends, 400), (goes_on, 120)))
    assert even_step(plan, 32).grants == ((decode, 1), (ends, 400), (goes_on, 111))

    plan = StepPlan(grants=((goes_on, 120), (ends, 400), (decode, 1)))
    assert even_step(plan, 32) is plan, "behind decodes, there are no prompts"

    plan = StepPlan(grants=((ends, 400), (goes_on, 280)))
    assert even_step(plan, 32) is plan


def test_an_offline_prompt_is_shorter_before_an_online_prompt_is():
    offline, goes_on = make_request(1, num_tokens=80), make_request(2, ONLINE, num_tokens=900)

    plan = StepPlan(grants=((offline, 30), (goes_on, 490)))

    assert even_step(plan, 32).grants == ((offline, 22), (goes_on, 490))


def test_the_last_online_prompt_that_goes_on_is_shorter():
    first, last = make_request(1, ONLINE, num_tokens=900), make_request(2, ONLINE, num_tokens=300)

    plan = StepPlan(grants=((first, 400), (last, 120)))
    assert even_step(plan, 32).grants == ((first, 400), (last, 112))

    plan = StepPlan(grants=((first, 513), (last, 8)))
    assert even_step(plan, 32).grants == ((first, 504), (last, 8)), "the last one has fewer tokens than the rest"


@pytest.mark.parametrize("phase", [RUNNING, PARKED])
def test_a_resident_prompt_ends_with_its_last_token(phase: Phase):
    prompt = make_request(1, ONLINE, num_tokens=600, num_computed=80, phase=phase)

    assert even_step(plan := StepPlan(grants=((prompt, 520),)), 32) is plan
    assert even_step(StepPlan(grants=((prompt, 516),)), 32).grants == ((prompt, 512),)


def test_a_chunk_of_one_token_is_no_decode():
    long, short = make_request(1, num_tokens=200), make_request(2, num_tokens=50)

    assert even_step(StepPlan(grants=((long, 80), (short, 1))), 32).grants == ((long, 63), (short, 1))


@pytest.mark.parametrize(("granted", "found"), [(100, 96), (68, 64), (69, 69), (70, 70)])
def test_online_leaves_a_small_part_of_a_step_to_the_next_one(granted: int, found: int):
    prompt = make_request(1, ONLINE, num_tokens=1010)

    assert even_step(StepPlan(grants=((prompt, granted),)), 32).grants == ((prompt, found),)


@pytest.mark.parametrize(("size", "found"), [(1032, 516), (1031, 516), (1028, 512)])
def test_no_online_prompt_takes_a_step_more(size: int, found: int):
    prompt = make_request(1, ONLINE, num_tokens=size)

    assert even_step(StepPlan(grants=((prompt, 516),)), 32).grants == ((prompt, found),)


def test_no_first_token_and_no_request_leaves_a_step_for_its_size():
    decode, online, short = make_request(1), make_request(2, ONLINE, num_tokens=70), make_request(3)
    plan = StepPlan(grants=((decode, 1), (online, 70), (short, 7)))

    assert even_step(plan, 64) is plan
    assert even_step(plan, 71) is plan


def test_a_step_of_less_than_the_multiple_stays():
    plan = StepPlan(grants=((make_request(1), 31),))

    assert even_step(plan, 32) is plan
