"""Alternatives to a plan, with figures: other weights, GPUs, SLOs and chunks for the same traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.costs import GpuPrice
from ballast_sim.planner.deployment import Deployment
from ballast_sim.planner.fleet import Progress
from ballast_sim.planner.fleet_plan import FleetPlan, Option, per_million
from ballast_sim.planner.inputs import PlanInputs
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import Quantization
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.traffic import Arrival, Trace

CHUNKS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative: the throughput of one GPU, and an estimate of the GPUs for the same work."""

    name: str
    bound: float
    """SLO-bound tokens per second of offline lengths on one GPU."""
    full: float
    """Tokens per second of offline lengths in full batches on one GPU."""
    dollars: float
    """Dollars per million tokens at the SLO-bound throughput."""
    gpus: int = 0
    """Mixed GPUs for the same work, if they reach the same share of their SLO-bound throughput as those of the plan.

    0 if the plan has no mixed GPUs.
    """
    dollars_per_hour: float = 0.0
    """Cost of these GPUs."""
    problem: str = ""
    """Reason why the alternative is impossible; empty if it is possible."""


def alternatives(
    inputs: PlanInputs, found: FleetPlan, offline: Sequence[Arrival], online: Trace, progress: Progress
) -> list[Alternative]:
    """Compute other weights, GPUs and SLOs as the plan is computed. The first alternative is the plan itself."""
    changes: list[tuple[str, dict[str, object]]] = [("as given", {})]
    given = inputs.roofline(inputs.model).quantization
    changes += [(f"{kind.value} weights", {"quantization": kind}) for kind in Quantization if kind is not given]
    names = dict.fromkeys((*GPUS, *(name.lower() for name in inputs.gpus)))
    changes += [(f"{name} instead", {"gpu": name}) for name in names if name != inputs.gpu.lower()]
    for tpot in (inputs.slo.tpot_milliseconds / 2, inputs.slo.tpot_milliseconds * 2):
        slo = inputs.slo.model_copy(update={"tpot_milliseconds": tpot})
        changes.append((f"TPOT {tpot:g} ms", {"slo": slo}))
    tried = []
    for name, change in changes:
        progress(f"trying {name}")
        tried.append(_try(name, inputs.model_copy(update=change), found, online, offline))
    return tried


def _try(name: str, inputs: PlanInputs, found: FleetPlan, online: Trace, offline: Sequence[Arrival]) -> Alternative:
    try:
        deployment = Deployment.of(inputs, online, offline)
        known, of_plan = found.maximums, found.deployment
        full = known.offline_full if deployment.model == of_plan.model else deployment.unbounded(offline)
        is_same = deployment.model == of_plan.model and deployment.config == of_plan.config
        bound = known.offline_bound if is_same else deployment.slo_bound(offline)
    except (BadInput, Impossible) as error:
        return Alternative(name, 0.0, 0.0, inf, problem=str(error))
    gpus = _about(found, bound / full, full)
    dollars = GpuPrice(deployment.model.gpu, inputs.energy, inputs.money).per_hour(bound / full)
    return Alternative(name, bound, full, per_million(dollars, bound), gpus, gpus * dollars)


def _about(found: FleetPlan, kept: float, full: float) -> int:
    """Estimate the GPUs as `ceil(work / utilization)`.

    The work scales with the throughput of full batches, and the utilization with the SLO-bound throughput.
    """
    if not found.mixed:
        return 0
    work = found.work * found.maximums.offline_full / full
    return ceil(work / (found.mixed.utilization * kept / found.maximums.bound_share) - 1e-9)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The figures of one mixed GPU with another prefill chunk."""

    tokens: int
    offline_tokens: float
    """Tokens per second over all GPUs."""
    ttft_p50: float
    ttft_attainment: float
    tpot_attainment: float


def chunks(found: FleetPlan, mixed: Option, offline: Sequence[Arrival]) -> list[Chunk]:
    """Simulate one of the mixed GPUs with smaller and larger prefill chunks, and with the traffic of the plan."""
    deployment, tried = found.deployment, []
    for tokens in sorted({*CHUNKS, deployment.config.chunk_tokens}):
        result = deployment.run(
            Ballast,
            online=found.traffic.of(1, mixed.gpus),
            offline=offline,
            seconds=found.traffic.seconds,
            config=replace(deployment.config, tpot_share=mixed.step_share, chunk_tokens=tokens),
        )
        tried.append(
            Chunk(
                tokens=tokens,
                offline_tokens=result.offline.total * mixed.gpus,
                ttft_p50=result.ttft.p50,
                ttft_attainment=result.ttft_attainment,
                tpot_attainment=result.tpot_attainment,
            )
        )
    return tried
