"""Measure the effect of admission by the predicted peak if KV is short: throughput, and tokens computed again.

Offline work (arXiv lengths, never empty) runs with a share of online work (Azure conversations) on an A100 with
Llama-3-8B in the simulator. Offline requests have the lengths of the trace exchanged: short prompts, long answers. The
length of an answer is not known in advance. Three rules run with the same traffic and seed:

- `longest`: the predicted peak, as if every answer had its longest possible length.
- `tail`: 64 tokens for every request, which is the rule of the policy before it knows lengths.
- `ballast`: the predicted peak by the usual lengths of answers.

python benchmarks/kv_admission.py --kv-tokens 440000,220000,110000 --load 0,40
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.plan import StepPlan
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.step_model import REFIT_A100
from ballast_sim.replay.traffic import Arrival, excerpt, read, read_lengths

ALONE_TOKENS_PER_SECOND = 8_000.0
"""Tokens per second at a load of 100 %: about the SLO-bound throughput at a TPOT of 50 ms."""
RULES = ("longest", "tail", "ballast")


class Ruled:
    """The policy, with one of the rules for the lengths of answers."""

    def __init__(self, rule: str) -> None:
        self._rule = rule

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""
        if self._rule == "ballast":
            return plan(snapshot)
        unknown = replace(snapshot, expectation=replace(snapshot.expectation, outputs={}, unknown_share=0.0))
        if self._rule == "tail":
            return plan(unknown)
        return plan(replace(unknown, config=replace(snapshot.config, tail_tokens=1 << 30)))


def run(rule: str, online: list[Arrival], offline: list[Arrival], kv_tokens: int, minutes: float) -> Run:
    """Simulate one rule."""
    config = PolicyConfig(
        slots=256, num_blocks=kv_tokens // 16, chunk_tokens=512, offline_share=0.0, ttft=1.0, tpot=0.05
    )
    scenario = Scenario(
        config=config,
        model=REFIT_A100,
        policy=partial(Ruled, rule),
        online=online,
        offline=lambda: [SimulatedJob.endless("offline", offline)],
        seconds=60 * minutes,
        warmup_seconds=20 * minutes,
        cost=REFIT_A100,
    )
    return simulate(scenario)


def wasted_share(run: Run) -> float:
    """Return the share of all computed tokens that were computed again after a preemption."""
    steps = [step for replica in run.replicas for step in replica.steps]
    computed = sum(s.online_prefill + s.offline_prefill + s.online_decode + s.offline_decode for s in steps)
    return sum(item.num_recomputed for item in (*run.online, *run.offline)) / max(computed, 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-tokens", default="440000,220000,110000")
    parser.add_argument("--load", default="0,40", help="online loads in percent")
    parser.add_argument("--minutes", type=float, default=20, help="a third of it is warm-up")
    options = parser.parse_args()
    trace, lengths = read(ONLINE_TRACE), read_lengths(OFFLINE_TRACE)
    offline = [replace(item, num_prompt=item.num_output, num_output=item.num_prompt) for item in lengths]
    print("KV tokens  load  rule     tokens/s  offline/s  computed again  preempted  TTFT p50    p99     met  TPOT met")
    for kv_tokens in map(int, options.kv_tokens.split(",")):
        for load in map(float, options.load.split(",")):
            rate = load / 100 * ALONE_TOKENS_PER_SECOND
            online = excerpt(trace, rate, 60 * options.minutes) if load else []
            for rule in RULES:
                found = run(rule, online, offline, kv_tokens, options.minutes)
                result, num_preempted = report(found), found.replicas[0].num_preempted
                print(
                    f"{kv_tokens:9,}  {load:3.0f}%  {rule:8} {result.total_tokens:8,.0f}  "
                    f"{result.offline.total:9,.0f}  {wasted_share(found):14.2%}  {num_preempted:9} "
                    f"{1e3 * result.ttft.p50:6.0f} ms {1e3 * result.ttft.p99:5.0f} ms {result.ttft_attainment:6.2%}  "
                    f"{result.tpot_attainment:7.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
