"""The scheduling half of a step: the policy host decides, and the engine's KV carries out the decision."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ballast_engine.resident_kv import ResidentKv
from ballast_engine.sequence import Sequence
from ballast_engine.stats import AdmissionRecord
from ballast_policy.host import Dispatch, Host, NestedPlanner, Planner
from ballast_policy.plan import StepPlan
from ballast_policy.request import Phase
from ballast_policy.snapshot import PolicyConfig


@dataclass(frozen=True, slots=True)
class DispatchedStep:
    """The work of one step, with the engine's records of its requests."""

    dispatch: Dispatch
    decodes: list[Sequence]
    """Requests that compute one token each."""
    chunks: list[tuple[Sequence, int]]
    admissions: tuple[AdmissionRecord, ...] = ()

    @property
    def plan(self) -> StepPlan:
        """The plan that was carried out."""
        return self.dispatch.plan

    @property
    def members(self) -> list[Sequence]:
        """All requests that take part, in the order of the batch."""
        return [*self.decodes, *(sequence for sequence, _ in self.chunks)]


class Scheduler:
    """The requests of one engine and their policy host."""

    def __init__(
        self, kv: ResidentKv, policy: PolicyConfig, *, planner: Planner, nested_planner: NestedPlanner
    ) -> None:
        self.kv = kv
        self.live: dict[int, Sequence] = kv.live
        """By `seq`: every request that entered and did not leave."""
        self.host = Host(self._sized(policy), planner=planner, nested_planner=nested_planner)

    def _sized(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the configuration with the KV sizes of this engine."""
        pool = self.kv.pool
        return replace(policy, num_blocks=pool.num_blocks, block_tokens=pool.block_tokens)

    def enter(self, sequence: Sequence, now: float) -> None:
        """Add a request that waits."""
        self.live[sequence.request.seq] = sequence
        self.host.enter(sequence.request, now)

    def leave(self, sequence: Sequence, now: float, *, is_complete: bool = False) -> None:
        """Remove a request, whether it waits or is resident."""
        request = sequence.request
        is_resident = request.phase is not Phase.WAITING
        self.host.leave(request, now, is_complete=is_complete)
        if is_resident:
            self.kv.release(request)
        del self.live[request.seq]

    def configure(self, policy: PolicyConfig) -> None:
        """Use another configuration from the next step on. Sizes of KV stay."""
        policy = self._sized(policy)
        for sequence in self.live.values():
            policy.set_slo(sequence.request, sequence.generation.ttft_seconds, sequence.generation.tpot_seconds)
        self.host.configure(policy)

    def schedule(self, now: float) -> DispatchedStep:
        """Plan a step and carry the plan out, up to the computing."""
        self.kv.count_private()
        return self._lay_out(self.host.schedule(self.kv, now))

    def nest(self, now: float, suspended: DispatchedStep, seconds: float) -> DispatchedStep:
        """Plan a step of at most `seconds` for new online requests during a suspended step."""
        self.kv.count_private()
        in_flight = [sequence.request for sequence in suspended.members]
        return self._lay_out(self.host.nest(self.kv, now, in_flight, seconds))

    def _lay_out(self, dispatch: Dispatch) -> DispatchedStep:
        live = self.live
        decodes = [live[request.seq] for request, num_tokens in dispatch.grants if num_tokens == 1]
        chunks = [(live[request.seq], num_tokens) for request, num_tokens in dispatch.grants if num_tokens > 1]
        admissions = tuple(
            AdmissionRecord(
                request_id=live[request.seq].request_id,
                request_class=request.request_class,
                queued_seconds=max(0.0, request.admitted - request.arrival),
                steps_waited=request.steps_waited,
                num_tokens=request.num_tokens,
                num_cached=request.num_computed,
            )
            for request in dispatch.admissions
        )
        return DispatchedStep(dispatch, decodes, chunks, admissions)
