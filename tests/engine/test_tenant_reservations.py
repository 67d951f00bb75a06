from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from engine_bench import make_bench, make_generation

from ballast_policy.request import Phase
from ballast_policy.snapshot import TenantShare


def slots_of(bench: Any) -> Counter[str]:
    requests = bench.engine.requests.values()
    return Counter(request.tenant for request in requests if request.phase is Phase.RUNNING)


def test_a_reservation_is_hot_and_takes_vacant_slots_first() -> None:
    """Eight slots; `a` has next to no weight, so it gets one slot after all the others without a reservation."""
    light = {"a": TenantShare(weight=0.001), "b": TenantShare()}
    bench = make_bench(num_blocks=200, chunk_tokens=64, tenants=light)
    for index in range(100):
        for tenant in "ab":
            request = make_generation(
                f"{tenant}{index}", online=False, tenant=tenant, max_tokens=3 + index % 5, ignore_eos=True
            )
            bench.engine.submit(request)
    bench.step(20)
    assert slots_of(bench)["a"] <= 1
    bench.engine.configure(replace(bench.engine.policy, tenants={**light, "a": TenantShare(0.001, reserved=0.5)}))
    bench.step(15)

    held = slots_of(bench)
    assert held["a"] >= 0.5 * sum(held.values()) - 1, "whoever ended in the last step left its slot vacant"
    bench.run()
