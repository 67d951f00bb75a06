"""One plan in the making: the blocks that are left, the tokens granted, and what changes hands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, repeat

from ballast_policy.admission import Peak
from ballast_policy.budget import most_prefill
from ballast_policy.fairness import EMPTY, Ledger
from ballast_policy.order import ranked
from ballast_policy.plan import Because, Plan, Reason
from ballast_policy.request import OFFLINE, ONLINE, WAITING, Request, RequestClass, computed
from ballast_policy.reservation import most_slots
from ballast_policy.residents import Residents, sort_residents
from ballast_policy.snapshot import Snapshot
from ballast_policy.tenant_slots import TenantSlots, reserved_first
from ballast_policy.victims import choose


class Step:
    """What the planner has decided so far. `free` never goes below what the engine will have."""

    def __init__(self, snapshot: Snapshot) -> None:
        config, waiting = snapshot.config, snapshot.waiting
        self.snapshot, self.config, self.cost = snapshot, config, snapshot.cost
        self.block_tokens = config.block_tokens
        self.online, self.offline = sort_residents(snapshot.residents, config.block_tokens)
        split = bisect_left(waiting, 1, key=lambda request: request.request_class is OFFLINE)
        self.online_waiting, self.offline_waiting = waiting[:split], waiting[split:]
        self.reserved = min(
            snapshot.reservation.slots,
            len(self.offline_waiting) + len(snapshot.residents) - len(self.online.everyone),
        )
        """Slots of the reservation that offline has work for."""
        self.free = snapshot.free_blocks
        self.chunk = self.most_prefill = most_prefill(config, snapshot.cost)
        """Prefill tokens not granted yet."""
        self.seconds = snapshot.cost.k0
        """Predicted time of what is granted so far."""
        self.fixed_seconds = snapshot.cost.k0
        """The part of it that is not prefill."""
        self.promised: dict[Request, int] = {}
        """Free blocks that the rest of a prompt in the making will take."""
        self.promised_blocks = 0
        """The sum of them."""
        self.decode_grants: list[tuple[Request, int]] = []
        self.prefill_grants: dict[Request, int] = {}
        self.admit: list[Request] = []
        self.park: list[Request] = []
        self.resume: list[Request] = []
        self.preempt: list[Request] = []
        self.because: list[Because] = []
        self.gone: set[Request] = set()
        """Residents that were parked or preempted."""
        self.offline_limit = min(config.slots, most_slots(config.offline_max_share, config.slots))
        """Slots that offline may hold."""
        self.reserved_tokens = 0
        """Prefill tokens of the reservation that `reserved_prefills` may still use."""
        self.reserved_prefills: list[Request] = []
        """Offline residents within the reservation that prefill."""
        self.growth_blocks = 0
        """Blocks put aside for the decodes of offline that the reservation covers."""
        self.put_off: set[Request] = set()
        """Online requests that cannot have their first token in time."""
        self.hold_blocks = 0
        """Free blocks that admissions leave: for the next offline request within the reservation, then for online."""
        self._borrowed = 0
        """Cached blocks in use that admissions of this step share: a later preemption does not free those."""

    def group(self, request: Request) -> Residents:
        """Give the residents of the request's class."""
        return self.online if request.request_class is ONLINE else self.offline

    @property
    def num_reserved_held(self) -> int:
        """Slots of the reservation that offline holds."""
        return min(self.reserved, self.offline.num_held)

    def num_vacant(self, request_class: RequestClass) -> int:
        """Slots that the class may still take: online all but the reservation in use, offline up to its limit."""
        num_offline = self.offline.num_held
        if request_class is ONLINE:
            return self.config.slots - min(self.reserved, num_offline) - self.online.num_held
        return self.offline_limit - num_offline

    @property
    def lent_chunk(self) -> int:
        """Prefill tokens that are left of one chunk: what offline may get, its kept tokens included."""
        return max(0, self.chunk - self.most_prefill + self.config.chunk_tokens)

    @property
    def reserved_chunk(self) -> int:
        """Prefill tokens kept for offline residents within the reservation."""
        if not self.reserved_tokens:
            return 0
        wanted = sum(request.remaining for request in self.reserved_prefills if request not in self.gone)
        return min(self.reserved_tokens, wanted)

    @property
    def has_online(self) -> bool:
        """Tell whether an online request is resident or waits."""
        return bool(self.online_waiting or self.online.num_blocks or self.online.num_started)

    # Order

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """Sort requests of one class by policy order."""
        listed = list(requests)
        if len(listed) < 2:
            return listed
        ledger = self.ledger(listed[0])
        ordered, reserved = ranked(listed, ledger), ledger.reserved
        return reserved_first(ordered, TenantSlots(reserved, {})) if reserved else ordered

    def tenant_slots(self, request: Request) -> TenantSlots | None:
        """Return the slots by tenant of the request's class as of now; None if no tenant has a reservation."""
        reserved = self.ledger(request).reserved
        if not reserved:
            return None
        slots, request_class = TenantSlots(reserved, {}), request.request_class
        slots.count_all([other.tenant for other in self.group(request).running])
        slots.count_all([r.tenant for r in chain(self.admit, self.resume) if r.request_class is request_class])
        return slots

    def ledger(self, request: Request) -> Ledger:
        """Give the ledger of the request's class."""
        return self.snapshot.ledgers.get(request.request_class, EMPTY)

    # Caps of tenants

    @cached_property
    def tenant_room(self) -> dict[str, int]:
        """Slots that offline requests of capped tenants may still take; negative where a cap was lowered."""
        room = {name: t.max_slots for name, t in self.config.tenants.items() if t.max_slots is not None}
        if room:
            for request in self.offline.running:
                if request.tenant in room:
                    room[request.tenant] -= 1
        return room

    def tenant_has_room(self, request: Request) -> bool:
        """Tell whether the tenant of an offline request may take one more slot."""
        return self.tenant_room.get(request.tenant, 1) > 0

    def count_slot(self, request: Request) -> None:
        """Count a slot that an offline request takes against its tenant's cap."""
        if request.tenant in self.tenant_room:
            self.tenant_room[request.tenant] -= 1

    # KV

    def blocks(self, num_tokens: int) -> int:
        """Give the blocks that so many tokens fill or begin."""
        return -(-num_tokens // self.block_tokens)

    def whole(self, request: Request) -> int:
        """Give the free blocks a request takes until all of its tokens known now are computed."""
        return self.needed(request, request.num_tokens)

    def needed(self, request: Request, num_tokens: int) -> int:
        """Give the free blocks a request takes until its first `num_tokens` are computed.

        Once anything is preempted in this step, all its cached blocks count as taken: they may be among those freed.
        """
        blocks = -(-num_tokens // self.block_tokens)
        if request.phase is not WAITING:
            return max(0, blocks - request.num_blocks)
        cached = request.num_cached // self.block_tokens
        return blocks - cached + (cached if self.preempt else request.num_cached_idle)

    def tail_blocks(self, request: Request) -> int:
        """Give the blocks that a request may grow by behind its prompt, as far as an admission looks ahead."""
        return -(-min(self.config.tail_tokens, request.max_output - request.num_output) // self.block_tokens)

    def reclaim(
        self,
        candidates: Iterable[Request],
        num_blocks: int,
        *,
        newcomer: Request | None = None,
        growing: Collection[Request] = (),
    ) -> bool:
        """Preempt the cheapest of `candidates` so that `num_blocks` are free; do nothing if they do not suffice.

        `newcomer` will be admitted with them: the cached blocks it counted as used by others may be freed now.
        `growing` stand for one of the blocks each.
        """
        extra = self._borrowed + (self._lookup(newcomer) if newcomer else 0)
        short = num_blocks - self.free + (0 if self.preempt else extra)
        chosen = choose(candidates, short, self.block_tokens, growing) if short > 0 else []
        if chosen is None:
            return False
        for request in chosen:
            self.give_up(request, Reason.KV_RECLAIMED)
        return True

    def give_up(self, request: Request, reason: Reason) -> None:
        """Preempt one resident."""
        if not self.preempt:
            self.free -= self._borrowed
        self.free += request.num_private_blocks
        self._take_out([request])
        self.group(request).num_blocks -= request.num_blocks
        if request in self.park:
            self.park.remove(request)
        self.preempt.append(request)
        self.because.append(Because(request, reason))

    @property
    def lent_kv(self) -> list[Request]:
        """Offline residents whose KV is not covered by the reservation: what online may reclaim."""
        protected = self.protected
        return [request for request in self.offline.everyone if request not in protected]

    @cached_property
    def _ranked_offline(self) -> list[Request]:
        return self.ranked(self.offline.running)

    @cached_property
    def protected(self) -> set[Request]:
        """Offline residents within the KV reservation, the first in order; those that hold a slot come first."""
        parked = [request for request in self.offline.parked if request.num_blocks <= self.reserved_kv]
        return set(_fitting(chain(self._ranked_offline, self.ranked(parked)), self.reserved_kv))

    @cached_property
    def _offline_order(self) -> list[Request]:
        ranked = self._ranked_offline
        first = ranked[: self.reserved]
        if len(first) == len(ranked) or sum([request.num_blocks for request in first]) <= self.reserved_kv:
            return ranked
        inside = list(islice(_fitting(ranked, self.reserved_kv), self.reserved))
        covered = set(inside)
        return [*inside, *(request for request in ranked if request not in covered)]

    @property
    def offline_running(self) -> list[Request]:
        """Who holds a slot of offline, in the order of keeping it: within the reservation's slots and KV first."""
        order = self._offline_order
        return [request for request in order if request not in self.gone] if self.gone else order

    @cached_property
    def reserved_kv(self) -> int:
        """KV blocks of offline's reservation, less where the largest online request would not fit beside it."""
        config = self.config
        largest = max([request.num_tokens for request in self.online.everyone], default=0)
        if self.online_waiting:
            largest = max(largest, self.online_waiting[0].num_tokens)
        return max(0, min(self.snapshot.reservation.blocks, config.num_blocks - self.blocks(largest + 1)))

    @cached_property
    def online_peak(self) -> Peak | None:
        """The KV that online comes to, from when it is first asked for; None while lengths of answers are unknown."""
        expectation = self.snapshot.expectation
        if ONLINE not in expectation.outputs:
            return None
        peak = Peak(expectation, self.block_tokens, self.config.tail_tokens)
        started = [r for r in chain(self.admit, self.resume) if r.request_class is ONLINE]
        peak.add_all(chain(self.online.everyone, started), self.promised)
        return peak

    # Grants

    def start(self, request: Request, num_tokens: int, reason: Reason) -> None:
        """Admit or resume a request and grant it tokens."""
        group = self.online if request.request_class is ONLINE else self.offline
        if request.phase is WAITING:
            if not self.preempt:
                self._borrowed += self._lookup(request)
            self.admit.append(request)
        else:
            group.parked.remove(request)
            self.resume.append(request)
        group.num_started += 1
        self.because.append(Because(request, reason))
        whole = self.promised[request] = self.needed(request, request.num_tokens)
        self.promised_blocks += whole
        self.grant(request, num_tokens)

    def promise(self, request: Request) -> None:
        """Put blocks aside, once, for the rest of a prompt in the making; `grant` takes them out of it."""
        whole = self.promised[request] = self.whole(request)
        self.promised_blocks += whole

    def grant(self, request: Request, num_tokens: int) -> None:
        """Let a request compute tokens (more of them, if it may already), and take the blocks for them."""
        start, granted = computed(request), self.prefill_grants.get(request, 0)
        done, left = start + granted, request.num_tokens - start
        promised = self.promised.get(request)
        if promised is not None and granted + num_tokens == left:
            taken = promised  # all that is left of it
        else:
            taken = self.needed(request, done + num_tokens) - (self.needed(request, done) if granted else 0)
        self.free -= taken
        if promised is not None:
            self.promised[request] = promised - taken
            self.promised_blocks -= taken
        if left == 1:
            self.decode_grants.append((request, 1))
            self._add_decodes(1, request.num_tokens)
        else:
            self.prefill_grants[request] = granted + num_tokens
            self.chunk -= num_tokens
            self.seconds += self.cost.prefill(done, num_tokens)

    def count_decodes(self, group: Residents, sign: int = 1) -> None:
        """Take the blocks and the time of a class's decodes; who is taken out later gives them back."""
        self.free -= sign * len(group.growing)
        self._add_decodes(sign * len(group.decodes), sign * group.context)
        group.is_counted = sign > 0

    def _add_decodes(self, num_decodes: int, context: int) -> None:
        cost = self.cost.k3 * num_decodes + self.cost.k4 * context
        self.seconds += cost
        self.fixed_seconds += cost

    def leave_slots(self, requests: Sequence[Request], reason: Reason) -> None:
        """Park residents of one class that run."""
        self._take_out(requests)
        if requests:
            self.group(requests[0]).leaving += requests
        self.park += requests
        self.because += Because.all_of(requests, reason)

    def _take_out(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        group = self.group(requests[0])
        gone = set(requests)
        is_counted = group.is_counted
        if is_counted:
            self.count_decodes(group, -1)
        group.remove(gone)
        if is_counted:
            self.count_decodes(group)
        self.gone |= gone
        for request in self.promised.keys() & gone:
            self.promised_blocks -= self.promised.pop(request)

    def explain(self, request: Request, reason: Reason) -> None:
        """Note why a request does not get what it waits for."""
        self.because.append(Because(request, reason))

    def _lookup(self, request: Request) -> int:
        """Give the cached blocks of a waiting request that others use now."""
        return request.num_cached // self.block_tokens - request.num_cached_idle

    def grants(self) -> tuple[tuple[Request, int], ...]:
        """Give everything granted, decodes first."""
        counted = [group.decodes for group in (self.online, self.offline) if group.is_counted]
        return (*zip(chain(*counted), repeat(1)), *self.decode_grants, *self.prefill_grants.items())

    @property
    def has_grants(self) -> bool:
        """Tell whether anything is granted."""
        return bool(self.decode_grants or self.prefill_grants or self.online.decodes or self.offline.decodes)

    def as_plan(self, budget_seconds: float, *, online_seconds: float = 0.0, suspendable_seconds: float = 0.0) -> Plan:
        """Close the plan."""
        grants = self.grants()
        return Plan(
            grants=grants,
            admit=tuple(self.admit),
            park=tuple(self.park),
            resume=tuple(self.resume),
            preempt=tuple(self.preempt),
            because=tuple(self.because),
            predicted_seconds=self.seconds if grants else 0.0,
            budget_seconds=budget_seconds,
            online_seconds=online_seconds,
            suspendable_seconds=suspendable_seconds,
        )


def _fitting(requests: Iterable[Request], num_blocks: int) -> Iterator[Request]:
    """Go through those whose KV fits so many blocks together, the first in order."""
    for request in requests:
        if request.num_blocks <= num_blocks:
            num_blocks -= request.num_blocks
            yield request
