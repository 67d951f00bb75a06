"""Turn the measurements of a demo into one JSON document, and into the lines on the terminal. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ballast_cli.demo.figures import (
    Attainment,
    Ratio,
    attainment,
    is_met,
    percentiles,
    promise,
    ratio_of_percentiles,
    verdict,
)
from ballast_cli.demo.load import Sample
from ballast_cli.demo.polling import Block, Second, by_second
from ballast_cli.demo.run import DemoRecord

MOST_LOST = 1.0
"""Points of attainment that offline work may cost online. `ballast bench` judges by the same bound."""
SEGMENT_SECONDS = 3.0
"""Length of the trace segments that the bootstrap draws."""
_SETTLED_SECONDS = 1.0
"""The reservation fills within a bounded number of steps. Seconds before that do not count."""
Measure = Callable[[Sample], float | None]
Row = Sequence[float | None]
"""One request in the document: its segment, TTFT and TPOT (ms). A request that failed has neither."""
COLUMNS = {"ttft": 1, "tpot": 2}
_PAIR = 1000
"""Segment numbers that are reserved for each pair of blocks."""
T = TypeVar("T")


def _ttft(sample: Sample) -> float | None:
    return None if sample.ttft is None else sample.ttft * 1000


def _tpot(sample: Sample) -> float | None:
    return None if sample.tpot is None else sample.tpot * 1000


def figures(record: DemoRecord, versions: dict[str, str | None]) -> dict[str, Any]:
    """Return all figures for JSON: `online_only`, `mixed`, `offline`, `prefix_hit_rate`, `slot_utilization` first."""
    alone, mixed = record.of("online_only"), record.of("mixed")
    ratios = {
        f"{name}_p{q}": ratio(alone, mixed, measure, q=q, seed=record.plan.seed)
        for name, measure in (("ttft", _ttft), ("tpot", _tpot))
        for q in (50, 95, 99)
    }
    requests = {"online_only": rows(alone), "mixed": rows(mixed)}
    attained = {
        name: attainment(*aligned([met(side, name, record.slo) for side in requests.values()]), seed=record.plan.seed)
        for name in COLUMNS
    }
    return {
        "version": 1,
        "online_only": side(alone) | {"attainment": {name: round(a.alone / 100, 5) for name, a in attained.items()}},
        "mixed": side(mixed) | {"attainment": {name: round(a.mixed / 100, 5) for name, a in attained.items()}},
        "offline": offline_work(mixed, record.maximum),
        "prefix_hit_rate": hit_rate((*alone, *mixed)),
        "slot_utilization": {"online_only": utilization(alone), "mixed": utilization(mixed)},
        "slots": {"online_only": occupancy(alone), "mixed": occupancy(mixed), "total": record.plan.slots},
        "ratios": {name: found.as_dict() for name, found in ratios.items()},
        "attainment_lost": {
            name: found.as_dict() | {"by_pair": lost_by_pair(requests, name, record.slo)}
            for name, found in attained.items()
        }
        | {"most_points": MOST_LOST},
        "promise": promise(attained["ttft"], attained["tpot"], most_lost=MOST_LOST),
        "verdict": sentence(attained, alone, mixed),
        "work_conservation": work_conservation(mixed),
        "flood": flood(record),
        "slo": record.slo | {"is": "1.25 times the p99 of an online-only warm-up, with parts of all blocks"},
        "calibration": calibration(record),
        "client": client(record),
        "versions": versions,
        "per_second": [
            _second(second, block) for block in record.blocks for second in by_second(block.polls, block.counts)
        ],
        "requests": requests,
    }


def offline_work(mixed: Sequence[Block], maximum: float) -> dict[str, float]:
    """Return the items and tokens of the offline job. `maximum`: its tokens per second without online requests."""
    tokens = sum(block.gained("offline_tokens") for block in mixed)
    seconds = sum(block.seconds for block in mixed)
    return {
        "items_completed": sum(block.items_completed for block in mixed),
        "tokens": round(tokens),
        "tokens_per_second": round(tokens / seconds, 1),
        "maximum_tokens_per_second": round(maximum, 1),
        "harvest": round(tokens / seconds / maximum, 4),
    }


def calibration(record: DemoRecord) -> dict[str, float]:
    """Return how the traffic was fitted to this machine."""
    plan = record.plan
    return {
        "capacity_requests_per_second": round(record.capacity, 2),
        "online_load": plan.online_load,
        "speed_factor": round(record.speed, 3),
        "length_factor": plan.length_factor,
        "trace_start_seconds": round(record.trace_start, 1),
        "block_seconds": record.block_seconds,
        "pairs": plan.pairs,
        "seed": plan.seed,
    }


def rows(blocks: Sequence[Block]) -> list[Row]:
    """Return one row per online request."""
    return [
        (segment(block, sample), _rounded(_ttft(sample)), _rounded(_tpot(sample)))
        for block in blocks
        for sample in block.samples
    ]


def met(requests: Sequence[Row], name: str, slo: Mapping[str, float]) -> dict[int, list[bool]]:
    """Return for each segment whether its requests met the SLO of `name`.

    A request that failed missed the SLO. An answer of one token has no TPOT and does not count.
    """
    column, limit = COLUMNS[name], slo[f"{name}_ms"]
    found: dict[int, list[bool]] = {}
    for row in requests:
        is_counted = row[column] is not None or row[COLUMNS["ttft"]] is None
        if is_counted and row[0] is not None:
            found.setdefault(int(row[0]), []).append(is_met(row[column], limit))
    return found


def aligned(sides: Sequence[Mapping[Any, list[T]]]) -> list[list[list[T]]]:
    """Put the segments of all sides into one order. A segment without a request is empty."""
    keys = sorted({key for side in sides for key in side})
    return [[side.get(key, []) for key in keys] for side in sides]


def lost_by_pair(requests: Mapping[str, Sequence[Row]], name: str, slo: Mapping[str, float]) -> list[float | None]:
    """Return the points of attainment lost in each pair of blocks; None if a side has no request."""
    by_pair: list[dict[int, list[bool]]] = []
    for side in ("online_only", "mixed"):
        found: dict[int, list[bool]] = {}
        for key, values in met(requests[side], name, slo).items():
            found.setdefault(key // _PAIR, []).extend(values)
        by_pair.append(found)
    alone, mixed = aligned(by_pair)
    return [
        round(100 * (sum(a) / len(a) - sum(m) / len(m)), 3) if a and m else None
        for a, m in zip(alone, mixed, strict=True)
    ]


def side(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of one side's online requests."""
    samples = [sample for block in blocks for sample in block.samples]
    good = [sample for sample in samples if not sample.failure]
    seconds = sum(block.seconds for block in blocks)
    tokens = sum(sample.output_tokens for sample in good)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "ttft_ms": percentiles([value for sample in good if (value := _ttft(sample)) is not None]),
        "tpot_ms": percentiles([value for sample in good if (value := _tpot(sample)) is not None]),
        "requests_per_second": round(len(samples) / seconds, 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 1),
        "failures": sorted({sample.failure for sample in samples if sample.failure})[:5],
    }


