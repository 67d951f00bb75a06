"""Plans are changed where vLLM computes prompts in one piece, or some sizes of a step faster."""

from __future__ import annotations

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, Request, RequestClass
from ballast_vllm.plan_limits import even_step, whole_prompts


def make_request(seq: int, request_class: RequestClass = OFFLINE, **values: object) -> Request:
    return Request(seq, request_class, arrival=0.0, num_prompt=10, max_output=9, **values)


def test_a_chunk_becomes_the_whole_prompt_and_the_rest_waits():
    first, second, third = (make_request(i, num_tokens=n) for i, n in ((1, 60), (2, 60), (3, 30)))
    plan = StepPlan(grants=((first, 60), (second, 10), (third, 5)), admit=(first, second, third))

    found = whole_prompts(plan, 100)

    assert found.grants == ((first, 60), (third, 30))
    assert found.admit == (first, third)


def test_a_step_has_a_multiple_of_the_tokens_where_an_offline_prompt_can_be_shorter():
    decode, online = make_request(1, ONLINE), make_request(2, ONLINE)
    whole, cut = make_request(3), make_request(4)
    plan = StepPlan(grants=((decode, 1), (online, 40), (whole, 30), (cut, 20)))

    assert even_step(plan, 32).grants == ((decode, 1), (online, 40), (whole, 3), (cut, 20))
    assert even_step(plan, 7) is plan
    assert even_step(plan, 16).grants == ((decode, 1), (online, 40), (whole, 30), (cut, 9))


def test_an_online_prompt_is_shorter_only_if_it_does_not_end_in_this_step():
    decode, ends = make_request(1, ONLINE), make_request(2, ONLINE, num_tokens=40)
    goes_on = make_request(3, ONLINE, num_tokens=90, num_cached=10)

    plan = StepPlan(grants=((decode, 1), (ends, 40), (goes_on, 79)))
    assert even_step(plan, 32).grants == ((decode, 1), (ends, 40), (goes_on, 55))

    offline = make_request(4, num_tokens=80)
    plan = StepPlan(grants=((offline, 30), (ends, 40), (goes_on, 79)))
    assert even_step(plan, 32).grants == ((offline, 9), (ends, 40), (goes_on, 79))

    plan = StepPlan(grants=((ends, 40), (goes_on, 80)))
    assert even_step(plan, 32) is plan


def test_no_first_token_and_no_request_leaves_a_step_for_its_size():
    decode, online, short = make_request(1), make_request(2, ONLINE, num_tokens=70), make_request(3)
    plan = StepPlan(grants=((decode, 1), (online, 70), (short, 7)))

    assert even_step(plan, 64) is plan


def test_a_step_of_less_than_the_multiple_stays():
    plan = StepPlan(grants=((make_request(1), 31),))

    assert even_step(plan, 32) is plan
