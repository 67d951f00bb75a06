"""Compare the step-time models of the simulator.

The program compares the roofline with the fit of the published step times of an A100. It also prints the error of the
policy's cost model after a fit to a roofline, and to one of which some steps are slowed, as by another process on the
same core. All errors are relative, over steps of all mixes that no fit has seen.
"""

from __future__ import annotations

from random import Random

from replay import percentile

from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import SHAPES
from ballast_sim.replay.step_model import REFIT_A100, BatchWork, Roofline, StepModel, fit, profile, sample_steps

STEPS = 20_000
SLOWED = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Shares of the steps that are slowed."""


def errors(model: StepModel, reference: StepModel, steps: list[BatchWork]) -> str:
    """Return the mean, the 95th percentile and the largest relative error."""
    found = sorted(abs(model.predict(work) / reference.predict(work) - 1) for work in steps)
    p95 = percentile(found, 95)
    return f"mean {sum(found) / len(found):6.1%}   p95 {p95:6.1%}   max {found[-1]:6.1%}"


def slowdown(random: Random, share: float) -> float:
    """Draw the factor by which a step is slowed."""
    return random.uniform(2, 8) if random.random() < share else random.uniform(0.95, 1.05)


def main() -> None:
    """Print one block per question."""
    steps = sample_steps(Random(1), STEPS)
    roofline = Roofline(SHAPES["llama-3-8b"], GPUS["a100"])
    print("Roofline of Llama-3-8B on an A100, against the fit of the published times:")
    print(f"                            {errors(roofline, REFIT_A100, steps)}")

    print("\nThe policy's cost model, fitted to a roofline of Llama-3-8B:")
    for name, gpu in GPUS.items():
        model = Roofline(SHAPES["llama-3-8b"], gpu)
        print(f"  {name:5}                     {errors(profile(model), model, steps)}")

    print("\nThe same for the A100, if a share of the steps takes 2 to 8 times as long, and the others vary by 5 %:")
    for share in SLOWED:
        random = Random(2)
        seen = [(work, roofline.predict(work) * slowdown(random, share)) for work in sample_steps(random, 512)]
        print(f"  {share:5.0%}                     {errors(fit(seen), roofline, steps)}")


if __name__ == "__main__":
    main()
