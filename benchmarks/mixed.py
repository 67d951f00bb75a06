"""Print Ballast beside the baselines on the same traffic: latency lost, tokens won.

    python benchmarks/mixed.py --load 20,40,60 --reservation 0,10 --minutes 10 --json rows.json

By default the Azure conversation trace over the arXiv lengths on the published A100 times of Llama-3-8B (the monotone
refit), 256 slots, 440,000 tokens of KV. A load is a share of the SLO-bound ceiling.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.hardware import GPUS
from ballast_sim.mixed import POLICIES, Bench, Row, as_json
from ballast_sim.shape import SHAPES
from ballast_sim.step_model import REFIT_A100, PublishedA100, Roofline, StepModel
from ballast_sim.traffic import read, read_lengths

STEP_MODELS: dict[str, StepModel] = {
    "refit": REFIT_A100,
    "published": PublishedA100(),
    "roofline": Roofline(SHAPES["llama-3-8b"], GPUS["a100"]),
}


def numbers(text: str) -> list[float]:
    """Percentages, separated by commas, as fractions."""
    return [float(part) / 100 for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--online", type=Path, default=ONLINE_TRACE, metavar="TRACE")
    parser.add_argument("--offline", type=Path, default=OFFLINE_TRACE, metavar="LENGTHS")
    parser.add_argument("--load", type=numbers, default="20,40,60", help="percent of the SLO-bound ceiling")
    parser.add_argument("--reservation", type=numbers, default="0", help="percent of slots and KV for offline")
    parser.add_argument("--ttft-ms", type=float, default=1000)
    parser.add_argument("--tpot-ms", type=float, default=50)
    parser.add_argument("--policy", default="all", help=f"all, or some of {', '.join(POLICIES)}")
    parser.add_argument("--minutes", type=float, default=10, help="traffic that each run replays")
    parser.add_argument("--chunk", type=int, default=512, help="Ballast's prefill tokens in a step")
    parser.add_argument("--step-model", choices=STEP_MODELS, default="refit")
    parser.add_argument("--fitted", action="store_true", help="Ballast fits its cost model during the run")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of step times (standard deviation of the log)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


HEADER = (
    f"{'policy':15} {'TTFT p50':>9} {'vs alone':>8} {'p99':>7} {'vs alone':>8} {'met':>7} {'lost':>6}  "
    f"{'TPOT p50':>8} {'p99':>7} {'met':>7} {'envelope':>8}  {'offline/s':>9} {'total/s':>8} {'of bound':>8} "
    f"{'slots':>6} {'wasted':>7}"
)


def line(row: Row, bench: Bench) -> str:
    """One row of the table."""
    result, alone = row.result, bench.alone(row.load)
    p50 = result.ttft.p50 / alone.ttft.p50 - 1
    p99 = result.ttft.p99 / alone.ttft.p99 - 1
    return (
        f"{row.policy:15} {1e3 * result.ttft.p50:6.0f} ms {p50:+8.0%} {1e3 * result.ttft.p99:4.0f} ms {p99:+8.0%} "
        f"{result.ttft_attainment:7.2%} {100 * (alone.ttft_attainment - result.ttft_attainment):6.2f}  "
        f"{1e3 * result.tpot.p50:5.1f} ms {1e3 * result.tpot.p99:4.0f} ms {result.tpot_attainment:7.2%} "
        f"{result.envelope_attainment:8.2%}  {row.offline_tokens:9,.0f} {row.total_tokens:8,.0f} "
        f"{row.total_tokens / bench.bound:8.1%} {result.online_slots + result.offline_slots:6.1%} "
        f"{result.wasted_share:7.2%}  {row.note}"
    )


def main() -> None:
    """Print one table per load and reservation."""
    options = arguments()
    loads = numbers(options.load) if isinstance(options.load, str) else options.load
    reservations = numbers(options.reservation) if isinstance(options.reservation, str) else options.reservation
    config = PolicyConfig(
        slots=256,
        num_blocks=440_000 // 16,
        chunk_tokens=options.chunk,
        ttft=options.ttft_ms / 1e3,
        tpot=options.tpot_ms / 1e3,
    )
    bench = Bench(
        read(options.online),
        read_lengths(options.offline),
        config,
        STEP_MODELS[options.step_model],
        60 * options.minutes,
        seed=options.seed,
        noise=options.noise,
        is_fitted=options.fitted,
        progress=lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr) if sys.stderr.isatty() else None,
    )
    rate = bench.highest_rate()
    print(f"Offline alone: {bench.unbounded:,.0f} tokens/s unbounded, {bench.bound:,.0f} with steps within the TPOT")
    print(f"Online alone attains 99 % up to {rate:,.0f} tokens/s ({rate / bench.bound:.0%} of the bound)")
    names = POLICIES if options.policy == "all" else tuple(options.policy.split(","))
    rows = []
    for load in loads:
        for reservation in reservations:
            print(f"\nLoad {load:.0%} ({bench.request_rate(load):.2f} requests/s), reservation {reservation:.0%}")
            print(HEADER)
            for name in names:
                row = bench.row(name, load, reservation)
                rows.append(row)
                print(line(row, bench), flush=True)
    if options.json:
        options.json.write_text(json.dumps([as_json(row, bench) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
