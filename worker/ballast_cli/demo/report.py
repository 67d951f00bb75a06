"""From what was measured to the figures: one JSON document, and the lines that a person reads. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ballast_cli.demo.figures import Ratio, percentiles, ratio_of_percentiles, verdict
from ballast_cli.demo.load import Sample
from ballast_cli.demo.record import Block, Second, by_second
from ballast_cli.demo.run import Record

LIMIT = 1.25
"""Online TTFT p99 with offline work may be at most this times that of online alone."""
SEGMENT_SECONDS = 3.0
"""Length of the trace segments that the bootstrap draws."""
_SETTLED_SECONDS = 1.0
"""The reservation fills within a bounded number of steps; seconds before that are not counted."""
Measure = Callable[[Sample], float | None]


def _ttft(sample: Sample) -> float | None:
    return None if sample.ttft is None else sample.ttft * 1000


def _tpot(sample: Sample) -> float | None:
    return None if sample.tpot is None else sample.tpot * 1000


def figures(record: Record, versions: dict[str, str | None]) -> dict[str, Any]:
    """Everything, as JSON; `online_only`, `mixed`, `offline`, `prefix_hit_rate` and `slot_utilization` first."""
    alone, mixed = record.of("online_only"), record.of("mixed")
    ratios = {
        f"{name}_p{q}": ratio(alone, mixed, measure, q=q, seed=record.plan.seed)
        for name, measure in (("ttft", _ttft), ("tpot", _tpot))
        for q in (50, 95, 99)
    }
    tokens = sum(block.gained("offline_tokens") for block in mixed)
    seconds = sum(block.seconds for block in mixed)
    plan = record.plan
    return {
        "version": 1,
        "online_only": side(alone),
        "mixed": side(mixed),
        "offline": {
            "items_completed": sum(block.items_completed for block in mixed),
            "tokens": round(tokens),
            "tokens_per_second": round(tokens / seconds, 1),
            "ceiling_tokens_per_second": round(record.ceiling, 1),
            "harvest": round(tokens / seconds / record.ceiling, 4),
        },
        "prefix_hit_rate": hit_rate((*alone, *mixed)),
        "slot_utilization": {"online_only": utilization(alone), "mixed": utilization(mixed)},
        "slots": {"online_only": occupancy(alone), "mixed": occupancy(mixed), "total": plan.slots},
        "ratios": {name: found.as_dict() for name, found in ratios.items()},
        "verdict": sentence(ratios["ttft_p99"], alone, mixed),
        "work_conservation": work_conservation(mixed),
        "floor": floor(record),
        "slo": record.slo | {"is": "1.25 x the p99 of an online-only warm-up"},
        "calibration": {
            "capacity_requests_per_second": round(record.capacity, 2),
            "online_load": plan.online_load,
            "speed_factor": round(record.speed, 3),
            "length_factor": plan.length_factor,
            "trace_start_seconds": round(record.trace_start, 1),
            "block_seconds": record.block_seconds,
            "pairs": plan.pairs,
            "seed": plan.seed,
        },
        "client": client(record),
        "versions": versions,
        "per_second": [
            _second(second, block) for block in record.blocks for second in by_second(block.looks, block.counts)
        ],
        "requests": {
            name: [
                [segment(block, sample), _rounded(_ttft(sample)), _rounded(_tpot(sample))]
                for block in blocks
                for sample in block.samples
            ]
            for name, blocks in (("online_only", alone), ("mixed", mixed))
        },
    }


def side(blocks: Sequence[Block]) -> dict[str, Any]:
    """The online requests of one side."""
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
    """Which few seconds of the trace a request belongs to; the same number on both sides."""
    return block.pair * 1000 + int(sample.at / SEGMENT_SECONDS)


def ratio(alone: Sequence[Block], mixed: Sequence[Block], measure: Measure, *, q: float, seed: int) -> Ratio:
    """Mixed over alone, drawn by segments of the trace."""
    sides: list[dict[int, list[float]]] = []
    for blocks in (alone, mixed):
        by_segment: dict[int, list[float]] = {}
        for block in blocks:
            for sample in block.samples:
                values = by_segment.setdefault(segment(block, sample), [])
                if (value := measure(sample)) is not None:
                    values.append(value)
        sides.append(by_segment)
    keys = sorted(set(sides[0]) | set(sides[1]))
    base, other = ([one.get(key, []) for key in keys] for one in sides)
    return ratio_of_percentiles(base, other, q=q, seed=seed)


def sentence(ttft: Ratio, alone: Sequence[Block], mixed: Sequence[Block]) -> str:
    """The verdict, failures included: a request that failed has no TTFT, but it counts."""
    failed = [sum(1 for block in blocks for s in block.samples if s.failure) for blocks in (alone, mixed)]
    said = verdict(ttft, LIMIT)
    if any(failed):
        said += f" {failed[0]} online requests failed alone and {failed[1]} mixed; the percentiles are of the others."
    return said


def hit_rate(blocks: Sequence[Block]) -> float:
    """Prompt tokens from the prefix cache over all prompt tokens, both classes, by the worker's counters."""
    prompt = sum(block.gained("prompt_tokens") for block in blocks)
    return round(sum(block.gained("cached_tokens") for block in blocks) / prompt, 6) if prompt else 0.0


