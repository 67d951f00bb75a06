"""A model on a GPU, as the inputs of a plan describe it, and the results of its simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, inf, isfinite

from ballast_policy.learning.cost import CostModel, attended
from ballast_policy.snapshot import PolicyConfig
from ballast_policy.step.budget import ONLINE_CHUNKS
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.inputs import PlanInputs
from ballast_sim.replay.attainment import Percentiles
from ballast_sim.replay.feasibility import check_slo, within_context
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Fill, held_to
from ballast_sim.replay.replica import Policy
from ballast_sim.replay.report import Report, report
from ballast_sim.replay.simulation import Scenario, simulate, warmup_of
from ballast_sim.replay.step_model import BatchWork, Roofline, profile
from ballast_sim.replay.traffic import Arrival


@dataclass(frozen=True)
class Deployment:
    """A model that fits on a GPU and can meet the SLO."""

    inputs: PlanInputs
    model: Roofline
    cost: CostModel
    kv_tokens: int

    @classmethod
    def of(cls, inputs: PlanInputs, online: Sequence[Arrival], offline: Sequence[Arrival] = ()) -> Deployment:
        """Resolve the names, and check that the model fits and can meet the SLO of the online requests.

        Raises:
            BadInput: a GPU or a model is unknown, or the requests are too long for the model.
            Impossible: the model does not fit, or the SLO is below the fastest step.
        """
        model = inputs.roofline(inputs.model)
        if model.shape.is_encoder:
            raise Impossible(
                f"{model.shape.name} is an encoder: it generates nothing. Plan it as a service under `ahead`, or run "
                "`ballast bench encoder`"
            )
        online, offline = within_context(model.shape, online), within_context(model.shape, offline)
        tokens = inputs.kv_tokens(model, max((arrival.num_tokens for arrival in (*online, *offline)), default=1))
        deployment = cls(inputs, model, profile(model), tokens)
        if online:
            config = deployment.config
            check_slo(model, online, ttft=config.ttft, tpot=config.tpot, share=config.objective)
        return deployment

    @cached_property
    def config(self) -> PolicyConfig:
        """Configuration of the policy, with the SLO in seconds and as a share."""
        engine, slo = self.inputs.engine, self.inputs.slo
        return PolicyConfig(
            slots=engine.slots,
            num_blocks=self.kv_tokens // engine.block_tokens,
            block_tokens=engine.block_tokens,
            chunk_tokens=engine.chunk_tokens,
            offline_share=engine.reserved_percent / 100,
            ttft=slo.ttft_milliseconds / 1e3,
            tpot=slo.tpot_milliseconds / 1e3,
            objective=slo.attainment_percent / 100,
            expert_share=self.model.shape.expert_share,
            # vLLM serves GPUs: it cannot suspend a step, and a parked request keeps its place in a batch.
            can_suspend=False,
            most_residents=engine.slots,
        )

    def batch_ceiling(self, online: Sequence[Arrival]) -> tuple[int, str]:
        """Return the largest decode batch that the SLO allows, and the reason."""
        context = sum(a.num_prompt + a.num_output / 2 for a in online) / len(online)
        prompt = round(sum(a.num_prompt for a in online) / len(online))
        cost, slots, ttft, tpot = self.cost, self.config.slots, self.config.ttft, self.config.tpot
        by_tpot = cost.batch_ceiling(slots=slots, mean_context=context, tpot=tpot)
        both = cost.batch_ceiling(slots=slots, mean_context=context, tpot=tpot, ttft=ttft, prompt=prompt)
        each = cost.k3 + cost.k4 * context
        experts = f", {1e3 * cost.experts(both):.1f} ms for the experts that {both} decodes touch," if cost.k5 else ""
        parts = (
            f"{1e3 * cost.k0:.1f} ms for the weights{experts} and {1e6 * each:.0f} us for each decode of {context:.0f} "
            "tokens"
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
        """Simulate replicas with this traffic. Offline work never runs out."""
        scenario = Scenario(
            config=config or self.config,
            model=self.model,
            policy=policy,
            online=online,
            offline=(lambda: [SimulatedJob.endless("offline", offline)]) if offline else list,
            seconds=seconds,
            warmup_seconds=warmup_of(seconds) if warmup is None else warmup,
            replicas=replicas,
            seed=self.inputs.seed,
            cost=self.cost,
        )
        return report(simulate(scenario))

    def alone(self, online: Sequence[Arrival], seconds: float) -> Report:
        """Simulate one replica that serves online traffic alone, with the first chunk that meets the SLO, or the best.

        The chunks are those of the inputs and of vLLM, and one with as many tokens as Ballast computes in a step.
        """
        chunk, tried = self.config.chunk_tokens, list[Report]()
        for tokens in sorted({chunk, Fill.chunk_tokens, ONLINE_CHUNKS * chunk + self.config.slots}):
            tried.append(self.run(partial(Fill, tokens), online=online, seconds=seconds))
            if self.fits(tried[-1]):
                return tried[-1]
        return max(tried, key=lambda one: min(one.ttft_attainment, one.tpot_attainment))

    def unbounded(self, lengths: Sequence[Arrival]) -> float:
        """Return the tokens per second of these lengths alone, without a bound on the step time."""
        return self.maximum(Fill, lengths).total_tokens

    def slo_bound(self, lengths: Sequence[Arrival]) -> float:
        """Return the tokens per second of these lengths alone, with every step within the TPOT.

        No policy that keeps online decodes resident and within their TPOT computes more.
        """
        return self.maximum(partial(held_to, self.config.tpot), lengths).total_tokens

    def maximum(self, policy: Callable[[], Policy], lengths: Sequence[Arrival]) -> Report:
        """Run these lengths alone; raise BadInput if `throughputMinutes` is too short for them."""
        seconds = 60 * self.inputs.throughput_minutes
        found = self.run(policy, offline=lengths, seconds=seconds, warmup=seconds / 3)
        answer = self.answer_seconds(lengths, found)
        check_minutes("throughputMinutes", self.inputs.throughput_minutes, found.seconds, answer)
        return found

    def answer_seconds(self, lengths: Sequence[Arrival], alone: Report, most: float = inf) -> float:
        """Return the seconds of 95 % of the answers, if a token takes as long as `alone`, at most `most`."""
        decode, held = alone.offline.decode, alone.offline_slots * self.config.slots
        each = min(most, held / decode if decode else inf)
        return each * Percentiles.of(arrival.num_output for arrival in lengths).p95

    def operations_per_token(self, lengths: Sequence[Arrival]) -> float:
        """Return the floating-point operations per token of these lengths, as MFU counts them."""
        work = BatchWork(
            num_prefill=sum(a.num_prompt for a in lengths),
            prefill_context=sum(attended(0, a.num_tokens) for a in lengths),
            num_decode=sum(a.num_output for a in lengths),
        )
        return self.model.operations(work) / sum(a.num_tokens for a in lengths)

    def fits(self, result: Report) -> bool:
        """Return whether enough requests met both parts of the SLO."""
        return result.keeps(self.config.objective, self.config.objective)


def check_minutes(name: str, minutes: float, measured: float, answer: float) -> None:
    """Check that answers of these seconds can end in the measured seconds; raise BadInput if they cannot."""
    if answer >= measured:
        enough = f"Set it to {ceil(minutes * answer / measured + 1)}" if isfinite(answer) else "Increase it"
        raise BadInput(f"{name} is {minutes:g}: answers need {answer:,.0f} s, and {measured:,.0f} s count. {enough}")
