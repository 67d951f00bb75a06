"""Shared parts of the engine's benchmarks: the machine, lengths of real traffic, and a loop that drives an engine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_integrity import check_integrity

import ballast_cli
from ballast_cli.demo.traffic import ONLINE_TRACE
from ballast_engine.build import build_engine
from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import FinishReason, GenerationRequest, SamplingParams
from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.traffic import Arrival, read

MODEL = Path(ballast_cli.__file__).parent / "demo" / "model"
"""The model that ships."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path, default=MODEL, help="checkpoint directory (the shipped model)")
    made.add_argument("--json", type=Path, help="write the figures there")
    made.add_argument("--quick", action="store_true", help="shorter runs with wider spreads")
    return made


def machine() -> dict[str, str]:
    """Print the machine and the versions, and return them."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    found = {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to the file of `--json`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


class Clock:
    """CPU time of the thread that created the clock, for any thread. It jumps when that thread has nothing to do."""

    def __init__(self) -> None:
        self._source = time.pthread_getcpuclockid(threading.get_ident())
        self._pace, self._since, self._skipped = 1.0, 0.0, 0.0

    def __call__(self) -> float:
        return (time.clock_gettime(self._source) - self._since) * self._pace + self._skipped

    def set_pace(self, pace: float) -> None:
        """Count `pace` seconds for each second of CPU time from now on."""
        self._skipped = self()
        self._pace, self._since = pace, time.clock_gettime(self._source)

    def jump(self, seconds: float) -> None:
        """Advance the time."""
        self._skipped += seconds


def build(
    model: Path,
    *,
    slots: int,
    policy: dict[str, Any] | None = None,
    maker: Callable[..., BallastEngine] = build_engine,
    **options: Any,
) -> BallastEngine:
    """Return an engine without an SLO, so that only its batching has an effect."""
    told = PolicyConfig(slots=slots, num_blocks=1, **{"offline_share": 0.0, **(policy or {})})
    return maker(EngineOptions(directory=model, slots=slots, **options), told)


def scaled(arrivals: Sequence[Arrival], scale: float, *, longest: int) -> list[Arrival]:
    """Return the arrivals with lengths divided by `scale`, and cut so that no request has `longest` tokens."""
    out = []
    for arrival in arrivals:
        num_output = min(max(1, round(arrival.num_output / scale)), longest // 2)
        num_prompt = min(max(1, round(arrival.num_prompt / scale)), longest - num_output - 1)
        out.append(replace(arrival, num_prompt=num_prompt, num_output=num_output))
    return out


def azure(count: int, *, scale: float, longest: int) -> list[Arrival]:
    """Return the first requests of the Azure conversation trace, scaled."""
    return scaled(read(ONLINE_TRACE)[:count], scale, longest=longest)


@dataclass
class Seen:
    """The result of one request, in seconds since its arrival."""

    arrival: Arrival
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0
    _before: float | None = None

    def note(self, at: float, *, is_first: bool) -> None:
        """Record a token."""
        if is_first:
            self.first = at
        elif self._before is not None:
            self.longest_gap = max(self.longest_gap, at - self._before)
        self.last = self._before = at


def drive(
    engine: BallastEngine, arrivals: Sequence[Arrival], *, seed: int, prefix: Sequence[int] = (),
    after_step: Callable[[EngineStats], None] | None = None,
) -> tuple[list[Seen], float]:  # fmt: skip
    """Send requests when they are due, and step the engine to the end; return their results and the seconds."""
    rng = np.random.default_rng(seed)
    seen = {f"{seed}-{i}": Seen(arrival) for i, arrival in enumerate(arrivals)}
    due = [
        GenerationRequest(
            request_id=name,
            prompt=(*prefix, *rng.integers(5, 4000, one.arrival.num_prompt).tolist()),
            sampling=SamplingParams(temperature=0.0, max_tokens=one.arrival.num_output, ignore_eos=True),
            request_class=RequestClass.ONLINE,
        )
        for name, one in seen.items()
    ]
    due.reverse()
    begin = time.monotonic()
    while due or engine.has_work:
        now = time.monotonic() - begin
        while due and seen[due[-1].request_id].arrival.seconds <= now:
            engine.submit(due.pop())
        if not engine.has_work:
            time.sleep(max(0.0, seen[due[-1].request_id].arrival.seconds - now))
            continue
        outputs = engine.step()
        now = time.monotonic() - begin
        for output in outputs:
            assert output.finish_reason is not FinishReason.FAILED, output.error
            one = seen[output.request_id]
            one.note(now - one.arrival.seconds, is_first=one.first == 0.0)
        if after_step is not None:
            after_step(engine.stats())
    check_integrity(engine)
    return list(seen.values()), time.monotonic() - begin


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile `share` of the values."""
    return float(np.percentile(np.array(values), share))