def occupancy(blocks: Sequence[Block]) -> dict[str, float]:
    """Mean slots held, by class."""
    looks = [look for block in blocks for look in block.looks]
    number = max(1, len(looks))
    return {
        "online": round(sum(look.online for look in looks) / number, 3),
        "offline": round(sum(look.offline for look in looks) / number, 3),
        "free": round(sum(look.free for look in looks) / number, 3),
    }


def utilization(blocks: Sequence[Block]) -> float:
    """Share of slots held by anybody, mean over the looks."""
    looks = [look for block in blocks for look in block.looks]
    return round(sum((look.slots - look.free) / look.slots for look in looks) / max(1, len(looks)), 4)


def work_conservation(mixed: Sequence[Block]) -> dict[str, int]:
    """Seconds in which any look saw a free slot (the job always had a backlog), and those without offline tokens."""
    seconds = [second for block in mixed for second in by_second(block.looks, block.counts)]
    free = [second for second in seconds if second.most_free > 0]
    return {
        "seconds": len(seconds),
        "with_free_slots": len(free),
        "of_those_without_offline_tokens": sum(1 for second in free if second.offline_tokens <= 0),
        "without_offline_tokens": sum(1 for second in seconds if second.offline_tokens <= 0),
    }


def floor(record: Record) -> dict[str, Any] | None:
    """What offline kept while online asked for more than there is."""
    block = record.floor
    if block is None:
        return None
    seconds = [s for s in by_second(block.looks, block.counts) if s.at >= block.began + _SETTLED_SECONDS]
    looks = [look for look in block.looks if look.at >= block.began + _SETTLED_SECONDS]
    return {
        "seconds": round(block.seconds, 1),
        "online_waiting_mean": round(sum(look.waiting for look in looks) / max(1, len(looks)), 1),
        "online_slots_mean": round(sum(look.online for look in looks) / max(1, len(looks)), 2),
        "offline_slots_mean": round(sum(look.offline for look in looks) / max(1, len(looks)), 2),
        "offline_slots_reserved": record.reserved,
        "seconds_counted": len(seconds),
        "readings": len(block.counts),
        "readings_with_floor_met": sum(count.is_floor_met for count in block.counts),
        "looks": len(looks),
        "looks_at_or_above_reservation": sum(1 for look in looks if look.offline >= record.reserved),
        "seconds_without_offline_tokens": sum(1 for second in seconds if second.offline_tokens <= 0),
        "offline_tokens_per_second": round(block.gained("offline_tokens") / block.seconds, 1),
        "online_requests_per_second": round(len(block.samples) / max(block.seconds, 1e-9), 1),
        "per_second": [_second(second, block) for second in seconds],
    }


