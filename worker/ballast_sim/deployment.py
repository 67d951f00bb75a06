"""One model on one GPU: whether it fits, whether the SLO can be met at all, and the most it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ballast_policy.learning.cost import CostModel, attended
from ballast_policy.plan import StepPlan
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan
from ballast_sim import baselines
from ballast_sim.errors import Impossible
from ballast_sim.hardware import GPUS, Gpu
from ballast_sim.inputs import PlanInputs
from ballast_sim.memory import kv_tokens
from ballast_sim.pool import Job
from ballast_sim.replica import Policy
from ballast_sim.report import Report, report
from ballast_sim.shape import Quantization, Shape
from ballast_sim.simulation import Scenario, simulate
from ballast_sim.step_model import BatchWork, Roofline, profile
from ballast_sim.traffic import Arrival


class Ballast:
    """The policy that ships, as the simulator asks for it."""

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""
        return plan(snapshot)


@dataclass(frozen=True)
class Deployment:
    """A model on a GPU under an SLO, checked to be possible."""

    inputs: PlanInputs
    gpu: Gpu
    shape: Shape
    model: Roofline
    cost: CostModel
    kv_tokens: int

    @classmethod
    def of(cls, inputs: PlanInputs, online: Sequence[Arrival], offline: Sequence[Arrival] = ()) -> Deployment:
        """Resolve the names and check what physics allows.

        Raises:
            BadInput: a GPU or a model is not known.
            Impossible: the model does not fit, or the SLO is below the fastest step; says by which figure.
        """
        gpu, model = inputs.find_gpu(inputs.gpu), inputs.find_shape(inputs.model)
        if model.is_encoder:
            raise Impossible(f"{model.name} is an encoder: it generates nothing. Plan it as a service under `ahead`")
        roofline = Roofline(model, gpu, inputs.quantization, inputs.efficiency.value())
        longest = max((arrival.num_tokens for arrival in (*online, *offline)), default=1)
        deployment = cls(inputs, gpu, model, roofline, profile(roofline), kv_tokens(inputs, gpu, model, longest))
        deployment._check_slo(online)
        return deployment

    @property
    def tpot(self) -> float:
        """SLO, in seconds."""
        return self.inputs.slo.tpot_milliseconds / 1e3

    @property
    def ttft(self) -> float:
        """SLO, in seconds."""
        return self.inputs.slo.ttft_milliseconds / 1e3

    @cached_property
    def config(self) -> PolicyConfig:
        """What the policy is told."""
        engine = self.inputs.engine
        return PolicyConfig(
            slots=engine.slots,
            num_blocks=self.kv_tokens // engine.block_tokens,
            block_tokens=engine.block_tokens,
            chunk_tokens=engine.chunk_tokens,
            offline_share=engine.reserved_percent / 100,
            ttft=self.ttft,
            tpot=self.tpot,
            objective=self.inputs.slo.attainment_percent / 100,
        )

    def batch_ceiling(self, online: Sequence[Arrival]) -> tuple[int, str]:
        """The largest decode batch that the SLO allows, and why."""
        context = sum(a.num_prompt + a.num_output / 2 for a in online) / len(online)
        prompt = round(sum(a.num_prompt for a in online) / len(online))
        cost, slots = self.cost, self.config.slots
        by_tpot = cost.batch_ceiling(slots=slots, mean_context=context, tpot=self.tpot)
        both = cost.batch_ceiling(slots=slots, mean_context=context, tpot=self.tpot, ttft=self.ttft, prompt=prompt)
        each = cost.k3 + cost.k4 * context
        parts = (
            f"{1e3 * cost.k0:.1f} ms for the weights and {1e6 * each:.0f} us for each decode of {context:.0f} tokens"
        )
        bound = "TTFT" if both < by_tpot else "TPOT" if by_tpot < slots else "slots"
        return both, f"a step takes {parts}; bound by {bound}"

    def run(
        self,
        policy: Callable[[], Policy],
        *,
        online: Sequence[Arrival] = (),
        offline: Sequence[Arrival] = (),
        seconds: float,
        warmup: float | None = None,
        replicas: int = 1,
        config: PolicyConfig | None = None,
    ) -> Report:
        """Simulate so many replicas under this traffic; offline work never runs out."""
        scenario = Scenario(
            config=config or self.config,
            model=self.model,
            policy=policy,
            online=online,
            offline=(lambda: [Job.endless("offline", offline)]) if offline else list,
            seconds=seconds,
            warmup_seconds=min(60.0, seconds / 4) if warmup is None else warmup,
            replicas=replicas,
            seed=self.inputs.seed,
            cost=self.cost,
        )
        return report(simulate(scenario))

    def alone(self, online: Sequence[Arrival], seconds: float) -> Report:
        """Simulate one replica that serves online and nothing else."""
        policy = partial(baselines.online_only, self.config.chunk_tokens)
        return self.run(policy, online=online, seconds=seconds)

    def unbounded(self, lengths: Sequence[Arrival]) -> float:
        """Tokens per second of these lengths alone, steps as long as they come."""
        return self._ceiling(baselines.unbounded, lengths)

    def slo_bound(self, lengths: Sequence[Arrival]) -> float:
        """Tokens per second of these lengths alone with every step within the TPOT.

        No policy that keeps online decodes resident and within their TPOT does more.
        """
        return self._ceiling(lambda: baselines.held_to(self.tpot), lengths)

    def _ceiling(self, policy: Callable[[], Policy], lengths: Sequence[Arrival]) -> float:
        seconds = 60 * self.inputs.ceiling_minutes
        return self.run(policy, offline=lengths, seconds=seconds, warmup=seconds / 3).total_tokens

    def operations_per_token(self, lengths: Sequence[Arrival]) -> float:
        """Floating-point operations per token of these lengths, what MFU counts."""
        work = BatchWork(
            num_prefill=sum(a.num_prompt for a in lengths),
            prefill_context=sum(attended(0, a.num_tokens) for a in lengths),
            num_decode=sum(a.num_output for a in lengths),
        )
        return self.model.operations(work) / sum(a.num_tokens for a in lengths)

    def fits(self, result: Report) -> bool:
        """Whether enough requests met both parts of the SLO."""
        wanted = self.inputs.slo.attainment_percent / 100
        return result.ttft_attainment >= wanted and result.tpot_attainment >= wanted

    def _check_slo(self, online: Sequence[Arrival]) -> None:
        one = self.model.seconds(BatchWork(num_decode=1, decode_context=1))
        if one > self.tpot:
            raise Impossible(
                f"TPOT of {1e3 * self.tpot:g} ms is below the fastest step: one decode of {self.shape.name} takes "
                f"{1e3 * one:.1f} ms on one {self.gpu.name}, most of it for reading the weights. {self._faster(one)}"
            )
        shortest = min(online, key=lambda arrival: arrival.num_prompt).num_prompt
        first = self.model.seconds(BatchWork(shortest, attended(0, shortest), num_chunks=1))
        if first > self.ttft:
            raise Impossible(
                f"TTFT of {1e3 * self.ttft:g} ms is below the fastest prefill: the shortest prompt of the trace, "
                f"{shortest} token(s), takes {1e3 * first:.1f} ms on an idle {self.gpu.name}. {self._faster(first)}"
            )

    def _faster(self, found: float) -> str:
        """What would be faster, with figures."""
        one = BatchWork(num_decode=1, decode_context=1)
        times = {
            f"{kind.value} weights": replace(self.model, quantization=kind).seconds(one)
            for kind in (Quantization.FP8, Quantization.INT4)
        }
        times |= {f"one {name}": replace(self.model, gpu=gpu).seconds(one) for name, gpu in GPUS.items()}
        faster = {name: seconds for name, seconds in times.items() if seconds < found}
        listed = ", ".join(f"{1e3 * seconds:.1f} ms with {name}" for name, seconds in faster.items())
        return f"One decode would take {listed}" if faster else "No known GPU is faster: relax the SLO"
