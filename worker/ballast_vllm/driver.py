"""The policy host of one EngineCore: it plans each step of vLLM, and learns from the batch that vLLM ran.

The scheduler calls, in this order:

    enter               a request arrives
    leave               requests finished, for any reason
    begin               plan a step: preempt, park and resume, and set `grants` and `admissions`
    dispatched          vLLM built the batch of the step
    computed            vLLM added the output of the step to the requests

With asynchronous scheduling, a step begins before the output of the step before it is there.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from ballast_engine.stats import AdmissionRecord
from ballast_policy.host import Host, Planner
from ballast_policy.learning.cost import StepWork, attended
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import PARKED, RUNNING, WAITING, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan as plan_step
from ballast_vllm.adapter_places import AdapterPlaces
from ballast_vllm.charges import Charges, Flight, Pairs
from ballast_vllm.counters import Counters
from ballast_vllm.drafts import DecodeStep, DraftGain
from ballast_vllm.plan_limits import PlanLimits
from ballast_vllm.private_blocks import PrivateBlocks
from ballast_vllm.requests import place_of
from ballast_vllm.snapshot_kv import EAGER, SnapshotKv

if TYPE_CHECKING:
    from ballast_vllm.internals import KvBlocks, PlannedBatch

HELD_UP_SECONDS = 2.0
"""How long a request waits for a place of its adapter before it counts as held up. Short bursts end before that."""

NEAR = 32
"""Tokens before the end of a block from which drafts may begin another one. With small blocks, each request counts."""


class Driver:
    """The requests of one EngineCore and their policy host."""

    def __init__(
        self,
        config: PolicyConfig,
        batch: PlannedBatch,
        blocks: KvBlocks,
        *,
        limits: PlanLimits,
        is_async: bool = False,
        max_tokens: int,
        num_adapters: int = 0,
        clock: Callable[[], float] = time.monotonic,
        planner: Planner = plan_step,
    ) -> None:
        """`num_adapters`: most LoRA adapters of a step."""
        self.host = Host(config, planner=planner)
        self.counters = Counters()
        self.grants: Mapping[str, int] = {}
        self.admissions: list[Any] = []
        self.live: dict[int, Any] = {}
        """vLLM's requests by `seq`, from `enter` until they finish."""
        self.records: dict[str, Request] = {}
        """The same requests by id."""
        self.ids: dict[int, str] = {}
        """vLLM's ids of the same requests, by `seq`."""
        self.blocked: dict[int, Request] = {}
        """Requests that vLLM cannot admit yet; the host does not know them."""
        self.places = AdapterPlaces(num_adapters)
        self._batch = batch
        self.blocks = blocks
        """vLLM's KV blocks."""
        self.kv = SnapshotKv(blocks, self.live, self.host.residents)
        """The KV of each snapshot."""
        self.private_blocks = PrivateBlocks(blocks, self.host.residents, self.ids)
        self._charges = Charges(self.host, self.live, self.counters.tokens)
        self._limits = limits
        self._is_async = is_async
        self._max_tokens = max_tokens
        self._clock = clock
        self.draft_gain = DraftGain()
        self._seq = 0
        self.flights: deque[Flight] = deque()
        """The steps that vLLM runs, the oldest first."""
        self._last_end = -inf
        self.plan = StepPlan()
        """The plan of the last step."""
        self._snapshot_waiting: Sequence[Request] = ()
        self.slos: dict[int, tuple[float | None, float | None]] = {}
        """TTFT and TPOT of requests with an SLO of their own."""

    @property
    def is_busy(self) -> bool:
        """Whether vLLM runs a step."""
        return bool(self.flights)

    @property
    def num_blocked(self) -> dict[RequestClass, int]:
        """Return the waiting requests that the host does not know yet, by class."""
        numbers = dict.fromkeys(RequestClass, 0)
        for record in (*self.blocked.values(), *self.places.outside.values()):
            numbers[record.request_class] += 1
        return numbers

    def held_up(self, now: float) -> dict[str, Request]:
        """Return the offline requests by id that have waited for some time, while online requests hold all places."""
        found = self.places.held_up()
        return {self.ids[record.seq]: record for record in found if now - record.arrival > HELD_UP_SECONDS}

    # Requests

    def enter(self, request: Any, now: float, wall: float) -> None:
        """Add a request. `wall` is the present on the clock of its arrival time."""
        place = place_of(request.sampling_params or request.pooling_params)
        self._seq += 1
        seq, config = self._seq, self.host.config
        share = config.tenants.get(place.tenant)
        num_prompt = request.num_prompt_tokens
        record = Request(
            seq=seq,
            request_class=place.request_class,
            arrival=now - max(0.0, wall - request.arrival_time),
            num_prompt=num_prompt,
            max_output=max(1, min(request.max_tokens, self._max_tokens - num_prompt)),
            tenant=place.tenant,
            priority=place.priority if share is None else min(place.priority, share.max_priority),
            slack=place.slack,
            prefix_key=place.prefix_key,
            num_tokens=request.num_tokens,
            most_computed=place.num_computed,
        )
        if place.ttft is not None or place.tpot is not None:
            self.slos[seq] = place.ttft, place.tpot
        self._set_slo(record)
        request_id = request.request_id
        self.live[seq], self.records[request_id], self.ids[seq] = request, record, request_id
        if self._batch.is_ready(request):
            self._enter_ready(record, now)
        else:
            self.blocked[seq] = record

    def _enter_ready(self, record: Request, now: float) -> None:
        if self.places.enter(record, self._batch.adapter(self.live[record.seq])):
            self.host.enter(record, now)

    def leave(self, request_ids: Iterable[str], now: float) -> None:
        """Remove requests that finished; other ids are ignored."""
        for request_id in request_ids:
            record = self.records.get(request_id)
            if record is None or not self.live[record.seq].is_finished():
                continue  # the id is in use again
            seq = record.seq
            request = self.live.pop(seq)
            del self.records[request_id], self.ids[seq]
            self.slos.pop(seq, None)
            self.kv.forget(seq)
            if self.blocked.pop(seq, None) is None and not self.places.leave(seq):
                record.num_output = request.num_output_tokens
                self.host.leave(record, now, is_complete=self._batch.is_complete(request))

    def preempted(self, request: Any) -> None:
        """Note that vLLM freed the KV of a request, which waits again."""
        record = self.records.get(request.request_id)
        if record is None or record.phase is WAITING:
            return
        self.host.preempt(record)
        self.kv.forget(record.seq)
        record.num_tokens = request.num_tokens
        record.num_computed = record.num_blocks = record.num_private_blocks = 0
        record.num_cached = record.num_cached_idle = 0

    def configure(self, config: PolicyConfig) -> None:
        """Use another configuration from the next step on."""
        self.host.configure(config)
        for record in self.records.values():
            self._set_slo(record)

    def _set_slo(self, record: Request) -> None:
        self.host.config.set_slo(record, *self.slos.get(record.seq, (None, None)))

    # A step

    def begin(self, now: float, *, admits: bool = True) -> None:
        """Plan a step and carry out what needs no batch. If vLLM is paused, the plan `admits` no request."""
        host = self.host
        if self.blocked:
            self._release_blocked(now)
        if self.places.is_changed and admits:
            self._give_places(now)
        snapshot = self._snapshot(now, admits=admits)
        live, ids = self.live, self.ids
        self.plan = plan = self._limits.apply(host.planner(snapshot), live)
        self._snapshot_waiting = snapshot.waiting
        if plan.preempt:
            self.counters.tokens.note_preemptions(plan)
            for record in plan.preempt:
                self._batch.preempt(live[record.seq], now)
        for record in plan.park:
            host.park(record)
        for record in plan.resume:
            host.resume(record)
        for record in plan.admit:
            host.admit(record)
        self.admissions = [live[record.seq] for record in plan.admit]
        self.grants = {ids[record.seq]: num_tokens for record, num_tokens in plan.grants}

    def _snapshot(self, now: float, *, admits: bool) -> EngineSnapshot:
        """Return the snapshot of the host, with what only this engine knows: its KV, drafts, and steps that it runs."""
        host, kv = self.host, self.kv
        kv.begin()
        num_running = sum([held[RUNNING] for held in host.held.values()])
        kv.num_eager = EAGER if num_running < host.config.slots else 0
        kv.draft_blocks = self._draft_blocks()
        self.private_blocks.count()
        snapshot = host.snapshot(kv, now)
        if self.blocks.mixed is not None:
            snapshot = replace(snapshot, free_blocks=kv.allot_mixed(self.blocks.mixed))
        if self.draft_gain.per_decode:
            snapshot = replace(snapshot, cost=self.draft_gain.expected(snapshot.cost))
        if self._is_async:
            # A request that draws its last token now takes part in no later step. It keeps its KV until it leaves.
            residents = [record for record in snapshot.residents if record.remaining]
            num_leaving = len(snapshot.residents) - len(residents)
            if num_leaving:
                snapshot = replace(snapshot, residents=residents, num_leaving=num_leaving)
        return snapshot if admits else replace(snapshot, waiting=())

    def _draft_blocks(self) -> int:
        """Return the blocks that drafts may take in a step: those of requests near the end of a block.

        A step that vLLM still runs may add as many tokens again as the next one.
        """
        num_ahead = self.blocks.num_lookahead_tokens + self._limits.num_drafts * self.draft_gain.is_on
        if not num_ahead:
            return 0
        size, most = self.blocks.smallest_block_tokens, max(NEAR, 1 + 2 * num_ahead)
        near = [
            record
            for record in self.host.residents.values()
            if record.phase is RUNNING and (record.remaining > 1 or -record.num_tokens % size < most)
        ]
        return len(near) * -(-num_ahead // size)

    def _release_blocked(self, now: float) -> None:
        for seq, record in list(self.blocked.items()):
            if self._batch.is_ready(self.live[seq]):
                del self.blocked[seq]
                self._enter_ready(record, now)

    def _give_places(self, now: float) -> None:
        """Add the requests to the host whose adapter gets a place, after others left it for them."""
        host, places = self.host, self.places
        for record in places.close():
            if not record.remaining:
                continue  # it draws its last token now, and leaves by itself
            if record.phase is not WAITING:
                self.counters.tokens.note_preemption(record, Reason.SLOT_RECLAIMED)
                self._batch.preempt(self.live[record.seq], now)
            host.leave(record, now, is_complete=False)
            places.move_out(record)
        for record in places.give():
            host.enter(record, now)

    def dispatched(self, scheduled: Mapping[str, int], now: float) -> None:
        """Note the batch of the step, which vLLM built from the grants. `scheduled`: its tokens by request id."""
        plan, host, counters = self.plan, self.host, self.counters
        pairs: Pairs = plan.grants
        num_drafts = 0
        if scheduled != self.grants:
            pairs, num_drafts = self._compare(scheduled)
        admissions = self._admitted(scheduled, now) if plan.admit else ()
        work = self._advance(pairs, num_drafts)
        host.dispatched(plan, self._snapshot_waiting, now)
        if not pairs:
            if not self.flights:
                host.ended(now)
            return
        if host.config.is_encoder:
            counters.in_step = Counter([record.request_class for record, _ in pairs])
        for request_class, held in host.held.items():
            counters.tokens.classes[request_class].parked_steps += held[PARKED]
        ends = [record.num_computed for record, _ in pairs]
        if self._is_async:
            self._charges.run_ahead(pairs, resync=bool(num_drafts))
        flight = Flight(plan, pairs, ends, work, now, admissions, num_drafts, self.draft_gain.is_on)
        if not self.flights:
            host.began(plan, now)  # what follows a step counts as its time, up to the plan of the next one
        self.flights.append(flight)

    def _advance(self, pairs: Pairs, num_drafts: int) -> StepWork:
        """Count the tokens of the batch as computed, and return the work of the step."""
        prefill = decode = context = 0
        prefill_context = 0.0
        blocks, ids, has_decodes = self.blocks, self.ids, not self.host.config.is_encoder
        block_tokens, num_ahead = blocks.block_tokens, blocks.num_lookahead_tokens
        for record, num_tokens in pairs:
            start = record.num_computed
            end = record.num_computed = start + num_tokens
            if record.num_tokens - start == 1 and has_decodes:
                decode += 1
                context += end
            else:
                prefill += num_tokens
                prefill_context += attended(start, num_tokens)
            if end + num_ahead > record.num_blocks * block_tokens or num_drafts:
                record.num_blocks = record.num_private_blocks = blocks.held(ids[record.seq])
        return StepWork(prefill, prefill_context, decode + num_drafts, context)

    def _compare(self, scheduled: Mapping[str, int]) -> tuple[Pairs, int]:
        """Return the grants that vLLM carried out, and the drafts that it added; count the grants that it left out.

        Drafts add no context to the work of the step: the drafts of a decode and the decode read the same KV once.
        """
        pairs: list[tuple[Request, int]] = []
        ids, counters = self.ids, self.counters.tokens
        num_drafts = 0
        for record, granted in self.plan.grants:
            num_tokens = scheduled.get(ids[record.seq], 0)
            if num_tokens > granted:
                num_drafts += num_tokens - granted
                num_tokens = granted
            if num_tokens:
                pairs.append((record, num_tokens))
            else:
                counters.deferred_grants += 1
        return pairs, num_drafts

    def _admitted(self, scheduled: Mapping[str, int], now: float) -> tuple[AdmissionRecord, ...]:
        """Note which requests of the plan vLLM admitted; the others wait again."""
        host, live, batch, blocks = self.host, self.live, self._batch, self.blocks
        for record in self.plan.admit:
            request = live[record.seq]
            if not batch.is_running(request):
                if record.phase is not WAITING:
                    host.preempt(record)
                continue
            record.num_tokens = request.num_tokens
            start = record.num_computed = request.num_computed_tokens - scheduled[request.request_id]
            if start:
                blocks.num_shared_blocks = max(blocks.num_shared_blocks, -(-start // blocks.block_tokens))
        admissions = host.admissions(self.plan, now)
        for record in admissions:
            self.counters.tokens.note_admission(record.num_tokens, record.num_computed)
        return tuple(
            AdmissionRecord(
                request_id=self.ids[record.seq],
                request_class=record.request_class,
                queued_seconds=max(0.0, now - record.arrival),
                steps_waited=record.steps_waited,
                num_tokens=record.num_tokens,
                num_cached=record.num_computed,
            )
            for record in admissions
        )

    def computed(self, now: float) -> None:
        """Charge the step at the head of the flights, after vLLM added its output to the requests."""
        flight = self.flights.popleft()
        num_accepted = self._charges.charge(flight, now)
        end = self._clock()
        started = max(flight.started, self._last_end)
        seconds = end - started
        self._last_end = end
        self._learn(flight, seconds, num_accepted)
        self.counters.note_step(flight.record(seconds))
        if self.flights:
            self.host.began(self.flights[0].plan, end)

    def _learn(self, flight: Flight, seconds: float, num_accepted: int) -> None:
        """Learn from the time of a step. The cost model leaves out trials, because most steps have the other mode."""
        host, gain, work = self.host, self.draft_gain, flight.work
        if flight.with_drafts is gain.is_usual or not work.num_decode:
            host.observed(work, seconds)
        if self._limits.num_drafts:
            work = replace(work, num_decode=work.num_decode - flight.num_drafts)
            gain.note(DecodeStep(work, seconds, flight.with_drafts, flight.num_drafts, num_accepted), host.cost)
