"""`ballast bench encoder`: the requests per second of an encoder within its SLO, and policies with offline work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ballast_cli.bench.json_rows import known
from ballast_cli.bench.table import milliseconds, percent
from ballast_cli.console import print_table
from ballast_cli.sim_options import progress, write_json
from ballast_sim.comparison.table import check_shares
from ballast_sim.planner.encoder import ApiServer
from ballast_sim.planner.encoder_runs import POLICIES, EncoderBench, EncoderRow

_COLUMNS = (
    "policy",
    "load",
    "online/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "met",
    "offline/s",
    "of alone",
    "total",
    "batch",
)


def compare_encoder(runs: EncoderBench, loads: Sequence[float], api: ApiServer, json_file: Path | None) -> None:
    """Run every policy at every load, print the rows, and write them."""
    check_shares(loads)
    num_rows = len(loads) * len(POLICIES)
    progress(0, num_rows, "highest rate within the SLO")
    highest = runs.highest()
    rows: list[EncoderRow] = []
    for load in loads:
        for policy in POLICIES:
            progress(len(rows), num_rows, f"{policy} at {100 * load:g} %")
            rows.append(runs.row(policy, load))
    progress(num_rows, num_rows, "")
    if str(json_file) != "-":
        _print(runs, highest, rows, api)
    figures = {
        "offline_alone_per_second": runs.maximum,
        "computed_batch": runs.computed.batch,
        "computed_per_second": runs.computed.requests_per_second,
        "found_per_second": highest.online_rate if highest.load else 0.0,
        "api_server_per_second": api.texts_per_second if api.text_milliseconds else None,
        "rows": [known(asdict(row)) for row in rows],
    }
    write_json(json_file, figures)


def _print(runs: EncoderBench, highest: EncoderRow, rows: Sequence[EncoderRow], api: ApiServer) -> None:
    slo, model = runs.slo, runs.roofline
    limit = api.limit(runs.maximum)
    found = f"{highest.online_rate:,.0f} requests/s" if highest.load else "no rate"
    sys.stdout.write(
        f"{model.shape.name} on {model.gpu.name}, prompts of {runs.mean_prompt:.0f} tokens on average; SLO "
        f"{1e3 * slo.latency:g} ms for {slo.share:.0%}; reservation {100 * runs.reservation:g} %\n"
        f"Offline alone, in full batches: {runs.maximum:,.0f} requests/s\n"
        f"Within the SLO, computed: {runs.computed.because}; {runs.computed.requests_per_second:,.0f} requests/s\n"
        f"Within the SLO, found by trying: online alone meets it up to {found}\n"
        + (f"In a pod, with both classes together, {limit}. The table leaves this process out.\n\n" if limit else "\n")
    )
    print_table(_COLUMNS, [_cells(runs, row) for row in rows], right=_COLUMNS[1:])


def _cells(runs: EncoderBench, row: EncoderRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.load:.0%}",
        f"{row.online_rate:,.0f}",
        *(milliseconds(value, 1) for value in (row.p50, row.p95, row.p99)),
        percent(row.attainment),
        f"{row.offline_rate:,.0f}",
        f"{row.offline_rate / runs.maximum:.0%}",
        f"{(row.online_rate + row.offline_rate) / runs.maximum:.0%}",
        "-" if row.ceiling is None else str(row.ceiling),
    )
