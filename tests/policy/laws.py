"""What every plan must satisfy, each law under its own name, worked out anew from the snapshot and the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import ceil, floor, inf

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.fairness.order import place
from ballast_policy.host import Dispatch, Host
from ballast_policy.learning.cost import StepWork, attended
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request, RequestClass, is_overdue
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step import planner


class After:
    """The engine as the plan leaves it, before anything is computed."""

    def __init__(self, snapshot: EngineSnapshot, plan: StepPlan) -> None:
        self.snapshot, self.plan, self.config = snapshot, plan, snapshot.config
        self.most_residents = self.config.most_residents - snapshot.num_leaving
        self.slots = min(self.config.slots, self.most_residents)
        gone = {*plan.preempt, *plan.park}
        self.granted = dict(plan.grants)
        self.holders = [r for r in snapshot.residents if r.phase is Phase.RUNNING and r not in gone]
        self.holders += [*plan.resume, *plan.admit]
        self.online = [r for r in self.holders if r.request_class is ONLINE]
        self.offline = [r for r in self.holders if r.request_class is OFFLINE]
        self.waiting = [r for r in snapshot.waiting if r not in plan.admit]
        self.still_parked = [
            r for r in snapshot.residents if r.phase is Phase.PARKED and r not in plan.resume and r not in plan.preempt
        ]
        self.num_residents = len(self.holders) + len(self.still_parked) + len(plan.park)
        self.has_row = self.num_residents + len(plan.preempt) < self.most_residents
        """Whether a newcomer found a row. Otherwise it waits for that of a request that leaves."""
        config, reservation = self.config, snapshot.reservation
        self.reserved, self.reserved_blocks, self.reserved_chunk = (
            reservation.slots,
            reservation.blocks,
            reservation.chunk,
        )
        self.prefill = {r: n for r, n in plan.grants if left(r) > 1}
        self.offline_prefill = sum(n for r, n in self.prefill.items() if r.request_class is OFFLINE)
        is_paced = snapshot.cost.is_trusted and min(config.ttft, config.tpot) < inf and not config.is_encoder
        self.most_prefill = config.chunk_tokens * (4 if is_paced else 1)
        self.free = snapshot.free_blocks + sum(r.num_private_blocks for r in plan.preempt)
        self.free -= sum(new_blocks(self, r, n) for r, n in plan.grants)


def ranking(ledger: Ledger) -> Callable[[Request], tuple[object, ...]]:
    """Return the sort key of a request among those of its class."""
    return lambda request: (-request.priority, ledger.service(request.tenant), *place(request))


def done(request: Request) -> int:
    return request.num_cached if request.phase is Phase.WAITING else request.num_computed


def left(request: Request) -> int:
    return request.num_tokens - done(request)


def least(after: After, request: Request) -> int:
    """The fewest prompt tokens that a step computes: all of a prompt in an encoder, if it fits into a chunk."""
    is_whole = after.config.is_encoder and request.num_tokens <= after.config.chunk_tokens
    return left(request) if is_whole else 1


def blocks(after: After, tokens: int) -> int:
    return ceil(tokens / after.config.block_tokens)


def new_blocks(after: After, request: Request, granted: int) -> int:
    """Free blocks the grant takes; with a preemption in the plan, cached blocks may be among those that it frees."""
    total = blocks(after, done(request) + granted)
    if request.phase is not Phase.WAITING:
        return max(0, total - request.num_blocks)
    cached = request.num_cached // after.config.block_tokens
    freed = sum(r.num_private_blocks for r in after.plan.preempt)
    return total - cached + min(cached, request.num_cached_idle + freed)


def is_stuck(plan: StepPlan) -> bool:
    """Return whether nothing can go on for want of KV: the plan preempts the last resident, for the next step."""
    return bool(plan.preempt and not plan.grants)


def the_plan_is_well_formed(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    granted = [r for r, _ in plan.grants]
    changed = [*plan.admit, *plan.resume, *plan.park, *plan.preempt]
    assert len(set(granted)) == len(granted), "a request stands in grants twice"
    assert len(set(changed)) == len(changed), "a request changes hands twice"
    assert all(1 <= n <= left(r) for r, n in plan.grants), "a grant is empty or larger than what is left"
    assert all(r.phase is Phase.WAITING and r in snapshot.waiting for r in plan.admit)
    assert all(r.phase is Phase.PARKED for r in plan.resume)
    assert all(r.phase is Phase.RUNNING for r in plan.park)
    assert all(r.phase is not Phase.WAITING for r in plan.preempt)
    assert {*plan.admit, *plan.resume} <= set(granted), "who is admitted or resumed takes part"
    assert not {*plan.park, *plan.preempt} & set(granted), "who is parked or preempted takes no part"
    assert all(r.phase is Phase.RUNNING or r in changed for r in granted), "only who holds a slot takes part"


def slots_and_chunk_are_never_exceeded(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    assert len(after.holders) <= after.slots, "more slots are held than there are"
    assert after.num_residents <= after.most_residents, "more requests hold KV than the batch has rows"
    assert sum(after.prefill.values()) <= after.most_prefill, "more prefill than the chunks of online"
    assert after.offline_prefill <= after.config.chunk_tokens, "more prefill of offline than the chunk"
    if after.offline_prefill > after.reserved_chunk:
        assert sum(after.prefill.values()) <= after.config.chunk_tokens, "lent prefill beside more than the chunk"
    assert after.free >= 0, "more KV is granted than is free"


def caps_hold(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    config = after.config
    most = max(1, floor(config.offline_max_share * config.slots + 1e-9)) if config.offline_max_share else 0
    assert len(after.offline) <= most, "offline holds more slots than its maximum"
    held = Counter(r.tenant for r in after.offline)
    for tenant, share in config.tenants.items():
        assert share.max_slots is None or held[tenant] <= share.max_slots, f"{tenant} holds more slots than its cap"
        before = [r for r in snapshot.residents if r.request_class is OFFLINE and r.tenant == tenant]
        was_lowered = sum(r.phase is Phase.RUNNING for r in before) > (
            inf if share.max_slots is None else share.max_slots
        )
        kept = sum(r not in plan.preempt for r in before)
        assert not was_lowered or kept <= share.max_slots, f"{tenant} keeps KV of requests above its lowered cap"


def g1_online_comes_first(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """A waiting online request gets a slot, unless slots, prefill tokens or KV are held by online or reserved."""
    after = After(snapshot, plan)
    waiting = [r for r in after.waiting if r.request_class is ONLINE]
    if not waiting or is_stuck(plan) or plan.wait_until > snapshot.now:  # `g3_only_an_idle_engine_waits_for_a_batch`
        return
    if after.config.is_encoder and any(r.request_class is ONLINE for r in after.still_parked):
        return  # the whole prompt of a parked request may come first, and not fit
    reserved = max(after.reserved, after.slots - 1) if _is_turn(after) else after.reserved
    if not after.has_row or len(after.online) + min(len(after.offline), reserved) >= after.slots:
        return
    # The queue stops at the first of a tenant, because a tenant below its reservation goes first; or at the first in
    # time, behind which late requests of its tenant wait.
    firsts = list({r.tenant: r for r in reversed(waiting)}.values())
    firsts += [because.request for because in plan.because if because.request in waiting]
    assert any(_lacks_more_than_a_slot(after, first) for first in firsts), (
        "online waits for KV that offline holds beyond its reservation"
    )


def _lacks_more_than_a_slot(after: After, first: Request) -> bool:
    """No prefill tokens are left for it, or offline holds too little KV beyond its reservation to make room."""
    snapshot, plan = after.snapshot, after.plan
    online_prefill = sum(after.prefill.values()) - after.offline_prefill
    if left(first) > 1 and online_prefill + least(after, first) > after.most_prefill - _reserved_prefill_wanted(after):
        return True
    if left(first) > 1 and _decodes_cannot_wait(after, first):
        return True
    private = [r.num_private_blocks for r in snapshot.residents if r.request_class is OFFLINE]
    lent = max(0, sum(private) + _shared_by_offline(after) - after.reserved_blocks - max(private, default=0))
    # Offline may give up blocks of its reservation for its own growth. Online finds them in the next step.
    lent -= sum(r.num_private_blocks for r in plan.preempt if r.request_class is OFFLINE)
    unfinished = [r for r in after.holders if left(r) > 1]
    beside = len(after.online) + sum(blocks(after, r.num_tokens) - blocks(after, done(r)) for r in unfinished)
    beside += max((blocks(after, r.num_tokens) for r in after.waiting if r.request_class is OFFLINE), default=0)
    # The first online request in order may be a parked one, for which blocks are held.
    beside += max((blocks(after, r.num_tokens) for r in after.still_parked if r.request_class is ONLINE), default=0)
    beside += len(after.offline) + _growth(after, [*after.online, first])
    shared = sum(r.num_cached for r in [first, *plan.admit]) // after.config.block_tokens
    return after.free + lent < blocks(after, first.num_tokens) + beside + shared


def _shared_by_offline(after: After) -> int:
    """The longest prefix that only offline beyond its reservation shares. If the plan unties it, it comes next.

    Two prefixes may begin with the same blocks.
    """
    snapshot, shared = after.snapshot, [0]
    if any(r.num_blocks > r.num_private_blocks for r in after.plan.preempt):
        return 0
    kept = [r.num_cached // after.config.block_tokens for r in snapshot.waiting if r in after.plan.admit]
    for request in snapshot.residents:
        number = request.num_blocks - request.num_private_blocks
        if request.request_class is OFFLINE and request.num_blocks > after.reserved_blocks:
            shared.append(number)
        else:
            kept.append(number)
    return max(0, max(shared) - max(kept, default=0))


def _growth(after: After, requests: list[Request]) -> int:
    """The most blocks that their answers may still take, where lengths are expected: the peak is never more."""
    expectation = after.snapshot.expectation
    if not (expectation.outputs or expectation.unknown_share):
        return 0
    return sum(blocks(after, r.max_output - r.num_output) + 1 for r in requests)


def _decodes_cannot_wait(after: After, first: Request) -> bool:
    """The step is as long as an online decode beside it takes on average, and prefill has a third of it.

    The plan may preempt that decode in the end, for the blocks of the prefill. A step of an encoder takes half of the
    TTFT. It keeps the time of the reservation, even if its requests find no KV, or lose theirs in this step.
    """
    cost = after.snapshot.cost
    if _ends_when_a_prompt_is_due(after, first):
        return True
    if after.config.is_encoder:
        prompts = [r for r in after.snapshot.residents if r.request_class is OFFLINE and r.phase is Phase.RUNNING]
        kept = min(_reserved_prefill_wanted(after), sum(left(r) for r in prompts if r not in after.granted))
        added = cost.prefill(done(first), least(after, first)) + cost.prefill(0, kept)
        added += sum(cost.decode(r.num_tokens) for r in after.plan.preempt if r.request_class is OFFLINE)
        return cost.is_trusted and after.plan.predicted_seconds + added > after.config.ttft / 2 - 1e-9
    decodes = [r for r in after.snapshot.residents if r.request_class is ONLINE]
    beside = [r for r in decodes if left(r) == 1 and (r in after.granted or r in after.plan.preempt)]
    tpots = [r.tpot for r in beside if r.first_token < inf]
    longer = after.plan.predicted_seconds + cost.prefill(done(first), 1)
    prefill = sum(cost.prefill(done(r), n) for r, n in after.prefill.items())
    return bool(tpots) and longer > min(tpots) - 1e-9 and prefill + cost.prefill(done(first), 1) > longer / 3 - 1e-9


def _ends_when_a_prompt_is_due(after: After, first: Request) -> bool:
    """More prefill would delay the first token of a prompt that the step finishes beyond its TTFT.

    The step keeps the time of the reservation, even if its requests find no KV, or lose theirs in this step.
    """
    cost, now = after.snapshot.cost, after.snapshot.now
    kept = cost.prefill(0, _reserved_prefill_wanted(after))
    kept += sum(cost.decode(r.num_tokens) for r in after.plan.preempt if r.request_class is OFFLINE)
    longer = after.plan.predicted_seconds + kept + cost.prefill(done(first), least(after, first))
    finished = [r for r, n in after.granted.items() if r.request_class is ONLINE and n == left(r) and not r.num_output]
    earliest = now + after.plan.predicted_seconds - 1e-9
    soonest = min([due for r in finished if (due := r.arrival + r.ttft) > earliest], default=inf)
    return cost.is_trusted and longer > (soonest - now) / (1 + cost.error) - 1e-9


def _reserved_prefill_wanted(after: After) -> int:
    before = [r for r in after.snapshot.residents if r.request_class is OFFLINE and r.phase is Phase.RUNNING]
    wanted = after.reserved_chunk if any(left(r) > 1 for r in [*before, *after.offline]) else 0
    if _is_turn(after):  # the whole step is reserved, even if the prompts do not find KV
        wanted = max(wanted, min(after.config.chunk_tokens, sum(left(r) for r in before)))
    return max(wanted, after.offline_prefill) if after.config.is_encoder else wanted


def g1_no_lent_admission_while_online_waits_for_a_slot(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    reasons = {because.request: because.reason for because in plan.because}
    starved = [r for r in after.waiting if r.request_class is ONLINE and reasons.get(r) is Reason.NO_SLOT]
    if starved and after.has_row and not _is_turn(after):
        assert len(after.offline) <= after.reserved, "offline holds a lent slot while online waits for one"


def g1_no_lent_admission_takes_kv_that_online_waits_for(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    reasons = {because.request: because.reason for because in plan.because}
    starved = [r for r in after.waiting if r.request_class is ONLINE and reasons.get(r) is Reason.NO_KV]
    if starved and any(r.request_class is OFFLINE and reasons[r] is Reason.LENT for r in plan.admit):
        shared = starved[0].num_cached // after.config.block_tokens
        assert after.free >= blocks(after, starved[0].num_tokens) - shared, "lent KV while online waits for KV"


def g1_overdue_requests_wait_behind_those_in_time(snapshot: EngineSnapshot, _plan: StepPlan) -> None:
    """Among online requests of one tenant and priority: where the first is overdue, all are."""
    first: dict[tuple[str, int], Request] = {}
    for request in snapshot.waiting:
        if request.request_class is ONLINE:
            ahead = first.setdefault((request.tenant, request.priority), request)
            assert is_overdue(request, snapshot.now) or not is_overdue(ahead, snapshot.now)


def g2_the_reservation_is_never_touched(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """Offline that runs within the reserved slots and KV goes on running; its decodes all take part."""
    after = After(snapshot, plan)
    before = [r for r in snapshot.residents if r.request_class is OFFLINE and r.phase is Phase.RUNNING]
    if all(r.request_class is OFFLINE for r in [*snapshot.residents, *snapshot.waiting]):
        return  # what offline does to itself, for want of KV, takes nothing from its reservation
    if is_stuck(plan):
        return
    residents, waiting = (
        [r.num_tokens for r in group if r.request_class is ONLINE] for group in (snapshot.residents, snapshot.waiting)
    )
    kvs = [
        min(after.reserved_blocks, after.config.num_blocks - blocks(after, max(sizes, default=0) + 1))
        for sizes in ([*residents, *waiting[:1]], [*residents, *waiting])
    ]
    in_order = sorted(before, key=ranking(snapshot.ledgers[OFFLINE]))
    held = {r: r.num_blocks for r in in_order}
    grown = {r: n + (r.num_computed + 1 > n * after.config.block_tokens) for r, n in held.items()}
    # A request that fits only until it grows, or until the first online prompt runs, may or may not take the place of
    # those behind it.
    num_inside = len(set.intersection(*(_fitting(sizes, kv) for sizes in (held, grown) for kv in kvs)))
    caps = any(share.max_slots is not None for share in after.config.tenants.values())
    floor_slots = min(after.reserved, num_inside)
    assert caps or len(after.offline) >= floor_slots, "a slot of the reservation was taken"
    taking_part = sum(r in after.granted or left(r) > 1 for r in after.offline)
    assert caps or taking_part >= floor_slots, "a decode within the reservation was left out"


def _fitting(sizes: Mapping[Request, int], kv: int) -> set[Request]:
    fitting = set()
    for request, size in sizes.items():
        if size <= kv:
            kv -= size
            fitting.add(request)
    return fitting


def g2_online_never_overtakes_the_reservation(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """A vacant slot goes to offline first while it holds less than its reservation and fits it."""
    after = After(snapshot, plan)
    before = [r for r in snapshot.residents if r.request_class is ONLINE and r.phase is Phase.RUNNING]
    waiting = [r for r in after.waiting if r.request_class is OFFLINE]
    if len(after.online) <= len(before) or not waiting or len(after.offline) >= after.reserved:
        return
    if after.offline_prefill >= after.reserved_chunk or after.config.tenants:
        return
    held = sum(r.num_blocks for r in snapshot.residents if r.request_class is OFFLINE)
    held += sum(blocks(after, r.num_tokens) for r in plan.admit if r.request_class is OFFLINE)
    held += sum(blocks(after, r.num_tokens) - r.num_blocks for r in plan.resume if r.request_class is OFFLINE)
    largest = max((r.num_tokens for r in snapshot.residents if r.request_class is ONLINE), default=0)
    largest = max([largest, *(r.num_tokens for r in snapshot.waiting if r.request_class is ONLINE)])
    kv = min(after.reserved_blocks, after.config.num_blocks - blocks(after, largest + 1)) - held
    tail = blocks(after, after.config.tail_tokens)
    given_up = sum(r.num_private_blocks for r in plan.preempt)  # by lower priorities of online, perhaps after that
    left_over = after.config.chunk_tokens - after.offline_prefill
    for request in (r for r in waiting if least(after, r) <= left_over):  # a whole prompt may not fit
        needed = blocks(after, request.num_tokens)
        is_short = after.free - given_up - needed < _unfinished(after)
        if is_short and needed - request.num_cached // after.config.block_tokens <= kv:
            return  # it fits, perhaps because of cached blocks, and the blocks that it waits for are held
        assert needed + tail > kv, "online overtook offline within its reservation"


def _unfinished(after: After) -> int:
    """Blocks that prompts in the making will still take, and one for everybody to grow by."""
    return len(after.holders) + sum(blocks(after, r.num_tokens) for r in after.holders if left(r) > 1)


def g3_no_slot_stays_empty_without_a_true_reason(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """Where a slot is empty, the first in order that does not get it lacks tokens, KV, time or its tenant's leave."""
    after = After(snapshot, plan)
    if len(after.holders) >= after.slots or snapshot.cost.is_trusted is False:
        return
    if plan.wait_until > snapshot.now or is_stuck(plan):
        return
    reasons = {because.request: because.reason for because in plan.because}
    most = floor(after.config.offline_max_share * after.config.slots + 1e-9)
    for request_class in RequestClass:
        group = [r for r in [*after.still_parked, *after.waiting] if r.request_class is request_class]
        group = [r for r in group if reasons.get(r) is not Reason.TENANT_CAP]
        if not group or (request_class is OFFLINE and len(after.offline) >= most):
            continue
        # The first in order may lose its row in the end, and with it the place in which it waited.
        first = [*group, *(r for r in plan.preempt if reasons[r] is Reason.NO_SLOT)]
        explained = [because.request for because in plan.because if because.request in first]
        assert explained, f"a slot stays empty, {request_class} waits, and nobody says why"
        _check_reason(after, explained[0], reasons[explained[0]])


