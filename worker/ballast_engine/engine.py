"""The continuous-batching engine: one step is `schedule() -> Batch`, `run`, `finish`.

The policy decides which requests run. The engine carries out the plan and reports the result. One thread calls `step`;
any thread may call the other methods.

If its plan allows it, a step is suspended between two layers when an online request arrives. The engine nests a step
for the new requests in it and returns their first tokens. The next call of `step` resumes the suspended step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol

from ballast_engine.batch import Batch, Ints
from ballast_engine.block_tables import BlockTables
from ballast_engine.counters import EngineCounters
from ballast_engine.footprint import Footprint
from ballast_engine.inbox import Command, Configure, End, Inbox, Submit
from ballast_engine.kv import BlockPool
from ballast_engine.options import EngineOptions
from ballast_engine.request import FinishReason, GenerationRequest, Output
from ballast_engine.resident_kv import ResidentKv
from ballast_engine.running_step import RunningStep
from ballast_engine.scheduler import DispatchedStep, Scheduler
from ballast_engine.sequence import Sequence
from ballast_engine.sequence_builder import SequenceBuilder, Vocabulary
from ballast_engine.stats import NO_STEP, EngineStats, StepKind, StepRecord
from ballast_engine.suspension import Interrupt, Suspended
from ballast_log import Log
from ballast_policy.host import Host, NestedPlanner, Planner
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_policy.step.planner import plan
from ballast_policy.step.suspension import plan_nested

log = Log(__name__)

STALL_SECONDS = 0.005
"""How soon a stalled engine plans again, unless the plan states when."""


class Runner(Protocol):
    """The tensor half of the engine."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def footprint(self) -> Footprint: ...
    def run(self, batch: Batch, interrupt: Interrupt | None) -> Ints | Suspended: ...
    def resume(self, suspended: Suspended, interrupt: Interrupt | None) -> Ints | Suspended: ...


