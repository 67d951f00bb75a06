"""Plans are changed where vLLM holds fewer requests, or computes prompts in one piece."""

from __future__ import annotations

from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, Request, RequestClass
from ballast_vllm.plan_limits import even_step, limit_residents, whole_prompts


def make_request(seq: int, request_class: RequestClass = OFFLINE, **values: object) -> Request:
    return Request(seq, request_class, arrival=0.0, num_prompt=10, max_output=9, **values)


def test_a_plan_within_the_limit_stays():
    residents = [make_request(i, phase=RUNNING) for i in range(3)]
    plan = StepPlan(admit=(make_request(9),))

    assert limit_residents(plan, residents, 4) is plan


def test_parked_requests_with_the_least_work_are_preempted_for_a_slot_of_vllm():
    online = make_request(1, ONLINE, phase=PARKED, num_computed=5)
    short, long = make_request(2, phase=PARKED, num_computed=10), make_request(3, phase=RUNNING, num_computed=99)
    plan = StepPlan(park=(long,), admit=(make_request(8), make_request(9)))

    found = limit_residents(plan, [online, short, long], 3)

    assert (found.preempt, found.park) == ((short, long), ())
    assert [(because.request, because.reason) for because in found.because] == [
        (short, Reason.NO_SLOT),
        (long, Reason.NO_SLOT),
    ]


def test_a_resumed_or_preempted_request_is_no_victim():
    resumed, gone = make_request(1, phase=PARKED), make_request(2, phase=PARKED)
    third = make_request(3, phase=PARKED, num_computed=50)
    plan = StepPlan(resume=(resumed,), preempt=(gone,), admit=(make_request(9),))

    assert limit_residents(plan, [resumed, gone, third], 2).preempt == (gone, third)


def test_the_last_admissions_wait_for_the_places_of_requests_that_are_ending():
    running, parked = make_request(1, phase=RUNNING), make_request(2, phase=PARKED)
    first, second = make_request(3, ONLINE), make_request(4)
    plan = StepPlan(admit=(first, second), grants=((running, 1), (first, 10), (second, 10)))

    found = limit_residents(plan, [running, parked], 4, num_leaving=1)

    assert (found.admit, found.grants) == ((first,), ((running, 1), (first, 10)))
    assert found.preempt == (), "its place would be free one step later in any case"
    assert [(because.request, because.reason) for because in found.because] == [(second, Reason.NO_SLOT)]
    assert limit_residents(plan, [running, parked], 4) is plan


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


def test_no_online_token_and_no_request_leaves_a_step_for_its_size():
    online, decode, short = make_request(1, ONLINE), make_request(2), make_request(3)
    plan = StepPlan(grants=((online, 70), (decode, 1), (short, 7)))

    assert even_step(plan, 64) is plan


def test_a_step_of_less_than_the_multiple_stays():
    plan = StepPlan(grants=((make_request(1), 31),))

    assert even_step(plan, 32) is plan