def client(record: Record) -> dict[str, Any]:
    """How good the load generator was: what it cost, and how late it sent."""
    late = [sample.late * 1000 for block in record.blocks for sample in block.samples]
    return {"cpu_share_of_a_core": round(record.client_cpu, 4), "late_ms": percentiles(late)}


def lines(found: dict[str, Any]) -> list[str]:
    """What the terminal shows at the end."""
    alone, mixed, offline = found["online_only"], found["mixed"], found["offline"]
    calibration, slots, kept = found["calibration"], found["slots"], found["floor"]
    shown = [
        "",
        f"{'':26}{'online alone':>16}{'with offline job':>18}{'ratio (95 % interval)':>26}",
        f"{'online requests (failed)':26}{_count(alone):>16}{_count(mixed):>18}",
    ]
    for name in ("ttft", "tpot"):
        for quantile in ("p50", "p95", "p99"):
            one = found["ratios"][f"{name}_{quantile}"]
            label = f"{name.upper()} {quantile}, ms"
            interval = f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            values = (alone[f"{name}_ms"][quantile], mixed[f"{name}_ms"][quantile])
            shown.append(f"{label:26}{values[0]:>16.2f}{values[1]:>18.2f}{interval:>26}")
    for key in ("online", "offline", "free"):
        label = f"slots {key}, of {slots['total']}"
        shown.append(f"{label:26}{slots['online_only'][key]:>16.2f}{slots['mixed'][key]:>18.2f}")
    used = found["slot_utilization"]
    shown += [
        f"{'slots in use':26}{used['online_only']:>16.1%}{used['mixed']:>18.1%}",
        f"{'online tokens/s':26}{alone['tokens_per_second']:>16,.0f}{mixed['tokens_per_second']:>18,.0f}",
        f"{'offline tokens/s':26}{0:>16}{offline['tokens_per_second']:>18,.0f}",
        "",
        _harvest(offline),
        f"Prefix-cache hit rate {found['prefix_hit_rate']:.2%} (prompts are all different).",
        _setting(calibration, found["slo"]),
        _conserved(found["work_conservation"]),
    ]
    if kept:
        shown.append(_kept(kept))
    return [*shown, "", found["verdict"]]


def _harvest(offline: dict[str, Any]) -> str:
    return (
        f"Offline: {offline['items_completed']:,} items completed, {offline['tokens']:,} tokens, "
        f"{offline['harvest']:.0%} of what this machine does with no online request at all "
        f"({offline['ceiling_tokens_per_second']:,.0f} tokens/s)."
    )


def _setting(calibration: dict[str, Any], slo: dict[str, Any]) -> str:
    return (
        f"Lengths x {calibration['length_factor']:g}, times / {calibration['speed_factor']:.2f}: online takes "
        f"{calibration['online_load']:.0%} of the measured {calibration['capacity_requests_per_second']:.1f} "
        f"requests/s. SLO: TTFT {slo['ttft_ms']:.1f} ms, TPOT {slo['tpot_ms']:.1f} ms ({slo['is']})."
    )


def _kept(kept: dict[str, Any]) -> str:
    return (
        f"Flooded with online requests ({kept['online_waiting_mean']:.0f} waiting): offline held "
        f"{kept['offline_slots_mean']:.2f} slots on average of {kept['offline_slots_reserved']} reserved, "
        f"{kept['offline_tokens_per_second']:,.0f} tokens/s; {kept['seconds_without_offline_tokens']} of "
        f"{kept['seconds_counted']} seconds without an offline token; the worker's own floor signal held in "
        f"{kept['readings_with_floor_met']} of {kept['readings']} readings."
    )


def _conserved(found: dict[str, int]) -> str:
    return (
        f"Of {found['seconds']} mixed seconds {found['with_free_slots']} had a free slot at some moment; "
        f"{found['of_those_without_offline_tokens']} of those passed without an offline token."
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