def segment(block: Block, sample: Sample) -> int:
    """Return the segment of the trace to which a request belongs. It is the same on both sides."""
    return block.pair * _PAIR + int(sample.at / SEGMENT_SECONDS)


def ratio(alone: Sequence[Block], mixed: Sequence[Block], measure: Measure, *, q: float, seed: int) -> Ratio:
    """Divide a percentile of the mixed side by that of online alone."""
    sides: list[dict[int, list[float]]] = []
    for blocks in (alone, mixed):
        by_segment: dict[int, list[float]] = {}
        for block in blocks:
            for sample in block.samples:
                values = by_segment.setdefault(segment(block, sample), [])
                if (value := measure(sample)) is not None:
                    values.append(value)
        sides.append(by_segment)
    base, other = aligned(sides)
    return ratio_of_percentiles(base, other, q=q, seed=seed)


def sentence(attained: Mapping[str, Attainment], alone: Sequence[Block], mixed: Sequence[Block]) -> str:
    """Return the verdict, and how many requests failed."""
    failed = [sum(1 for block in blocks for s in block.samples if s.failure) for blocks in (alone, mixed)]
    said = verdict(attained["ttft"], attained["tpot"], most_lost=MOST_LOST)
    if any(failed):
        said += f" {failed[0]} online requests failed alone and {failed[1]} mixed; each counts as missed."
    return said