class BallastEngine:
    """Turn requests into tokens, one step at a time."""

    def __init__(
        self,
        *,
        executor: Runner,
        tokenizer: Vocabulary,
        policy: PolicyConfig,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
        planner: Planner = plan,
        nested_planner: NestedPlanner = plan_nested,
    ) -> None:
        self.last_step: StepRecord = NO_STEP
        self.is_stalled = False
        """True if the last plan ran nothing, although there are requests."""
        self._executor = executor
        self._clock = clock
        capacity = min(executor.max_model_len, executor.num_blocks * executor.block_tokens)
        self._builder = SequenceBuilder(
            tokenizer,
            vocab_size=executor.vocab_size,
            max_tokens=capacity if options.max_model_len is None else min(capacity, options.max_model_len),
            block_tokens=executor.block_tokens,
            has_prefix_cache=options.prefix_cache,
            isolates_tenants=options.isolate_tenants,
        )
        self._inbox = Inbox()
        self._by_id: dict[str, Sequence] = {}
        self._scheduler = Scheduler(
            ResidentKv(
                BlockPool(executor.num_blocks, executor.block_tokens, has_prefix_cache=options.prefix_cache),
                BlockTables(executor.block_tokens, -(-capacity // executor.block_tokens)),
            ),
            policy,
            planner=planner,
            nested_planner=nested_planner,
        )
        self._counters = EngineCounters()
        self._wait_until = -inf
        self._interrupt = Interrupt()
        self._suspended: RunningStep | None = None

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of prompt and answer together."""
        return self._builder.max_tokens

    @property
    def footprint(self) -> Footprint:
        """The cost of one token of the model on this machine."""
        return self._executor.footprint

    @property
    def host(self) -> Host:
        """The policy host; only the engine's thread may call it."""
        return self._scheduler.host

    @property
    def requests(self) -> dict[str, Request]:
        """The policy's record of each request, by id; only the engine's thread may read it."""
        return {request_id: sequence.request for request_id, sequence in self._by_id.items()}

    @property
    def policy(self) -> PolicyConfig:
        """The policy configuration in force."""
        return self._scheduler.host.config

    # From any thread

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Its outputs come from `step`.

        Raises:
            InvalidRequest: the engine can never serve the request. The message is for the user.
        """
        sequence = self._builder.make(request, self.policy, self._clock())
        self._inbox.claim_id(request.request_id)
        self._inbox.put(Submit(sequence))
        if request.request_class is RequestClass.ONLINE:
            self._interrupt.raise_at(0)

    def abort(self, request_id: str) -> None:
        """End a request before the next plan. An unknown id is ignored."""
        self._inbox.put(End((request_id,), FinishReason.ABORTED))

    def give_back(self, request_ids: Items[str]) -> None:
        """End requests with their generated tokens, so that another engine can continue them."""
        self._inbox.put(End(tuple(request_ids), FinishReason.GIVEN_BACK))

    def configure(self, policy: PolicyConfig) -> None:
        """Use another policy configuration from the next step on. The sizes of KV stay."""
        self._inbox.put(Configure(policy))

    def wait(self, timeout: float) -> None:
        """Sleep until `step` has work, at most `timeout` seconds."""
        if self._inbox or (self._by_id and not self.is_stalled):
            return
        if self._by_id:
            # The policy holds back the work of a stalled engine. Time alone may release it.
            held_for = self._wait_until - self._clock()
            timeout = min(timeout, held_for if held_for > 0 else STALL_SECONDS)
        self._inbox.wait(timeout)

    @property
    def has_work(self) -> bool:
        """Whether a submitted request has not ended."""
        return bool(self._inbox.num_ids)

    @property
    def is_suspended(self) -> bool:
        """Whether a step is suspended. The next call of `step` resumes it."""
        return self._suspended is not None

    def stats(self) -> EngineStats:
        """Return all counters. The call is cheap, and two counters may differ by one step."""
        kv, pool = self._scheduler.kv, self._scheduler.kv.pool
        used, cached = pool.num_used, pool.num_cached
        return self._counters.stats(
            self._scheduler.host,
            kv_used=used,
            kv_cached=cached,
            kv_free=pool.num_blocks - used - cached,
            kv_waste_ratio=kv.num_unused / (used * pool.block_tokens) if used else 0.0,
        )

    def num_computed(self, request_id: str) -> int:
        """Return the tokens of a request that were computed so far; 0 if it is not in the engine."""
        sequence = self._by_id.get(request_id)
        return 0 if sequence is None else sequence.request.most_computed

    # The engine's thread

    def step(self) -> list[Output]:
        """Compute one step and return its outputs; none if nothing can run.

        If the step is suspended, the outputs are those of the nested step, and the next call resumes the step.
        """
        running, self._suspended = self._suspended, None
        outputs: list[Output] = []
        if running is None:
            started = self._clock()
            self._interrupt.clear()  # before the inbox is read: a later request raises it again
            outputs = self._take_in(self._inbox.take(), started)
            running = self._begin(started)
            if running is None:
                return outputs
        outputs += self._advance(running)
        if running.suspended is not None:
            self._suspended = running
            outputs += self._nest(running)
        return outputs

    def _begin(self, started: float) -> RunningStep | None:
        """Plan a step and assemble its batch; return None if nothing can run."""
        if not self._by_id:
            return None
        step = self._scheduler.schedule(started)
        self._counters.note_plan(step)
        self.is_stalled = not step.members
        self._wait_until = step.plan.wait_until
        if self.is_stalled:
            return None
        running = self._lay_out(step, started)
        running.seconds_left = step.plan.suspendable_seconds
        return running

    def _lay_out(self, step: DispatchedStep, started: float) -> RunningStep:
        return RunningStep(step, self._scheduler.kv.tables.assemble(step.decodes, step.chunks), started)

    def _advance(self, running: RunningStep) -> list[Output]:
        """Compute a step to its end, or until it is interrupted."""
        self._scheduler.host.began(running.step.plan, self._clock())
        try:
            drawn = self._compute(running, self._interrupt if running.seconds_left > 0 else None)
        except Exception as error:
            running.suspended = None
            log.exception("step failed", requests=len(running.step.members))
            return self._fail(running.step.members, error)
        finally:
            self._scheduler.host.ended(self._clock())
        if drawn is None:
            return []
        outputs = self._finish(running.step, drawn)
        self._record(running)
        return outputs

    def _nest(self, running: RunningStep) -> list[Output]:
        """Accept new requests while a step is suspended, and compute as many first tokens as the time allows.

        Other commands wait for the end of the suspended step, because its KV blocks must keep their owners.
        """
        started = self._clock()
        self._interrupt.clear()
        newcomers = self._inbox.take_newcomers()
        outputs = self._take_in(newcomers, started)
        if newcomers:
            step = self._scheduler.nest(started, running.step, running.seconds_left)
            self._counters.note_plan(step)
            if step.members:
                outputs += self._advance(self._lay_out(step, started))
            seconds = self._clock() - started
            running.suspended_seconds += seconds
            running.seconds_left -= seconds
        return outputs

    def reset(self) -> None:
        """Forget cached prefixes and counters, but keep the cost model. Call it on an idle engine."""
        self._scheduler.kv.pool.forget()
        self._scheduler.host.forget()
        self._counters = EngineCounters()
        self.last_step = NO_STEP

    def _take_in(self, commands: Iterable[Command], now: float) -> list[Output]:
        outputs = []
        for command in commands:
            match command:
                case Submit(sequence):
                    outputs += self._enter(sequence, now)
                case End(request_ids, reason):
                    found = [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]
                    outputs += [self._end(sequence, reason) for sequence in dict.fromkeys(found)]
                case Configure(policy):
                    self._scheduler.configure(policy)
        return outputs

    def _enter(self, sequence: Sequence, now: float) -> list[Output]:
        self._scheduler.enter(sequence, now)
        self._by_id[sequence.request_id] = sequence
        return [] if sequence.end is None else [self._end(sequence, sequence.end)]

    def _compute(self, running: RunningStep, interrupt: Interrupt | None) -> list[int] | None:
        """Run or resume a step; return None if it is suspended."""
        if running.suspended is None:
            tokens = self._executor.run(running.batch, interrupt)
        else:
            tokens = self._executor.resume(running.suspended, interrupt)
        if isinstance(tokens, Suspended):
            running.suspended = tokens
            return None
        running.suspended = None
        if len(tokens) != len(running.batch.samples):
            raise RuntimeError(f"the executor returned {len(tokens)} tokens for {len(running.batch.samples)} requests")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._executor.vocab_size:
            raise RuntimeError(f"the executor returned a token outside the vocabulary of {self._executor.vocab_size}")
        drawn: list[int] = tokens.tolist()
        return drawn

    def _fail(self, members: Items[Sequence], error: Exception) -> list[Output]:
        """End every request of the step: the content of its KV blocks is unknown."""
        self._counters.failed_steps += 1
        sentence = f"The engine failed while it computed this request ({type(error).__name__}: {error}). Send it again."
        return [self._end(sequence, FinishReason.FAILED, sentence) for sequence in members]

    def _finish(self, step: DispatchedStep, tokens: Items[int]) -> list[Output]:
        """Record the work of the step, and append each new token to its request."""
        outputs = []
        drawn = iter(tokens)
        kv, host, counters = self._scheduler.kv, self._scheduler.host, self._counters
        now = self._clock()
        for sequence, num_tokens in [*((sequence, 1) for sequence in step.decodes), *step.chunks]:
            request = sequence.request
            kv.settle(sequence, num_tokens)
            is_drawn = request.num_computed == request.num_tokens
            is_new = request.num_computed > request.most_computed
            counters.note_tokens(request, *host.computed(request, num_tokens, now), is_generated=is_drawn and is_new)
            if is_drawn:
                sequence.append(next(drawn))
                output = self._deliver(sequence)
                if output is not None:
                    outputs.append(output)
        counters.note_charges(host.settle())
        return outputs

    def _deliver(self, sequence: Sequence) -> Output | None:
        """Return the output for a new token: for a stream always, else for the first token and at the end."""
        reason = sequence.find_end()
        if reason is not None:
            return self._end(sequence, reason)
        if sequence.generation.stream:
            sequence.read()
            return sequence.output(sequence.take_text())
        return None if sequence.is_announced else sequence.output("")

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> Output:
        """Remove a request, whether it waits or is resident, and return its last output."""
        del self._by_id[sequence.request_id]
        self._inbox.free_id(sequence.request_id)
        is_complete = reason in {FinishReason.STOP, FinishReason.LENGTH}
        self._scheduler.leave(sequence, self._clock(), is_complete=is_complete)
        text = ""
        if is_complete:
            sequence.read()
            text = sequence.take_text() + sequence.text.end()
        output = sequence.output(text)
        output.finish_reason = reason
        output.error = error
        if reason is FinishReason.GIVEN_BACK:
            output.generated = sequence.generated
            output.num_computed = sequence.request.most_computed
        return output

    def _record(self, running: RunningStep) -> None:
        """Record the time of a step, without the time of its suspension: a nested step has its own record."""
        step, work = running.step, running.work
        self._counters.note_step(self._scheduler, running)
        seconds = self._clock() - running.started - running.suspended_seconds
        self._scheduler.host.observed(work, seconds)
        self.last_step = StepRecord(
            kind=StepKind.DECODE if not step.chunks else StepKind.MIXED if step.decodes else StepKind.PREFILL,
            seconds=seconds,
            predicted_seconds=step.plan.predicted_seconds,
            num_prefill=work.num_prefill,
            num_decode=work.num_decode,
            admissions=step.admissions,
        )
