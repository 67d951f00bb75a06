"""LoRA adapters in EngineCore: the requests that hold KV use at most `max_loras` of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bare_core import BareCore


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

    assert core.scheduler.ballast_stats()["classes"]["online"]["waiting"] == 4
    ends = run(core)
    assert all(ends[request_id] < 10 for request_id in others)
    assert all(ends[request_id] > 95 for request_id in waiting)


def test_an_aborted_request_without_a_place_is_forgotten(tiny_model: Path) -> None:
    core = make_core(tiny_model)
    core.add(prompt=16, output=10, adapter=1)
    core.step()
    core.abort(core.add(prompt=16, adapter=2))

    assert len(run(core)) == 2
