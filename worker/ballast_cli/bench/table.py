"""The tables of `ballast bench mixed`: maximum throughput, then latency and work for each load and reservation."""

from __future__ import annotations

import sys
from math import isfinite

from ballast_cli.console import print_table
from ballast_sim.comparison.bench import Row
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.comparison.table import Table
from ballast_sim.replay.attainment import worst_lost

_LATENCY = (
    *("policy", "TTFT ms p50", "p95", "p99", "p50 rise", "p99 rise", "met", "lost"),
    *("TPOT ms p50", "p95", "p99", "met", "lost", "envelope", "worst third", "goodput/s"),
)
_WORK = (
    *("policy", "offline tok/s", "prefill", "decode", "harvest", "total tok/s", "of bound", "slots", "wasted"),
    *("gap", "Jain", "shortfall", "deadlines", "how"),
)


def print_table_of(table: Table, engine: BenchEngine) -> None:
    """Print the maximum throughputs and all rows."""
    _print_maximums(table, engine)
    for load in dict.fromkeys(row.load for row in table.rows):
        for reservation in dict.fromkeys(row.reservation for row in table.rows):
            rate = table.bench.request_rate(load)
            sys.stdout.write(f"\nLoad {100 * load:g} % ({rate:.2f} requests/s), reservation {100 * reservation:g} %\n")
            rows = table.of(load, reservation)
            print_table(_LATENCY, [_latency(table, row) for row in rows], right=_LATENCY[1:])
            sys.stdout.write("\n")
            print_table(_WORK, [_work(table, row) for row in rows], right=_WORK[1:-1])


def _print_maximums(table: Table, engine: BenchEngine) -> None:
    bench, config = table.bench, table.bench.config
    slo = f"TTFT {1e3 * config.ttft:g} ms and TPOT {1e3 * config.tpot:g} ms"
    sys.stdout.write(
        f"{engine.name}, {engine.step_model} step times, {config.slots} slots, "
        f"{config.num_blocks * config.block_tokens:,} tokens of KV, chunks of {config.chunk_tokens}; {slo}\n"
        f"Each run replays {bench.seconds / 60:g} minutes without the first {bench.warmup_seconds:g} s; seed "
        f"{bench.seed}\n\n"
        f"Maximum throughput, tokens/s of one GPU\n"
        f"  offline alone, unbounded           {bench.unbounded:8,.0f}\n"
        f"  offline alone, steps within TPOT   {bench.bound:8,.0f}   {bench.bound / bench.unbounded:.1%} of unbounded: "
        "the SLO-bound throughput\n"
    )
    for load, row in table.budgets.items():
        sys.stdout.write(
            f"  best static budget at {100 * load:3.4g} % load {row.total_tokens:8,.0f}   "
            f"{row.total_tokens / bench.bound:.1%} of the bound, {row.note}\n"
        )
    sys.stdout.write(
        f"\nOnline alone attains 99 % up to {table.rate:,.0f} tokens/s, {table.rate / bench.bound:.0%} of the bound\n"
    )


def _latency(table: Table, row: Row) -> tuple[str, ...]:
    result, alone = row.result, table.bench.alone(row.load).result
    ttft, tpot = result.ttft, result.tpot
    return (
        row.policy,
        *(milliseconds(value) for value in (ttft.p50, ttft.p95, ttft.p99)),
        *(change(found, usual) for found, usual in ((ttft.p50, alone.ttft.p50), (ttft.p99, alone.ttft.p99))),
        percent(result.ttft_attainment),
        points(alone.ttft_attainment - result.ttft_attainment),
        *(milliseconds(value, 1) for value in (tpot.p50, tpot.p95, tpot.p99)),
        percent(result.tpot_attainment),
        points(alone.tpot_attainment - result.tpot_attainment),
        percent(result.envelope_attainment),
        points(worst_lost(result.thirds, alone.thirds).worst),
        f"{result.goodput:.2f}",
    )


def _work(table: Table, row: Row) -> tuple[str, ...]:
    result, bench = row.result, table.bench
    is_split = row.policy == "static-split"
    return (
        row.policy,
        f"{row.offline_tokens:,.0f}",
        "-" if is_split else f"{result.offline.prefill:,.0f}",
        "-" if is_split else f"{result.offline.decode:,.0f}",
        f"{row.offline_tokens / bench.unbounded:.1%}",
        f"{row.total_tokens:,.0f}",
        f"{row.total_tokens / bench.bound:.1%}",
        f"{result.online_slots + result.offline_slots:.1%}",
        f"{result.wasted_tokens:,}",
        f"{result.service_gap:,.0f}",
        f"{result.jain:.3f}",
        percent(result.reservation_shortfall),
        percent(result.deadline_hits),
        row.note,
    )


def milliseconds(seconds: float, digits: int = 0) -> str:
    """Format a latency."""
    return f"{1e3 * seconds:,.{digits}f}" if isfinite(seconds) else "-"


def change(found: float, usual: float) -> str:
    """Format a rise over the usual value."""
    return f"{found / usual - 1:+.0%}" if isfinite(found) and usual > 0 else "-"


def percent(share: float) -> str:
    """Format a share."""
    return f"{share:.2%}" if isfinite(share) else "-"


def points(lost: float) -> str:
    """Format lost attainment in points."""
    return f"{100 * lost + 0.0:.2f}" if isfinite(lost) else "-"
