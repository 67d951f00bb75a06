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


DECODE = (ONLINE, 1, 1)
EVEN: dict[str, tuple[int, list[tuple[RequestClass, int, int]], list[int] | None]] = {
    "the last offline prompt": (32, [DECODE, (ONLINE, 40, 40), (OFFLINE, 99, 30), (OFFLINE, 99, 20)], [1, 40, 3, 20]),
    "the one before it, if it is shorter than the rest": (
        16, [DECODE, (ONLINE, 40, 40), (OFFLINE, 99, 30), (OFFLINE, 99, 20)], [1, 40, 30, 9],
    ),
    "a size that is even": (7, [DECODE, (ONLINE, 40, 40), (OFFLINE, 99, 30), (OFFLINE, 99, 20)], None),
    "an online prompt that does not end": (32, [DECODE, (ONLINE, 400, 400), (ONLINE, 280, 120)], [1, 400, 111]),
    "no prompt behind decodes": (32, [(ONLINE, 280, 120), (ONLINE, 400, 400), DECODE], None),
    "only prompts that end": (32, [(ONLINE, 400, 400), (ONLINE, 280, 280)], None),
    "an offline prompt before an online one": (32, [(OFFLINE, 80, 30), (ONLINE, 900, 490)], [22, 490]),
    "the last online prompt": (32, [(ONLINE, 900, 400), (ONLINE, 300, 120)], [400, 112]),
    "not the last one, if it has fewer tokens than the rest": (
        32, [(ONLINE, 900, 513), (ONLINE, 300, 8)], [504, 8],
    ),
    "not one that ends": (32, [(ONLINE, 1300, 400), (ONLINE, 104, 104)], [376, 104]),
    "before a chunk of one token": (32, [(OFFLINE, 200, 80), (OFFLINE, 50, 1)], [63, 1]),
    "no first token": (64, [DECODE, (ONLINE, 70, 70), (OFFLINE, 10, 7)], None),
    "no request": (71, [DECODE, (ONLINE, 70, 70), (OFFLINE, 10, 7)], None),
    "less than the multiple": (32, [(OFFLINE, 10, 31)], None),
    "online leaves 4 of 100": (32, [(ONLINE, 1010, 100)], [96]),
    "online leaves 4 of 68": (32, [(ONLINE, 1010, 68)], [64]),
    "online leaves no larger part": (32, [(ONLINE, 1010, 69)], None),
    "online takes a step more": (32, [(ONLINE, 1032, 516)], None),
    "online takes no step more": (32, [(ONLINE, 1028, 516)], [512]),
}  # fmt: skip
"""The multiple, each request with its tokens and its grant, and the grants that are left; None for the same plan."""


@pytest.mark.parametrize("case", EVEN)
def test_a_step_has_a_multiple_of_the_tokens_where_a_prompt_can_be_shorter(case: str):
    multiple, grants, expected = EVEN[case]
    requests = [
        make_request(seq, kind, num_tokens=10 + tokens, num_cached=10) for seq, (kind, tokens, _) in enumerate(grants)
    ]
    plan = StepPlan(grants=tuple((record, given) for record, (_, _, given) in zip(requests, grants, strict=True)))

    found = even_step(plan, multiple)

    assert found.grants == (plan.grants if expected is None else tuple(zip(requests, expected, strict=True)))


@pytest.mark.parametrize("phase", [RUNNING, PARKED])
def test_a_resident_prompt_ends_with_its_last_token(phase: Phase):
    prompt = make_request(1, ONLINE, num_tokens=600, num_computed=80, phase=phase)

    assert even_step(plan := StepPlan(grants=((prompt, 520),)), 32) is plan
    assert even_step(StepPlan(grants=((prompt, 516),)), 32).grants == ((prompt, 512),)
