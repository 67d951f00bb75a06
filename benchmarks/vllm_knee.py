"""Compare the cost model with and without its knee, on real steps of vLLM with online and offline work.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_knee.py [--requests 684] [--load 40,60]

The model and the traffic are those of `vllm_mixed.py`, once with an SLO alone and once with a cap of 25 % on
interference, which keeps most steps small. A worker's fit sees each step, and a linear fit sees the same steps. Both
are fitted again every 32 steps, and predict each step before they see it. The rows are the sizes of steps in tokens:
prompts and decodes. A figure is the predicted time of all these steps as a share of their real time, and the mean error
of a step. Times are CPU time of the thread.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from replay import Clock, machine, parser, write
from replay.random_llama import make_model
from replay.side_process import VARIABLES
from replay.vllm_engine import BALLAST, UNBOUNDED
from vllm_mixed import PART, TUNING, TUNING_START, Run, Setup, Side, shape, starts

SIZES = ((1, 4), (5, 16), (17, 64), (65, 256), (257, 2048))
EVERY = 32
SLO = {"ttft": 0.3, "tpot": 0.1}


def features(work: Any) -> list[float]:
    """Return what a linear model multiplies with its coefficients."""
    return [1.0, work.num_prefill, work.prefill_context, work.num_decode, work.decode_context]


class Linear:
    """The fit of a worker without the knee: the same steps, the same weights, and the same rule for outliers."""

    def __init__(self) -> None:
        """Begin without steps."""
        self.coefficients = np.zeros(5)

    def refit(self, steps: Sequence[tuple[Any, float]]) -> None:
        """Fit the last 256 steps with prefill, and the last 256 without."""
        from ballast_policy.learning.cost import non_negative_least_squares  # noqa: PLC0415 - after the clock is set

        kinds = ([s for s in steps if bool(s[0].num_prefill) is has_prefill][-256:] for has_prefill in (True, False))
        rows = np.array([[*features(work), seconds] for kind in kinds for work, seconds in kind])
        weighted = rows[:, :5] / rows[:, 5:]
        self.coefficients = non_negative_least_squares(weighted)
        usual = weighted @ self.coefficients > 0.5
        if 0.8 * len(usual) <= np.count_nonzero(usual) < len(usual):
            self.coefficients = non_negative_least_squares(weighted[usual])

    def predict(self, work: Any) -> float:
        """Return the seconds of a step."""
        return float(np.dot(self.coefficients, features(work)))


def predictions(steps: Sequence[tuple[Any, float]], begin: int) -> list[tuple[int, float, float, float]]:
    """Return tokens, real time, time by the linear fit, and time by the worker's fit of each step from `begin` on."""
    from ballast_policy.learning.cost import Fit  # noqa: PLC0415

    fit, linear, found = Fit(), Linear(), []
    for index, (work, seconds) in enumerate(steps):
        if index >= begin:
            tokens = work.num_prefill + work.num_decode
            found.append((tokens, seconds, linear.predict(work), fit.model.predict(work)))
        fit.add(work, seconds)
        if index % EVERY == EVERY - 1:
            fit.refit()
            linear.refit(steps[: index + 1])
    return found


def table(found: Sequence[tuple[int, float, float, float]]) -> list[dict[str, Any]]:
    """Print one row for each size of steps, and return the figures."""
    print(f"{'tokens':>12}{'steps':>8}{'mean, ms':>10}{'linear':>20}{'with the knee':>20}")
    rows = []
    for least, most in (*SIZES, (1, SIZES[-1][1])):
        steps = np.array([step[1:] for step in found if least <= step[0] <= most])
        if not len(steps):
            continue
        of_time = steps[:, 1:].sum(axis=0) / steps[:, 0].sum()
        errors = np.abs(steps[:, 1:] / steps[:, :1] - 1).mean(axis=0)
        shown = [f"{share:.2f} (error {error:.1%})" for share, error in zip(of_time, errors, strict=True)]
        name = "all" if (least, most) == (1, SIZES[-1][1]) else f"{least} to {most}"
        mean = 1e3 * steps[:, 0].mean()
        print(f"{name:>12}{len(steps):8}{mean:10.1f}" + "".join(f"{text:>20}" for text in shown), flush=True)
        row: dict[str, Any] = {"tokens": name, "steps": len(steps), "mean_ms": mean}
        for which, share, error in zip(("linear", "knee"), of_time, errors, strict=True):
            row |= {f"{which}_share": float(share), f"{which}_error": float(error)}
        rows.append(row)
    return rows


def main() -> None:
    """Replay each load, and print one table for it."""
    options = parser(__doc__)
    options.set_defaults(model=None)
    options.add_argument("--load", default="40,60", help="percent of the tokens per second of offline alone")
    options.add_argument("--requests", type=int, default=684, help="online requests of each load")
    asked = options.parse_args()
    if not VARIABLES.items() <= os.environ.items():  # the allocator reads its settings when a process starts
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], os.environ | VARIABLES)  # noqa: S606
    about = machine()
    clock = Clock()
    time.monotonic = clock  # before vLLM and Ballast read it
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or make_model(Path(folder), shape(384, 6))
        side = Side(clock, Setup(str(model), "float32", slots=128, scale=16.0, longest=480, clock="cpu"), BALLAST)
        fit = side.vllm.scheduler.driver.host.fit
        steps: list[tuple[Any, float]] = []
        add = fit.add

        def recorded(work: Any, seconds: float) -> None:
            steps.append((work, seconds))
            add(work, seconds)

        fit.add = recorded
        alone = side.run(Run("offline alone", seconds=20.0, policy=UNBOUNDED))
        ceiling = alone.offline_tokens / alone.seconds
        cases = []
        for percent, cap in product(asked.load.split(","), (None, 0.25)):
            rate = float(percent) / 100 * ceiling
            policy = SLO | {"max_interference": cap}
            side.run(Run("warm", TUNING_START, TUNING, rate, policy=policy))
            num_warm = len(steps)
            for begin in starts(1 if asked.quick else -(-asked.requests // PART), PART):
                side.run(Run("mixed", begin, PART, rate, policy=policy))
            limit = "an SLO" if cap is None else f"a cap of {cap:.0%}"
            print(f"\nLoad {percent} %, {limit}, {len(steps) - num_warm:,} steps\n")
            cases.append({"load_percent": percent, "cap": cap, "rows": table(predictions(steps, num_warm))})
    write(asked.json, {"machine": about, "cases": cases})


if __name__ == "__main__":
    main()
