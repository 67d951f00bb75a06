"""The simulated engine of a benchmark: a model on a GPU, its step times, and the configuration of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.replay import hardware, model_shape
from ballast_sim.replay.feasibility import check_slo, kv_tokens, within_context
from ballast_sim.replay.step_model import REFIT_A100, Roofline, StepModel
from ballast_sim.replay.traffic import Arrival

STEP_MODELS = ("auto", "refit", "roofline")
"""`auto` is the refit of the published times for Llama-3-8B on an A100, and the roofline for every other pair."""
_PUBLISHED = ("llama-3-8b", "a100")
BLOCK_TOKENS = 16
OBJECTIVE = 0.99
"""Share of online requests that must keep the SLO."""


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """A model on a GPU that can meet the SLO."""

    name: str
    step_model: str
    model: StepModel
    num_layers: int
    config: PolicyConfig

    @classmethod
    def of(
        cls,
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
    ) -> BenchEngine:
        """Resolve the names, and check that the model fits and can meet the SLO. `ttft` and `tpot` are in seconds.

        Raises:
            BadInput: a GPU, a model or a step model is unknown, or has no published step times.
            Impossible: the model does not fit, or the SLO is below the fastest step.
        """
        if step_model not in STEP_MODELS:
            raise BadInput(f"unknown step model {step_model!r}; known are {', '.join(STEP_MODELS)}")
        shape, chip = model_shape.shape(model), hardware.gpu(gpu)
        if shape.is_encoder:
            raise Impossible(f"{shape.name} is an encoder: it generates nothing. Use `ballast bench encoder`")
        longest = max(a.num_tokens for traffic in (online, offline) for a in within_context(shape, traffic))
        roofline = Roofline(shape, chip, shape.weights())
        num_blocks = kv_tokens(roofline, longest=longest, slots=slots) // BLOCK_TOKENS
        pair = (shape.name, chip.name)
        if step_model == "refit" and pair != _PUBLISHED:
            raise BadInput(f"no times are published for {' on '.join(pair)}, only for {' on '.join(_PUBLISHED)}")
        chosen = ("refit" if pair == _PUBLISHED else "roofline") if step_model == "auto" else step_model
        models: dict[str, StepModel] = {"refit": REFIT_A100, "roofline": roofline}
        check_slo(roofline, online, ttft=ttft, tpot=tpot, step_model=models[chosen])
        config = PolicyConfig(
            slots,
            num_blocks,
            BLOCK_TOKENS,
            chunk_tokens=chunk_tokens,
            ttft=ttft,
            tpot=tpot,
            objective=OBJECTIVE,
            expert_share=shape.expert_share,
        )
        return cls(" on ".join(pair), chosen, models[chosen], shape.layers, config)
