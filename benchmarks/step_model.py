"""Compare the step-time models of the simulator.

The program compares the refit of the published A100 coefficients with their two pieces, and the roofline with both. It
also prints the error of the policy's cost model after a fit to a roofline, and to one of which some steps are slowed,
as by another process on the same core. All errors are relative, over steps of all mixes that no fit has seen.
"""

from __future__ import annotations

from random import Random

from replay import percentile

from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import SHAPES
from ballast_sim.replay.step_model import (
    REFIT_A100,
    BatchWork,
    PublishedA100,
    Roofline,
    StepModel,
    fit,
    profile,
    relative_errors,
    sample_steps,
)

STEPS = 20_000
SLOWED = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Shares of the steps that are slowed."""


def errors(model: StepModel, reference: StepModel, steps: list[BatchWork]) -> str:
    """Return the mean, the 95th percentile and the largest relative error."""
    found = relative_errors(model, reference, steps)
    p95 = percentile(found, 95)
    return f"mean {sum(found) / len(found):6.1%}   p95 {p95:6.1%}   max {found[-1]:6.1%}"


def slowdown(random: Random, share: float) -> float:
    """Draw the factor by which a step is slowed."""
    return random.uniform(2, 8) if random.random() < share else random.uniform(0.95, 1.05)


def main() -> None:
    """Print one block per question."""
    steps = sample_steps(Random(1), STEPS)
    small = [work for work in steps if work.num_prefill + work.num_decode <= 512]
    large = [work for work in steps if work.num_prefill + work.num_decode > 512]
    published = PublishedA100()
    print("Published A100 Llama-3-8B coefficients, 100 decodes of context 1,300 at the seam:")
    for prefill in (412, 413):
        work = BatchWork(num_prefill=prefill, num_decode=100, decode_context=130_000)
        seconds = (published.predict(work), REFIT_A100.predict(work))
        print(f"  {prefill + 100} tokens: published {1e3 * seconds[0]:.1f} ms, refit {1e3 * seconds[1]:.1f} ms")

    again = profile(published, seed=2, num_steps=4000)
    shipped = REFIT_A100
    print("\nMonotone refit (coefficients >= 0), shipped and fitted again on other steps:")
    for name in ("k0", "k1", "k2", "k3", "k4"):
        print(f"  {name}: {getattr(shipped, name):.4g}   {getattr(again, name):.4g}")
    print(f"  error, all steps          {errors(REFIT_A100, published, steps)}")
    print(f"  error, up to 512 tokens   {errors(REFIT_A100, published, small)}")
    print(f"  error, above 512 tokens   {errors(REFIT_A100, published, large)}")

    roofline = Roofline(SHAPES["llama-3-8b"], GPUS["a100"])
    print("\nRoofline of Llama-3-8B on an A100:")
    print(f"  against the refit         {errors(roofline, REFIT_A100, steps)}")
    print(f"  against the pieces        {errors(roofline, published, steps)}")

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
