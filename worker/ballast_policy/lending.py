"""What offline gets beyond online and its own reservation: lent slots and KV, and time up to the budget."""

from __future__ import annotations

from math import ceil, floor, inf

from ballast_policy.admission import Peak
from ballast_policy.growth import make_offline_room
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, RUNNING, WAITING, Request, computed
from ballast_policy.reservation import most_slots
from ballast_policy.reserved import reserved_prefill_seconds
from ballast_policy.slots import Slots
from ballast_policy.step import Step
from ballast_policy.turns import Door, candidates, turns


def lend(step: Step, budget: float, *, is_guarded: bool) -> None:
    """Grant offline what is left: running decodes, parked decodes, prefill, admissions, while the budget allows.

    The reverse of the order in which a smaller budget takes away: prefill goes first, then decodes are parked.
    `is_guarded` tells that online is here or expected.
    """
    lending = _Lending(step, budget, is_guarded=is_guarded)
    lending.cut_slots()
    lending.cut_time()
    lending.cut_blocks()
    lending.fill()


class _Lending:
    def __init__(self, step: Step, budget: float, *, is_guarded: bool) -> None:
        config = step.config
        self.step = step
        self.budget = budget
        self.chunk = config.chunk_tokens
        """Prefill tokens that may be lent."""
        vacated = config.slots - step.online.num_held
        step.offline_limit = min(step.offline_limit, vacated)
        if is_guarded and not step.cost.is_trusted and min(config.ttft, config.tpot) < inf:
            most = step.num_reserved_held + most_slots(config.static_share, config.slots)
            step.offline_limit = min(step.offline_limit, most)
            self.chunk = min(self.chunk, ceil(config.static_share * config.chunk_tokens))
        self.inside = step.num_reserved_held - step.offline.num_started
        """How many of those that run, the first in order, the reservation covers."""
        expectation = step.snapshot.expectation
        guard_share = config.guard_share if expectation.guard_share is None else expectation.guard_share
        self.guard = floor(guard_share * config.num_blocks) if is_guarded else 0
        self.door = Door(step)
        self.reserved_seconds = reserved_prefill_seconds(step)
        """Time that the reserved prefill tokens will take."""
        self.peak: Peak | None = None
        """Of everybody who holds KV; None until an admission is considered."""

    @property
    def spare(self) -> float:
        """Seconds of the budget that nobody has a claim on."""
        return self.budget - self.step.seconds - self.reserved_seconds

    def cut_slots(self) -> None:
        """Park who holds more slots than the tenant's cap, the maximum of the class and online leave."""
        step, room = self.step, self.step.tenant_room
        if min(room.values(), default=0) < 0:
            over = []
            for request in reversed(step.offline_running):
                if room.get(request.tenant, 0) < 0:
                    room[request.tenant] += 1
                    over.append(request)
            step.leave_slots(over, Reason.TENANT_CAP)
        excess = -step.num_vacant(OFFLINE)
        if excess > 0:
            step.leave_slots(step.offline_running[-excess:], Reason.SLOT_RECLAIMED)

    def cut_time(self) -> None:
        """Park the last lent decodes until the rest fits the budget."""
        step, offline, cost = self.step, self.step.offline, self.step.cost
        spare = self.spare
        if cost.k3 * len(offline.decodes) + cost.k4 * offline.context <= spare:
            return
        running = step.offline_running
        for index, request in enumerate(running):
            if request.num_tokens - request.num_computed > 1:
                continue
            seconds = cost.decode(request.num_tokens)
            if index >= self.inside and seconds > spare:
                over = [other for other in running[index:] if other.num_tokens - other.num_computed == 1]
                step.leave_slots(over, Reason.STEP_BUDGET)
                return
            spare -= seconds

    def cut_blocks(self) -> None:
        """Find the blocks that decodes begin: preempt among offline, never the first in order, or else park."""
        step, offline = self.step, self.step.offline
        step.free += step.growth_blocks
        if len(offline.growing) <= step.free:
            return
        make_offline_room(step, offline.growing)
        growing = set(offline.growing)
        ordered = [request for request in step.offline_running if request in growing]
        step.leave_slots(ordered[step.free :], Reason.NO_KV)

    def fill(self) -> None:
        """Go on with prefill and give vacant slots out, decodes before prefill in each priority."""
        step, offline = self.step, self.step.offline
        step.count_decodes(offline)
        self._keep_time()
        self.chunk = max(0, min(self.chunk, step.lent_chunk - step.reserved_chunk))
        slots = Slots(step, OFFLINE)
        self._resume_decodes(slots)
        begun = [request for request in step.prefill_grants if request.request_class is OFFLINE]
        for request in turns(step, offline.prefills + begun, offline.parked, step.offline_waiting, self.door):
            if request.phase is RUNNING:
                self._go_on(request, is_inside=request in step.reserved_prefills)
            elif request in step.prefill_grants:
                self._add_to(request)
            elif not self.door.is_shut_for(request):
                self._start(request, slots)

    def _resume_decodes(self, slots: Slots) -> None:
        """Resume parked decodes up to the first whose turn is behind a waiting request."""
        step = self.step
        if step.num_vacant(OFFLINE) < 1:
            return
        for request in candidates(step, step.offline.parked, step.offline_waiting[:1]):
            if request.phase is WAITING or step.num_vacant(OFFLINE) < 1 or self.door.is_shut:
                return
            if request.num_tokens - request.num_computed == 1:
                self._start(request, slots)

    def _go_on(self, request: Request, *, is_inside: bool) -> None:
        """Prefill one that runs: first from the reserved chunk, then what is lent; it waits there or is parked."""
        step = self.step
        reserved = min(request.remaining, step.reserved_chunk) if is_inside else 0
        lent = self._lent_tokens(request.remaining - reserved, request.num_computed + reserved)
        tokens = min(reserved + lent, (request.num_blocks + step.free) * step.block_tokens - request.num_computed)
        if tokens > 0:
            self.chunk -= max(0, tokens - reserved)
            step.grant(request, tokens)
        else:
            reason = Reason.NO_KV if reserved + lent else Reason.STEP_BUDGET if self.chunk else Reason.CHUNK_SPENT
            if is_inside:
                step.explain(request, reason)
            else:
                step.leave_slots([request], reason)
        if is_inside:
            step.reserved_tokens -= min(reserved, tokens)
            step.reserved_prefills.remove(request)
            self._keep_time()

    def _add_to(self, request: Request) -> None:
        """Lend to one that the reservation admitted, beyond the tokens that are kept for it."""
        step = self.step
        done = computed(request) + step.prefill_grants[request]
        room = (step.blocks(done) + step.free) * step.block_tokens - done
        tokens = min(self._lent_tokens(request.num_tokens - done, done), room)
        if tokens > 0:
            self.chunk -= tokens
            step.grant(request, tokens)

    def _start(self, request: Request, slots: Slots) -> None:
        """Resume or admit one if everything allows it; otherwise say why not, and shut the door behind it."""
        step = self.step
        if not step.tenant_has_room(request):
            step.explain(request, Reason.TENANT_CAP)
            return
        done = computed(request)
        left = request.num_tokens - done
        tokens = int(step.cost.decode(request.num_tokens) <= self.spare) if left == 1 else self._lent_tokens(left, done)
        reason = None
        if not slots.has_one_for(request):
            reason = Reason.NO_SLOT
        elif tokens < 1:
            reason = Reason.CHUNK_SPENT if left > 1 and self.chunk < 1 else Reason.STEP_BUDGET
        elif not self._has_kv(request):
            reason = Reason.NO_KV
        if reason:
            self.door.close(request, reason)
            return
        slots.make_vacant()
        step.count_slot(request)
        self.chunk -= tokens if left > 1 else 0
        if self.peak is not None:
            self.peak.add(request, step.whole(request))
        step.start(request, tokens, Reason.LENT)
        self._keep_time()

    def _keep_time(self) -> None:
        """Keep time for who prefills within the reservation and is yet to come, as far as there are blocks for it."""
        self.reserved_seconds = reserved_prefill_seconds(self.step, self.step.free)

    def _lent_tokens(self, wanted: int, num_computed: int) -> int:
        return self.step.cost.largest_chunk(self.spare, num_computed, min(wanted, self.chunk))

    def _has_kv(self, request: Request) -> bool:
        """Tell whether the blocks for the whole of a request are free, and those that will be missing at the peak.

        Whoever is alone needs no more than its own.
        """
        step, whole = self.step, self.step.whole(request)
        free = step.free - step.promised_blocks - whole
        if request.phase is not WAITING or free < 0:
            return free >= 0
        everyone = step.online.everyone + step.offline.everyone
        if not (step.admit or step.resume or everyone):
            return True
        free -= self.guard + step.hold_blocks
        if free < 0:
            return False
        if self.peak is None:
            self.peak = Peak(step.snapshot.expectation, step.block_tokens, step.config.tail_tokens)
            self.peak.add_all(everyone + step.admit + step.resume, step.promised)
        return self.peak.missing(request, whole, free) <= free
