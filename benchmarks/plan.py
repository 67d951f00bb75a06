"""Measure a decision: microseconds of `plan` and of `Host.snapshot`, which do not grow with the backlog.

There are two kinds of steps. Calm: all residents decode, the batch is full, and nothing else fits. Busy: online
requests arrive while slots are free, 27 tenants differ in service, the budget is short, and some requests are parked.
In the last rows the step is busy, and tenants have reservations or caps, or the lengths of answers are known.
Run: `python benchmarks/plan.py`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from time import perf_counter, thread_time

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import UNKNOWN, Expectation
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig, TenantShare
from ballast_policy.step.planner import plan
from ballast_sim.replay.kv import SimulatedKv

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
COST = CostModel(0.005, 5e-5, 1e-9, 5e-5, 2e-9, is_trusted=True)
TENANTS = 27
ANSWERS = dict.fromkeys(RequestClass, tuple(range(2, 514, 2)))


def make_shares(num_tenants: int, reserved: float = 0.0, max_slots: int | None = None) -> dict[str, TenantShare]:
    """Return equal shares for `num_tenants` tenants."""
    return {f"tenant-{seq}": TenantShare(reserved=reserved, max_slots=max_slots) for seq in range(num_tenants)}


NO_SHARES: Mapping[str, TenantShare] = {}
VARIANTS = {
    "2 reserve": (make_shares(2, reserved=0.25), UNKNOWN),
    "27 reserve": (make_shares(TENANTS, reserved=0.5 / TENANTS), UNKNOWN),
    "27 capped": (make_shares(TENANTS, max_slots=5), UNKNOWN),
    "lengths": (NO_SHARES, Expectation(ANSWERS)),
}


def make_resident(seq: int, request_class: RequestClass, *, tenants: int, block_tokens: int) -> Request:
    """Return a request in the middle of its answer; one in sixteen begins a block."""
    computed = 300 + seq * 7 % 160
    blocks = -(-computed // block_tokens)
    return Request(
        seq=seq,
        request_class=request_class,
        arrival=100.0 - seq % 10 / 10,
        num_prompt=256,
        max_output=512,
        tenant=f"tenant-{seq % tenants}",
        ttft=1.0 if request_class is ONLINE else float("inf"),
        tpot=0.1 if request_class is ONLINE else float("inf"),
        num_tokens=computed + 1,
        num_computed=computed,
        num_output=computed + 1 - 256,
        num_blocks=blocks,
        num_private_blocks=blocks,
    )


def make_snapshot(
    residents: int,
    waiting: int,
    *,
    busy: bool,
    shares: Mapping[str, TenantShare] = NO_SHARES,
    expectation: Expectation = UNKNOWN,
) -> Callable[[], EngineSnapshot]:
    """Return a function that takes the snapshot of such an engine, as an engine does in every step."""
    tenants = TENANTS if busy else 1
    free_slots = residents // 8 if busy else 0
    config = PolicyConfig(slots=residents + free_slots, num_blocks=residents * 64, ttft=1.0, tpot=0.1, tenants=shares)
    cost = CostModel(0.005, 5e-5, 1e-9, 5e-4, 2e-9, is_trusted=True) if busy else COST
    host = Host(config, cost=cost)
    for seq in range(residents):
        request_class = ONLINE if seq % 4 == 0 else OFFLINE
        request = make_resident(seq, request_class, tenants=tenants, block_tokens=config.block_tokens)
        host.enter(request, 100.0)
        host.admit(request)
        if busy and seq % 9 == 1:
            host.park(request)
    for seq in range(residents, residents + waiting):
        request_class = ONLINE if busy and seq % 50 == 0 else OFFLINE
        request = Request(seq, request_class, 100.0, 200, 200, tenant=f"tenant-{seq % tenants}", num_tokens=200, ttft=1)
        host.enter(request, 100.0)
    for seq in range(tenants):
        host.ledgers[OFFLINE].charge(f"tenant-{seq}", seq * 100.0)
    host.expectations.typical_prompt = 200
    host.expectations.expectation = expectation
    kv = SimulatedKv(config.num_blocks, config.block_tokens, {})
    kv.num_free = residents * 20
    return lambda: host.snapshot(kv, 100.1)


def measure(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return the median and the 99th percentile of a call, in microseconds of this thread's CPU time."""
    samples = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(samples) < 100:
        start = thread_time()
        call()
        samples.append(thread_time() - start)
    return median(samples) * 1e6, quantiles(samples, n=100)[98] * 1e6


def show(label: str, take: Callable[[], EngineSnapshot], seconds: float) -> None:
    """Print one row."""
    snapshot = take()
    plans, plan_p99 = measure(lambda: plan(snapshot), seconds)
    snapshots, snapshot_p99 = measure(take, seconds)
    print(f"{label} {plans:9.0f} {plan_p99:7.0f} {snapshots:12.0f} {snapshot_p99:7.0f} {len(plan(snapshot).grants):7}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each figure")
    seconds = parser.parse_args().seconds
    gc.disable()
    print("            residents  waiting   plan us     p99  snapshot us     p99  grants")
    for busy in (False, True):
        for residents in (16, 64, 256):
            for waiting in (0, 100, 1000, 10000):
                take = make_snapshot(residents, waiting, busy=busy)
                show(f"{'busy' if busy else 'calm':11} {residents:9} {waiting:8}", take, seconds)
    for name, (shares, expectation) in VARIANTS.items():
        take = make_snapshot(256, 1000, busy=True, shares=shares, expectation=expectation)
        show(f"{name:11} {256:9} {1000:8}", take, seconds)


if __name__ == "__main__":
    main()
