"""The engine of a benchmark: names resolved to a step model and sizes, and what physics forbids refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast_policy.learning.cost import attended
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.deployment import Deployment
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.inputs import EngineInput, PlanInputs, SloInput
from ballast_sim.step_model import REFIT_A100, BatchWork, PublishedA100, StepModel
from ballast_sim.traffic import Arrival

STEP_MODELS = ("auto", "refit", "published", "roofline")
"""auto: the refit of what is published for Llama-3-8B on an A100, the roofline for all else."""
_PUBLISHED = ("llama-3-8b", "a100")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a GPU under an SLO, checked to be possible."""

    name: str
    step_model: str
    model: StepModel
    num_layers: int
    config: PolicyConfig

    @classmethod
    def of(
        cls, inputs: PlanInputs, online: Sequence[Arrival], offline: Sequence[Arrival], step_model: str = "auto"
    ) -> Setting:
        """Resolve and check.

        Raises:
            BadInput: a GPU, model or step model is not known, or has no published times.
            Impossible: the model does not fit, or the SLO is below the fastest step; says by which figure.
        """
        if step_model not in STEP_MODELS:
            raise BadInput(f"unknown step model {step_model!r}; known are {', '.join(STEP_MODELS)}")
        deployment = Deployment.of(inputs, online, offline)
        pair = (deployment.shape.name, deployment.gpu.name)
        if step_model in {"refit", "published"} and pair != _PUBLISHED:
            raise BadInput(f"no times are published for {' on '.join(pair)}, only for {' on '.join(_PUBLISHED)}")
        chosen = ("refit" if pair == _PUBLISHED else "roofline") if step_model == "auto" else step_model
        models: dict[str, StepModel] = {"refit": REFIT_A100, "published": PublishedA100(), "roofline": deployment.model}
        setting = cls(" on ".join(pair), chosen, models[chosen], deployment.shape.layers, deployment.config)
        setting._check_slo(online)
        return setting

    def _check_slo(self, online: Sequence[Arrival]) -> None:
        shortest = min(arrival.num_prompt for arrival in online)
        fastest = {
            "TPOT": (self.config.tpot, "one decode", BatchWork(num_decode=1, decode_context=1)),
            "TTFT": (self.config.ttft, f"a prompt of {shortest} token(s)", BatchWork(shortest, attended(0, shortest))),
        }
        for slo, (seconds, what, work) in fastest.items():
            found = self.model.seconds(work)
            if found > seconds:
                raise Impossible(
                    f"{slo} of {1e3 * seconds:g} ms is below the fastest step: {what} of {self.name} takes "
                    f"{1e3 * found:.1f} ms by the {self.step_model} step times"
                )


def setting(
    *,
    model: str,
    gpu: str,
    ttft: float,
    tpot: float,
    slots: int,
    chunk_tokens: int,
    online: Sequence[Arrival],
    offline: Sequence[Arrival],
    step_model: str = "auto",
) -> Setting:
    """Give the setting of these names; `ttft` and `tpot` in seconds.

    Raises:
        BadInput: a name that is not known.
        Impossible: a model too large, or an SLO below the fastest step.
    """
    inputs = PlanInputs(
        model=model,
        gpu=gpu,
        slo=SloInput(ttft_milliseconds=1e3 * ttft, tpot_milliseconds=1e3 * tpot),
        engine=EngineInput(slots=slots, chunk_tokens=chunk_tokens),
    )
    return Setting.of(inputs, online, offline, step_model)
