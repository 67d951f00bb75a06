"""LoRA adapters in EngineCore: the requests that the policy knows use at most `max_loras` of them."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from bare_core import BareCore

from ballast_vllm.driver import HELD_UP_SECONDS


def make_core(model: Path, *, places: int = 1, **arguments: Any) -> BareCore:
    return BareCore(model, enable_lora=True, max_loras=places, max_lora_rank=8, **{"slots": 4} | arguments)


def run(core: BareCore, *, most: int = 3000) -> dict[str, int]:
    """Step until nothing is left; return the step in which each request ended, counted from now."""
    first, ends = core.num_steps, dict.fromkeys(core.ended, 0)
    while not core.is_idle:
        core.step()
        core.check()
        for request_id in core.ended - ends.keys():
            ends[request_id] = core.num_steps - first
        assert core.num_steps < first + most
    core.check_idle()
    return ends


@pytest.mark.parametrize(
    ("slots", "policy", "arguments"),
    [
        pytest.param(4, {"offline_share": 0.1}, {}, id="a share of offline runs on"),
        pytest.param(8, {"offline_share": 0.1, "ttft": 0.8, "tpot": 0.06}, {"is_async": True}, id="with SLO"),
        pytest.param(2, {"offline_share": 0.0}, {}, id="all of offline is parked"),
        pytest.param(4, {"offline_share": 0.1}, {"is_async": True, "has_v2_runner": True}, id="the V2 model runner"),
    ],
)
@pytest.mark.parametrize("places", [1, 2])
def test_parked_requests_keep_the_place_of_their_adapter(
    tiny_model: Path, places: int, slots: int, policy: dict[str, Any], arguments: dict[str, Any]
) -> None:
    core = make_core(tiny_model, places=places, slots=slots, policy=policy, **arguments)
    for i in range(slots):
        core.add("offline", prompt=16, output=100, adapter=1 if i == 0 or places == 1 else 3)
    for _ in range(5):
        core.step()
    for i in range(slots):
        core.add("online", prompt=16, output=10 + 10 * i, adapter=2)

    assert len(run(core)) == 2 * slots


def test_requests_whose_adapter_has_no_place_hold_up_no_others(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add(prompt=16, output=100, adapter=1)
    core.step()
    waiting = [core.add(prompt=16, output=4, adapter=2) for _ in range(4)]
    others = [core.add(prompt=16, output=4, adapter=adapter) for adapter in (0, 1, 0)]
    core.step()

    assert core.scheduler.ballast_stats()["stats"].online.waiting == 4
    ends = run(core)
    assert all(ends[request_id] < 10 for request_id in others)
    assert all(ends[request_id] > 95 for request_id in waiting)


def test_an_aborted_request_without_a_place_is_forgotten(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add(prompt=16, output=10, adapter=1)
    core.step()
    core.abort(core.add(prompt=16, adapter=2))

    assert len(run(core)) == 2


def test_an_online_request_takes_the_place_of_an_offline_adapter(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    for _ in range(40):
        core.add("offline", prompt=16, output=40, adapter=1)
    for _ in range(5):
        core.step()
    online = core.add(prompt=16, output=5, adapter=2)

    ends = run(core)
    assert ends[online] < 8
    assert len(ends) == 41
    assert core.scheduler.ballast_stats()["stats"].offline.preemptions == {"slot_reclaimed": 4}


def test_an_offline_request_that_draws_its_last_token_is_not_preempted_for_the_place_of_its_adapter(
    tiny_model: Path,
) -> None:
    core = make_core(tiny_model, is_async=True)
    last = core.add("offline", prompt=16, output=3, adapter=1)
    while core.scheduler.driver.records[last].remaining or not core.num_steps:
        core.step()
    online = core.add(prompt=16, output=5, adapter=2)

    ends = run(core)
    assert ends[last] < ends[online] < 10
    assert core.scheduler.ballast_stats()["stats"].offline.preemptions == {}


def test_the_offline_adapter_with_the_fewest_computed_tokens_gives_up_its_place(tiny_model: Path) -> None:
    core = make_core(tiny_model, places=3)
    core.add("offline", prompt=200, output=40, adapter=1)
    least = core.add("offline", prompt=16, output=40, adapter=2)
    core.add(prompt=8, output=40, adapter=3)
    for _ in range(3):
        core.step()
    core.add(prompt=16, output=40, adapter=4)
    core.step()

    waiting = [request.request_id for request in core.scheduler.waiting]
    assert waiting == [least]
    run(core)


def test_a_stream_of_online_requests_leaves_its_place_to_an_older_request(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add("offline", prompt=16, output=200, adapter=1)
    core.add(prompt=16, output=20, adapter=1)
    core.step()
    other = core.add(prompt=16, output=5, adapter=2)
    for _ in range(20):
        core.step()
        core.add(prompt=16, output=20, adapter=1)
    while other not in core.ended:
        core.step()

    assert core.num_steps < 40
    run(core)


def test_a_free_place_goes_to_the_request_with_the_highest_priority(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add(prompt=16, output=10, adapter=1)
    core.step()
    low, high = (core.add(prompt=16, output=4, adapter=2 + priority, priority=priority) for priority in (0, 1))

    ends = run(core)
    assert ends[high] < ends[low]


def test_offline_requests_behind_those_of_another_adapter_wait_for_them(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    first = core.add("offline", prompt=16, output=20, adapter=1)
    core.step()
    other = core.add("offline", prompt=16, output=20, adapter=2)
    core.step()
    last, base = core.add("offline", prompt=16, adapter=1), core.add("offline", prompt=16, output=5)

    ends = run(core)
    assert sorted((first, other, last), key=ends.__getitem__) == [first, other, last]
    assert ends[base] < ends[first]


def test_offline_requests_share_the_place_of_an_online_request_meanwhile(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add(prompt=16, output=100, adapter=1)
    core.add("offline", prompt=16, output=5, adapter=2)
    core.step()
    shared = core.add("offline", prompt=16, output=5, adapter=1)

    assert run(core)[shared] < 20


def held_up(core: BareCore) -> tuple[list[str], bool]:
    """Return the requests that have waited for some time and are held up, and whether the reservation is met."""
    with mock.patch.object(core.scheduler, "clock", return_value=time.monotonic() + 2 * HELD_UP_SECONDS):
        found = core.scheduler.ballast_stats()
    assert found["stats"].offline.held_up == len(found["held_up"])
    return found["held_up"], found["stats"].is_reservation_met


def test_offline_requests_are_held_up_while_online_requests_hold_all_places(tiny_model: Path) -> None:
    tenants = {"capped": {"max_slots": 1}}
    core = make_core(tiny_model, slots=8, policy={"offline_share": 0.25, "tenants": tenants})
    rotating = core.add("offline", prompt=16, output=10, adapter=1)
    other = core.add("offline", prompt=16, output=100, adapter=2, tenant="capped")
    core.step()
    found = [held_up(core)]
    core.abort(rotating)
    core.abort(other)
    for _ in range(2):
        core.step()
    core.add(prompt=16, output=100, adapter=1)
    core.step()
    other = core.add("offline", prompt=16, output=4, adapter=2, tenant="capped")
    core.add(prompt=16, output=4, adapter=3)  # an online request that waits is not held up by others
    core.step()
    found.append(held_up(core))
    core.add("offline", prompt=16, output=10, tenant="capped")
    for _ in range(2):
        core.step()
    found.append(held_up(core))
    core.add("offline", prompt=16, output=10)
    another = core.add("offline", prompt=16, output=4, adapter=2)
    for _ in range(2):
        core.step()
    found.append(held_up(core))  # two others run in the two reserved slots

    assert found == [([], True), ([other], False), ([other], True), ([other, another], True)]
    assert core.scheduler.ballast_stats()["held_up"] == [], "it waits for a moment only so far"
    run(core)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_v2_runner", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_any_mix_of_adapters_is_answered(tiny_model: Path, seed: int, is_async: bool, has_v2_runner: bool) -> None:
    rng = Random(seed)
    policy = {"offline_share": rng.choice((0.0, 0.1, 0.5)), "ttft": 0.8, "tpot": 0.06}
    arguments = {
        "is_async": is_async,
        "has_v2_runner": has_v2_runner,
        "policy": policy,
        "blocks": rng.choice((60, 400)),
    }
    core = make_core(tiny_model, places=rng.randint(1, 2), **arguments)
    outputs: dict[str, int] = {}
    for _ in range(250):
        while rng.random() < 0.3:
            output, kind = rng.randint(1, 40), rng.choice(("online", "offline"))
            place = {"priority": rng.randint(-1, 1), "adapter": rng.randint(0, 3), "prompt": rng.randint(4, 120)}
            outputs[core.add(kind, output=output, **place)] = output
        if rng.random() < 0.05 and (alive := sorted(outputs.keys() - core.ended)):
            core.abort(aborted := rng.choice(alive))
            del outputs[aborted]
        core.step()
        core.check()
    run(core)

    assert {request_id: core.answers[request_id] for request_id in outputs} == outputs