def g3_no_prefill_token_is_left_where_offline_prefills(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """Without a budget, offline prefill goes on until the chunk, the prompts or the blocks are used up."""
    after = After(snapshot, plan)
    if plan.budget_seconds < inf or not snapshot.cost.is_trusted or plan.park or plan.preempt:
        return
    parts = [r for r in after.offline if left(r) > 1 and least(after, r) == 1]  # a whole prompt may not fit
    unfinished = any(after.granted.get(r, 0) < left(r) for r in parts)
    if unfinished and not any(because.reason is Reason.NO_KV for because in plan.because):
        spent = sum(after.prefill.values())
        assert spent >= after.config.chunk_tokens or after.free < 1, "offline waits for prefill tokens that are left"


def g3_only_an_idle_engine_waits_for_a_batch(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    if plan.wait_until <= snapshot.now:
        return
    assert not snapshot.residents, "a busy engine waited for a batch"
    assert not snapshot.num_leaving, "a busy engine waited for a batch"
    assert not plan.grants, "an engine that waits for a batch computes"
    first = min(r.arrival for r in snapshot.waiting)
    assert plan.wait_until <= first + snapshot.config.batch_window + 1e-9, "the window is over"
    assert len(snapshot.waiting) < snapshot.config.slots, "the batch is full"
    assert {because.reason for because in plan.because} == {Reason.BATCH_WINDOW}


def g3_no_engine_idles_while_work_waits(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    """Something runs, whatever the SLO, the cap or the cost model: without online requests, too."""
    config = snapshot.config
    if plan.wait_until > snapshot.now or snapshot.num_leaving >= config.most_residents:
        return  # see `g3_only_an_idle_engine_waits_for_a_batch`; or no slot is free before the next step
    # Requests that leave still compute. The next step has their slots and blocks.
    short = any(because.reason in {Reason.NO_KV, Reason.NO_SLOT} for because in plan.because)
    awaits_leaving = short and snapshot.num_leaving > 0
    for request in [*snapshot.residents, *snapshot.waiting]:
        may_run = request.request_class is ONLINE or config.offline_max_share > 0
        if may_run and request.num_tokens <= config.num_blocks * config.block_tokens:
            has_reason = awaits_leaving or is_stuck(plan)
            assert plan.grants or has_reason, f"the engine idles while {request.request_class} work waits"


def _check_reason(after: After, request: Request, reason: Reason) -> None:
    config, plan = after.config, after.plan
    if reason is Reason.CHUNK_SPENT:
        spent = sum(after.prefill.values()) + _reserved_prefill_wanted(after)
        is_online = request.request_class is ONLINE
        most = after.most_prefill if is_online else config.chunk_tokens
        cannot_wait = is_online and _decodes_cannot_wait(after, request)
        assert spent + least(after, request) > most or cannot_wait, "prefill tokens are left"
    elif reason is Reason.STEP_BUDGET:
        cost, tokens = after.snapshot.cost, least(after, request)
        added = cost.decode(request.num_tokens) if left(request) == 1 else cost.prefill(done(request), tokens)
        begun = plan.predicted_seconds or cost.k0  # a step without grants is predicted to take no time
        assert begun + added > plan.budget_seconds - 1e-9, "time is left"
    elif reason is Reason.NO_KV:
        everyone = [*after.snapshot.residents, *plan.admit]
        watermark = floor(config.watermark * config.num_blocks)
        tails = sum(ceil(config.tail_tokens / config.block_tokens) for _ in [*everyone, request])
        tails += _growth(after, [*everyone, request])
        rest = sum(blocks(after, r.num_tokens) for r in after.holders if left(r) > 1)
        firsts = {r.request_class: r for r in reversed(after.waiting)}  # online's, and the one the reservation is for
        rest += sum(blocks(after, r.num_tokens) for r in firsts.values())
        cached = sum(r.num_cached for r in [request, *plan.admit]) // config.block_tokens
        needed = blocks(after, request.num_tokens) + cached + watermark + tails + rest + len(everyone)
        assert after.free < needed, "KV is left"
    elif reason is Reason.NO_SLOT:
        # The next step gives the slots of running requests that this plan preempts for the blocks of another request.
        freed = sum(r.phase is Phase.RUNNING for r in plan.preempt)
        assert not after.has_row or len(after.online) + len(after.offline) + freed >= after.slots, "a slot is left"
    else:
        raise AssertionError(f"{reason} is no reason for waiting beside an empty slot")


def g4_lent_work_fits_the_budget(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    if plan.predicted_seconds <= plan.budget_seconds + 1e-9:
        return
    taking_part = [r for r in after.offline if r in after.granted]
    assert len(taking_part) <= after.reserved or _is_turn(after), "lent offline work in a step over its budget"
    most = after.reserved_chunk
    if after.config.is_encoder:  # each of its prompts is computed in one step
        # The last one may start with the last reserved token.
        most = max([most, *(most - 1 + left(r) for r in taking_part if r.num_tokens <= after.config.chunk_tokens)])
    if _is_turn(after):
        most = after.config.chunk_tokens
    assert after.offline_prefill <= most, "lent prefill in a step over its budget"


def _is_turn(after: After) -> bool:
    """In an encoder, the first online prompt does not fit beside the prompts that take the reserved tokens."""
    chunk, reserved = after.config.chunk_tokens, after.reserved_chunk
    firsts = {r.request_class: r.num_tokens for r in reversed(after.snapshot.waiting)}
    online, offline = (firsts.get(c, 0) if firsts.get(c, 0) <= chunk else 0 for c in (ONLINE, OFFLINE))
    begun = [r for r in after.snapshot.residents if r.request_class is OFFLINE]
    num_free = max(0, after.reserved - sum(r.phase is Phase.RUNNING for r in begun))
    waiting = [r for r in after.snapshot.waiting if r.request_class is OFFLINE][:num_free]
    takers = [*waiting, *(r for r in begun if r.phase is Phase.PARKED or left(r) > 1)]
    taken = max(min(reserved, sum(map(left, takers))), offline)
    return after.config.is_encoder and reserved > 0 and online > chunk - taken


def work_of(grants: Iterable[tuple[Request, int]]) -> StepWork:
    prefill = [(done(r), n) for r, n in grants if left(r) > 1]
    decodes = [r.num_tokens for r, _ in grants if left(r) == 1]
    return StepWork(sum(n for _, n in prefill), sum(attended(c, n) for c, n in prefill), len(decodes), sum(decodes))


def g4_the_prediction_is_that_of_the_grants(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    assert abs(snapshot.cost.predict(work_of(plan.grants)) - plan.predicted_seconds) < 1e-9


def g4_online_alone_takes_its_part(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    part = snapshot.cost.predict(work_of([(r, n) for r, n in plan.grants if r.request_class is ONLINE]))
    assert abs(plan.predicted_seconds - plan.parts.offline - part) < 1e-9
    assert abs(plan.parts.decodes + plan.parts.prefill - max(0.0, part - snapshot.cost.k0)) < 1e-9


def g5_nobody_is_overtaken_by_a_lower_priority(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    after = After(snapshot, plan)
    reasons = {because.request: because.reason for because in plan.because}
    cost = snapshot.cost
    for request in plan.admit:
        for other in after.waiting:
            if other.request_class is not request.request_class or other.priority <= request.priority:
                continue
            excused = reasons.get(other) is Reason.TENANT_CAP or reasons[request] is Reason.OFFLINE_RESERVATION
            if snapshot.config.is_encoder and reasons.get(other) is Reason.STEP_BUDGET:
                # A prompt that takes longer than a whole step stops no shorter ones.
                excused |= cost.k0 + cost.prefill(0, other.num_tokens) > plan.budget_seconds
            # A single token needs no prefill tokens, a parked request no new slot in the order of waiting ones.
            assert excused or left(request) == 1, "a lower priority was admitted before a higher one"


def everything_has_its_because(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    explained = {because.request for because in plan.because}
    assert all(isinstance(because.reason, Reason) for because in plan.because), "an explanation without a reason"
    assert {*plan.admit, *plan.resume, *plan.park, *plan.preempt} <= explained, "a change without a reason"
    for request_class in RequestClass:
        waiting = [r for r in snapshot.waiting if r.request_class is request_class and r not in plan.admit]
        assert not waiting or any(r in explained for r in waiting), f"{request_class} waits without a reason"


def without_an_slo_or_a_cap_nothing_bounds_a_step(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    promises = [(r.ttft, r.tpot) for r in [*snapshot.residents, *snapshot.waiting] if r.request_class is ONLINE]
    promises.append((snapshot.config.ttft, snapshot.config.tpot))
    if snapshot.allowance.share is None and min(map(min, promises)) == inf:
        assert plan.budget_seconds == inf


def the_same_snapshot_gives_the_same_plan(snapshot: EngineSnapshot, plan: StepPlan) -> None:
    assert planner.plan(snapshot) == plan


LAWS = (
    the_plan_is_well_formed,
    slots_and_chunk_are_never_exceeded,
    caps_hold,
    g1_online_comes_first,
    g1_no_lent_admission_while_online_waits_for_a_slot,
    g1_no_lent_admission_takes_kv_that_online_waits_for,
    g1_overdue_requests_wait_behind_those_in_time,
    g2_the_reservation_is_never_touched,
    g2_online_never_overtakes_the_reservation,
    g3_no_slot_stays_empty_without_a_true_reason,
    g3_no_prefill_token_is_left_where_offline_prefills,
    g3_only_an_idle_engine_waits_for_a_batch,
    g3_no_engine_idles_while_work_waits,
    g4_lent_work_fits_the_budget,
    g4_the_prediction_is_that_of_the_grants,
    g4_online_alone_takes_its_part,
    g5_nobody_is_overtaken_by_a_lower_priority,
    everything_has_its_because,
    without_an_slo_or_a_cap_nothing_bounds_a_step,
    the_same_snapshot_gives_the_same_plan,
)


def lawful(snapshot: EngineSnapshot) -> StepPlan:
    """Return the plan of the policy, once it is held against every law."""
    decided = planner.plan(snapshot)
    for law in LAWS:
        law(snapshot, decided)
    return decided


def the_reservation_is_what_residents_and_backlog_say(host: Host, dispatch: Dispatch) -> None:
    """The one value that everybody reads, worked out anew."""
    found, config = host.reservation, host.config
    share, slots = config.offline_share, config.slots
    most = max(1, floor(config.offline_max_share * slots + 1e-9)) if config.offline_max_share else 0
    reserved = max(0, min(ceil(share * min(slots, host.ceiling or slots) - 1e-9), slots - 1, most))
    num_blocks = max(0, min(ceil(share * config.num_blocks - 1e-9), config.num_blocks - 1))
    most_chunk = max(1, config.chunk_tokens - ceil(config.chunk_tokens / 8))
    chunk = min(ceil(share * config.chunk_tokens - 1e-9), most_chunk)
    assert (found.slots, found.blocks, found.chunk) == (reserved, num_blocks, chunk)
    if dispatch.plan.wait_until > -inf:
        return  # an idle engine waits for a batch: as before
    offline = [r for r in host.residents.values() if r.request_class is OFFLINE]
    running = sum(r.phase is Phase.RUNNING for r in offline)
    demand = Counter(r.tenant for r in [*offline, *host.backlog] if r.request_class is OFFLINE)
    caps = {tenant: share.max_slots for tenant, share in config.tenants.items() if share.max_slots is not None}
    entitled = sum(min(number, caps.get(tenant, number)) for tenant, number in demand.items())
    assert found.in_use == min(reserved, running)
    has_slots = running >= min(reserved, entitled)
    takes_turns = config.is_encoder and host.count(ONLINE) > 0  # it may have taken the tokens in advance
    grants = [n for r, n in dispatch.plan.grants if r.request_class is OFFLINE]
    is_taken = sum(n for n in grants if takes_turns or n > 1) >= chunk > 0
    assert found.is_met is (has_slots or found.is_met_by_tokens)
    assert found.is_met or not is_taken
    assert takes_turns or found.is_met_by_tokens is (is_taken and not has_slots)
