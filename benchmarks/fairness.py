"""Measure the fairness of tenants: the arena trace on one overloaded engine, in the simulator.

Each tenant of the trace has an endless job of its requests, so that every tenant always waits. Online conversations run
at the same time. For the tenants without a reservation, the output has Jain's index of the service over weight, the
largest difference between a share and the share by weight, the widest difference in service between two tenants, and
the proven bound of that difference. For a reservation, it has the share of the service.

python benchmarks/fairness.py --minutes 10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ballast_cli.demo.traffic import ONLINE_TRACE
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.replay.fairness import jain, most_ahead, service_gap
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.step_model import REFIT_A100
from ballast_sim.replay.traffic import Arrival, excerpt, read


@dataclass(frozen=True)
class Case:
    """How tenants are set up in one run."""

    name: str
    shares: dict[str, TenantShare]
    online_tokens: float = 0.0
    """Online tokens per second."""


def cases(tenants: Sequence[str]) -> list[Case]:
    """Return the cases: equal weights, weights from 1 to 4, and one tenant that reserves a third of the slots."""
    weights = {name: TenantShare(weight=1.0 + i % 4) for i, name in enumerate(tenants)}
    return [
        Case("equal weights", {}),
        Case("equal weights with online", {}, online_tokens=2000.0),
        Case("weights 1 to 4", weights),
        Case("weights 1 to 4 with online", weights, online_tokens=2000.0),
        Case("a third reserved", {tenants[0]: TenantShare(reserved=1 / 3)}),
    ]


def run(case: Case, lengths: dict[str, list[Arrival]], conversations: list[Arrival], minutes: float) -> Run:
    """Simulate one case."""
    seconds = 60 * minutes
    return simulate(
        Scenario(
            config=PolicyConfig(
                slots=64, num_blocks=440_000 // 16, offline_share=0.1, ttft=1.0, tpot=0.05, tenants=case.shares
            ),
            model=REFIT_A100,
            policy=Ballast,
            online=excerpt(conversations, case.online_tokens, seconds) if case.online_tokens else (),
            offline=lambda: [SimulatedJob.endless(name, items, tenant=name) for name, items in lengths.items()],
            seconds=seconds,
            warmup_seconds=seconds / 5,
            cost=REFIT_A100,
        )
    )


def describe(case: Case, found: Run, lengths: dict[str, list[Arrival]]) -> str:
    """Return the figures of a case as one line."""
    start = found.scenario.warmup_seconds
    samples = found.service.after(start)
    weights = {name: case.shares.get(name, TenantShare()).weight for name in lengths}
    always = set(samples[0]).intersection(*samples)
    service = {name: (samples[-1][name] - samples[0][name]) * weights[name] for name in lengths if name in always}
    plain = [name for name in service if not case.shares.get(name, TenantShare()).reserved]
    total = sum(service[name] for name in plain)
    whole = sum(weights[name] for name in plain)
    off = max(abs(service[name] / total / (weights[name] / whole) - 1) for name in plain)
    alike = [{name: sample[name] for name in plain if name in sample} for sample in samples]
    items = [item for each in lengths.values() for item in each]
    bound = 2 * most_ahead(
        found.scenario.config.slots,
        max(item.num_prompt for item in items),
        max(item.num_output for item in items),
        min(weights.values()),
    )
    line = (
        f"{case.name:30} {len(always)} of {len(lengths)} always waited  Jain {jain(alike):.4f}  "
        f"furthest share {off:5.2%} off  gap {service_gap(alike):6,.0f} of at most {bound:8,.0f}"
    )
    for name in service.keys() - plain:
        line += f"  {name}: {service[name] / sum(service.values()):.1%} of the service"
    return line


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    lengths: dict[str, list[Arrival]] = {}
    for arrival in read(ONLINE_TRACE.with_name("vtc_arena.csv")):
        lengths.setdefault(arrival.tenant, []).append(arrival)
    conversations = read(ONLINE_TRACE)
    for case in cases(list(lengths)):
        print(describe(case, run(case, lengths, conversations, options.minutes), lengths), flush=True)


if __name__ == "__main__":
    main()