def hit_rate(blocks: Sequence[Block]) -> float:
    """Return the share of prompt tokens, of both classes, that came from the prefix cache."""
    prompt = sum(block.gained("prompt_tokens") for block in blocks)
    return round(sum(block.gained("cached_tokens") for block in blocks) / prompt, 6) if prompt else 0.0


def occupancy(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the mean number of slots held, by class."""
    polls = [poll for block in blocks for poll in block.polls]
    number = max(1, len(polls))
    return {
        "online": round(sum(poll.online for poll in polls) / number, 3),
        "offline": round(sum(poll.offline for poll in polls) / number, 3),
        "free": round(sum(poll.free for poll in polls) / number, 3),
    }


def utilization(blocks: Sequence[Block]) -> float:
    """Return the mean share of slots that a request holds."""
    polls = [poll for block in blocks for poll in block.polls]
    return round(sum((poll.slots - poll.free) / poll.slots for poll in polls) / max(1, len(polls)), 4)


def work_conservation(mixed: Sequence[Block]) -> dict[str, int]:
    """Count the seconds in which a poll saw a free slot, and the part of them without an offline token.

    The job always has a backlog, so a free slot can always be used.
    """
    seconds = [second for block in mixed for second in by_second(block.polls, block.counts)]
    free = [second for second in seconds if second.most_free > 0]
    return {
        "seconds": len(seconds),
        "with_free_slots": len(free),
        "of_those_without_offline_tokens": sum(1 for second in free if second.offline_tokens <= 0),
        "without_offline_tokens": sum(1 for second in seconds if second.offline_tokens <= 0),
    }


def flood(record: DemoRecord) -> dict[str, Any] | None:
    """Return the slots and tokens of offline during the flood of online requests."""
    block = record.flood
    if block is None:
        return None
    seconds = [s for s in by_second(block.polls, block.counts) if s.at >= block.began + _SETTLED_SECONDS]
    polls = [poll for poll in block.polls if poll.at >= block.began + _SETTLED_SECONDS]
    return {
        "seconds": round(block.seconds, 1),
        "online_waiting_mean": round(sum(poll.waiting for poll in polls) / max(1, len(polls)), 1),
        "online_slots_mean": round(sum(poll.online for poll in polls) / max(1, len(polls)), 2),
        "offline_slots_mean": round(sum(poll.offline for poll in polls) / max(1, len(polls)), 2),
        "offline_slots_reserved": record.reserved,
        "seconds_counted": len(seconds),
        "readings": len(block.counts),
        "readings_with_reservation_met": sum(count.is_reservation_met for count in block.counts),
        "polls": len(polls),
        "polls_at_or_above_reservation": sum(1 for poll in polls if poll.offline >= record.reserved),
        "seconds_without_offline_tokens": sum(1 for second in seconds if second.offline_tokens <= 0),
        "offline_tokens_per_second": round(block.gained("offline_tokens") / block.seconds, 1),
        "online_requests_per_second": round(len(block.samples) / max(block.seconds, 1e-9), 1),
        "per_second": [_second(second, block) for second in seconds],
    }


def client(record: DemoRecord) -> dict[str, Any]:
    """Return the CPU use of the load generator, and the delay of its requests."""
    late = [sample.late * 1000 for block in record.blocks for sample in block.samples]
    return {"cpu_share_of_a_core": round(record.client_cpu, 4), "late_ms": percentiles(late)}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the final lines for the terminal."""
    alone, mixed, offline = found["online_only"], found["mixed"], found["offline"]
    slots, lost, kept = found["slots"], found["attainment_lost"], found["flood"]
    shown = [
        "",
        _line("", "online alone", "with offline job", change="change (95 % interval)"),
        _line("online requests (failed)", _count(alone), _count(mixed)),
    ]
    for name in COLUMNS:
        points = lost[name]
        change = f"{points['points']:z.1f} points lost ({points['low']:z.1f} to {points['high']:z.1f})"
        shares = [f"{one['attainment'][name]:.1%}" for one in (alone, mixed)]
        shown.append(_line(f"{name.upper()} within {found['slo'][f'{name}_ms']:.1f} ms", *shares, change=change))
        for quantile in ("p50", "p95", "p99"):
            one = found["ratios"][f"{name}_{quantile}"]
            change = f"x {one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            values = [f"{side[f'{name}_ms'][quantile]:.2f}" for side in (alone, mixed)]
            shown.append(_line(f"{name.upper()} {quantile}, ms", *values, change=change))
    for key in ("online", "offline", "free"):
        values = [f"{slots[side][key]:.2f}" for side in ("online_only", "mixed")]
        shown.append(_line(f"slots {key}, of {slots['total']}", *values))
    used = found["slot_utilization"]
    shown += [
        _line("slots in use", f"{used['online_only']:.1%}", f"{used['mixed']:.1%}"),
        _line("online tokens/s", f"{alone['tokens_per_second']:,.0f}", f"{mixed['tokens_per_second']:,.0f}"),
        _line("offline tokens/s", "0", f"{offline['tokens_per_second']:,.0f}"),
        "",
        _setting(found["calibration"], found["slo"]),
        _harvest(offline),
        _conserved(found["work_conservation"]),
    ]
    if kept:
        shown.append(_kept(kept))
    shown += [
        f"Prefix cache: {found['prefix_hit_rate']:.2%} of the prompt tokens. No two prompts share a prefix.",
        _by_pair(lost),
    ]
    return [*shown, "", found["verdict"]]


def _line(label: str, *sides: str, change: str = "") -> str:
    alone, mixed = sides
    return f"{label:26}{alone:>14}{mixed:>18}{change:>34}".rstrip()


def _by_pair(lost: dict[str, Any]) -> str:
    shown = [
        f"{name.upper()} {', '.join('-' if one is None else f'{one:.1f}' for one in lost[name]['by_pair'])}"
        for name in COLUMNS
    ]
    return f"Points of attainment lost in each pair of blocks: {'; '.join(shown)}."


def _harvest(offline: dict[str, Any]) -> str:
    return (
        f"Offline: {offline['items_completed']:,} items completed and {offline['tokens']:,} tokens computed, at "
        f"{offline['harvest']:.0%} of the rate without online requests "
        f"({offline['maximum_tokens_per_second']:,.0f} tokens/s)."
    )


def _setting(calibration: dict[str, Any], slo: dict[str, Any]) -> str:
    return (
        f"Online load: {calibration['online_load']:.0%} of the {calibration['capacity_requests_per_second']:.1f} "
        f"requests/s that this machine can serve. The trace runs {calibration['speed_factor']:.2f} times as fast, and "
        f"its lengths are multiplied by {calibration['length_factor']:g}. SLO: TTFT {slo['ttft_ms']:.1f} ms, "
        f"TPOT {slo['tpot_ms']:.1f} ms ({slo['is']})."
    )


def _kept(kept: dict[str, Any]) -> str:
    return (
        f"Under a flood of online requests ({kept['online_waiting_mean']:.0f} waiting on average), offline held "
        f"{kept['offline_slots_mean']:.2f} of its {kept['offline_slots_reserved']} reserved slots on average and "
        f"computed {kept['offline_tokens_per_second']:,.0f} tokens/s. {kept['seconds_without_offline_tokens']} of "
        f"{kept['seconds_counted']} seconds passed without an offline token. By the worker, the reservation was met "
        f"in {kept['readings_with_reservation_met']} of {kept['readings']} readings."
    )


def _conserved(found: dict[str, int]) -> str:
    return (
        f"{found['with_free_slots']} of {found['seconds']} mixed seconds had a free slot at some moment. "
        f"{found['of_those_without_offline_tokens']} of them passed without an offline token."
    )


def _count(one: dict[str, Any]) -> str:
    return f"{one['requests']:,} ({one['failed']:,})"


def _second(second: Second, block: Block) -> dict[str, Any]:
    return {
        "side": block.side,
        "pair": block.pair,
        "at": round(second.at, 2),
        "seconds": round(second.seconds, 3),
        "offline_tokens": round(second.offline_tokens),
        "online_tokens": round(second.online_tokens),
        "most_free_slots": second.most_free,
        "online_slots": round(second.online, 2),
        "offline_slots": round(second.offline, 2),
        "least_offline_slots": second.least_offline,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
