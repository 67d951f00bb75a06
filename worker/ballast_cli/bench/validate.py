"""`ballast bench validate`: compare the simulator's step times and TTFT with the engine on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast_cli.console import print_table
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE, scale
from ballast_cli.errors import CliError
from ballast_cli.sim_options import show_progress
from ballast_cli.worker_file import DEMO_MODEL

if TYPE_CHECKING:
    from ballast_sim.validation.validator import Validation

LENGTH_FACTOR = 1 / 16
"""Factor of the lengths in the traces, because the small model has a context of 2,048 tokens and runs on a CPU."""
VLLM_STEP_ERROR = 0.15
"""Largest allowed mean error of a step of vLLM."""


def require_idle(clock: str) -> None:
    """Check that the machine is idle enough to measure wall time.

    Raises:
        CliError: the machine is busy.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if clock == "wall" and load > cores / 2:
        raise CliError(
            f"The machine is busy: {load:.1f} processes share its {cores} cores, and would distort wall times. "
            "Wait until it is idle, or use --clock cpu, which counts only the processor time of the engine."
        )


def validate(
    online: Path | None,
    offline: Path | None,
    *,
    model: Path | None,
    engine: str,
    clock: str,
    load: float,
    seconds: float,
    turns: int,
    slots: int,
) -> Validation:
    """Load the engine, and compare the simulator with it."""
    from ballast_policy.snapshot import PolicyConfig  # noqa: PLC0415  with torch, for this verb only
    from ballast_sim.replay.traffic import read, read_lengths  # noqa: PLC0415
    from ballast_sim.validation.engine_replay import BLOCK_TOKENS, EngineUnderTest, Replays  # noqa: PLC0415
    from ballast_sim.validation.validator import STEP_ERROR, Validator  # noqa: PLC0415

    trace = scale(read(online or ONLINE_TRACE), length=LENGTH_FACTOR)
    lengths = scale(read_lengths(offline or OFFLINE_TRACE), length=LENGTH_FACTOR)
    longest = max(arrival.num_tokens for arrival in (*trace, *lengths))
    config = PolicyConfig(
        slots=slots, num_blocks=slots * -(-longest // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS, ttft=0.15, tpot=0.02
    )
    bed: Replays
    if engine == "vllm":
        from ballast_vllm.engine_replay import VllmUnderTest  # noqa: PLC0415  it takes seconds

        bed = VllmUnderTest(model or DEMO_MODEL, config, longest=longest)
    else:
        bed = EngineUnderTest(model or DEMO_MODEL, config)
    return Validator(
        bed,
        trace,
        lengths,
        clock=clock,
        load=load,
        seconds=seconds,
        turns=turns,
        step_limit=VLLM_STEP_ERROR if engine == "vllm" else STEP_ERROR,
        is_ttft_limited=engine != "vllm",
        progress=lambda what: show_progress(f"{what} ..."),
    ).run()


def print_validation(found: Validation, clock: str) -> None:
    """Print the errors, their limits, and whether the simulator is valid."""
    cost = found.model
    sys.stdout.write(
        f"Fitted to the first slice: {1e3 * cost.k0:.3f} ms + {1e6 * cost.k1:.1f} us per prefill token + "
        f"{1e9 * cost.k2:.1f} ns per token and context + {1e6 * cost.k3:.1f} us per decode + "
        f"{1e9 * cost.k4:.1f} ns per token of their context\n"
        f"Compared on the second slice, which was not fitted; {clock} time, engine and policy without HTTP, "
        f"{found.num_requests} online requests, {len(found.measured)} replays; wall time was "
        f"{found.wall_over_cpu:.2f} times the engine's processor time\n\n"
    )
    columns = ("steps", "number", "measured", "predicted/measured", "mean error")
    rows = [
        (kind.name, f"{kind.number:,}", f"{1e3 * kind.mean:.2f} ms", f"{1 + kind.bias:.3f}", f"{kind.error:.1%}")
        for kind in found.kinds
    ]
    print_table(columns, rows, right=columns[1:])
    sys.stdout.write("\n")
    named = [(f"replay {number}", one) for number, one in enumerate(found.measured, start=1)]
    waits = [
        (name, *(_ms(value) for value in (ttft.p50, ttft.p95, ttft.p99)))
        for name, ttft in (*named, ("simulated", found.predicted))
    ]
    print_table(("TTFT", "p50", "p95", "p99"), waits, right=("p50", "p95", "p99"))
    limits = ("; allowed 20 %", "") if found.is_ttft_limited else ("", "; allowed 20 %")
    sys.stdout.write(
        f"\nMean step error {found.step_error:.1%}; allowed {found.most_step_error:.1%} ({found.step_limit:.0%}, "
        f"or 1.5 times the noise of {found.noise:.1%} between two replays of the same steps)\n"
        f"TTFT p95 error {found.ttft_error:.1%}{limits[0]}\n"
        f"TTFT p95 error with the same step times {found.structure:.2%}{limits[1]}\n"
        f"{'The simulator is valid.' if found.is_valid else 'The simulator is NOT valid on this machine.'}\n"
    )


def figures(found: Validation) -> dict[str, Any]:
    """Return the validation as data."""
    return {
        **asdict(found),
        "step_error": found.step_error,
        "most_step_error": found.most_step_error,
        "ttft_error": found.ttft_error,
        "is_valid": found.is_valid,
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
