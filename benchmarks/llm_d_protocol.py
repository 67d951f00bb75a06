"""Replay the benchmark of llm-d's batch gateway in the simulator: its scenarios beside Ballast, in one table.

    python benchmarks/llm_d_protocol.py --plot docs/images/llm-d-protocol.png
    python benchmarks/llm_d_protocol.py --quick

Interactive traffic comes in cycles: 90 s idle at 1 request/s, then a burst of 90 s. Prompts have 512 tokens, answers
128. Three jobs of 1,000 batch requests wait from the start, with windows of 30 minutes, 2 hours and 24 hours: 512
tokens of prompt, lognormal answers (mean 500, standard deviation 400, at most 2,048), five system prompts. A run lasts
10 cycles, and more until the jobs are done.

- S0: interactive only. S1: batch requests are sent as ordinary ones, at a constant rate. S6: a gateway sends a small
  fixed number of them at a time. All three run on one first-come queue, as vLLM schedules by default.
- priorities: all batch requests wait in the engine, with vLLM's lower priority.
- ballast: SLO mode. The SLO is 1.25 times the p99 of TTFT and ITL in S0, from the same run of this program.
  ballast-alone is the same without jobs: what differs from S0 in it is how Ballast schedules interactive requests.
  In ballast-unsuspended no step is suspended, as inside vLLM.

Latencies are of requests that arrive in the bursts of measured cycles: all but the first two. TTFT counts from arrival.
ITL is the inter-token latency as guidellm reports it: the mean gap between two tokens of one request. Percentiles are
over requests. The jobs run early, so most measured bursts have no batch work beside them. The
column "beside batch" is about the requests that arrived in any burst while a job was unfinished, warm-up included:
their TTFT p99 and ITL p99 over those of S0. The goal counts in both.

Step times are those of gpt-oss-120b on an A100 (`llm_d.experts`), calibrated on the published rows without batch
work; the last table shows the errors of these and of all other rows. KV cache: 80 GiB x 0.9, less the weights, less
2 GB for activations; 36 layers, 8 KV heads, head dimension 64, 16 bits. The 18 layers with sliding-window attention
keep 128 tokens, as in vLLM. The length of the system prompts is not published: 64 tokens are assumed. The simulator has
neither a network nor vLLM's asynchronous scheduling, and adds nothing to TTFT for them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from llm_d.calibration import calibrate, check
from llm_d.picture import column, draw
from llm_d.protocol import SCENARIOS, UNSUSPENDED, Case, Outcome, Protocol, run
from llm_d.table import FACTOR, as_json, p99, print_rows


def main() -> int:
    """Run all scenarios; the exit status is 1 if Ballast misses the goal."""
    options = parser().parse_args()
    if options.calibrate:
        calibrate()
        return 0
    begun = time.perf_counter()
    found: list[dict[str, object]] = []
    pictures = []
    is_met = True
    for arrivals, replicas in product(options.arrivals, options.replicas):
        rows = measure(options, arrivals, replicas)
        slo = next((row.case for row in rows if row.case.scenario in ("ballast", UNSUSPENDED)), None)
        told = f"; SLO of Ballast: TTFT {1e3 * slo.ttft:.1f} ms, TPOT {1e3 * slo.tpot:.1f} ms" if slo else ""
        print(f"\n{arrivals} arrivals, {replicas} replica(s), bursts of {Protocol().burst_rate:g} requests/s, ms{told}")
        print_rows(rows)
        found += [as_json(row, rows[0]) for row in rows]
        is_met &= not any(row["missed"] for row in found if row["scenario"] == "ballast")
        if arrivals == options.arrivals[0]:
            pictures.append(column(rows))
    print(f"\nGoal: p99 of TTFT and ITL at most {FACTOR:g} times S0; jobs done within 12 min on one replica, 10 on two")
    checks = check(is_quick=options.quick) if options.check else []
    print(f"\n{time.perf_counter() - begun:.0f} s, {time.process_time():.0f} s of CPU time in this process")
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "published": checks}, indent=2) + "\n")
    if options.plot:
        draw(pictures, options.plot)
    return 0 if is_met else 1


def measure(options: argparse.Namespace, arrivals: str, replicas: int) -> list[Outcome]:
    """Run every scenario; S0 goes first, because the SLO follows from it."""
    protocol = Protocol(
        phase_seconds=options.phase,
        cycles=options.cycles,
        warmup_cycles=min(options.warmup, options.cycles - 1),
        items=options.items,
        is_poisson=arrivals == "poisson",
        most_cycles=max(options.cycles, 8 if options.quick else Protocol().most_cycles),
    )
    alone = run(Case("S0", replicas, protocol))
    if alone.failure:
        raise SystemExit(f"interactive traffic alone failed: {alone.failure}")
    promise = (FACTOR * p99(alone.ttft), FACTOR * p99(alone.itl))
    others = [Case(name, replicas, protocol, *promise) for name in options.scenario if name != "S0"]
    return [alone, *run_all(others, options.processes)]


def run_all(cases: Iterable[Case], processes: int) -> Iterator[Outcome]:
    """Run cases, several at a time if asked; outcomes come in the order of the cases."""
    if processes == 1:
        yield from map(run, cases)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(run, cases)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--replicas", type=_numbers, default=[1, 2], metavar="N,...")
    add("--arrivals", type=_words("constant", "poisson"), default=["constant", "poisson"], metavar="KIND,...")
    add("--scenario", type=_words(*SCENARIOS), default=list(SCENARIOS), metavar="NAME,...", help=", ".join(SCENARIOS))
    add("--cycles", type=int, default=10, help="cycles of 180 s, warm-up included")
    add("--warmup", type=int, default=2, help="cycles at the start whose latencies do not count")
    add("--phase", type=float, default=90.0, help="seconds of an idle phase and of a burst")
    add("--items", type=int, default=1000, help="requests of each job")
    add("--processes", type=int, default=1, help="runs at a time")
    add("--no-check", dest="check", action="store_false", help="leave out the check against published rows")
    add("--calibrate", action="store_true", help="only fit the step times to the published rows again")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    add("--quick", action="store_true", help="constant arrivals and 4 cycles (unless options say otherwise)")
    if "--quick" in sys.argv:
        made.set_defaults(arrivals=["constant"], cycles=4, warmup=1)
    return made


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(*known: str) -> object:
    def split(text: str) -> list[str]:
        found = text.split(",")
        if set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r}; known are {', '.join(known)}")
        return found

    return split


if __name__ == "__main__":
    sys.exit(main())
