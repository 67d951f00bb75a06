"""An engine without tensors, in virtual time. The policy host decides; the engine brings its KV and its clock."""

from __future__ import annotations

from collections.abc import Iterable

from laws import work_of
from paged_kv import PagedKv
from workloads import EXACT, Arrival

from ballast_policy.host import Dispatch, Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.request import RUNNING, Request


class FakeEngine:
    """Takes arrivals in and steps until each has ended. It refuses whatever an engine could not do."""

    def __init__(self, host: Host, arrivals: Iterable[Arrival], *, cost: CostModel = EXACT) -> None:
        self.host, self.cost, self.now, self.num_steps = host, cost, 0.0, 0
        self.coming = sorted(arrivals, key=lambda arrival: arrival.at, reverse=True)
        self.present: dict[Request, Arrival] = {}
        self.since: dict[Request, int] = {}
        """The step at which a request came in."""
        self.ended: dict[Request, tuple[Arrival, float]] = {}
        self.kv = PagedKv(host.config.num_blocks, host.config.block_tokens, self.present)

    @property
    def has_work(self) -> bool:
        return bool(self.coming or self.present)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        while self.has_work:
            assert self.num_steps < max_steps, f"{len(self.present)} requests did not end"
            self.step()

    def step(self) -> None:
        self.compute(self.begin())

    def begin(self) -> Dispatch:
        """Take in who came, take out who is aborted, and carry out the next plan up to the computing."""
        self.num_steps += 1
        self.now = max(self.now, 0.0 if self.present else self.coming[-1].at)
        for request, arrival in list(self.present.items()):
            if self.num_steps - self.since[request] == arrival.abort_after:
                self._leave(request, is_complete=False)
        self._take_in()
        return self._checked(self.host.schedule(self.kv, self.now))

    def compute(self, dispatch: Dispatch) -> None:
        """Compute a step, which stands still for the next arrival if the plan lets it."""
        host, plan, work = self.host, dispatch.plan, work_of(dispatch.grants)
        seconds = left = self.cost.predict(work) or 0.001
        host.began(plan, self.now)
        if plan.suspendable_seconds and self.coming and (wait := self.coming[-1].at - self.now) < left:
            self.now, left = self.now + wait, left - wait
            self._take_in()
            in_flight = [request for request, _ in dispatch.grants]
            self.compute(self._checked(host.nest(self.kv, self.now, in_flight, plan.suspendable_seconds)))
            host.began(plan, self.now)
        self.now += left
        host.ended(self.now)
        for request, num_tokens in dispatch.grants:
            request.num_computed += num_tokens
            host.computed(request, num_tokens, self.now)
            self.kv.publish(request)
            if not request.remaining:
                request.num_tokens, request.num_output = request.num_tokens + 1, request.num_output + 1
                if request.num_output == self.present[request].output:
                    self._leave(request, is_complete=True)
        host.settle()
        host.observed(work, seconds)

    def _take_in(self) -> None:
        while self.coming and self.coming[-1].at <= self.now:
            arrival = self.coming.pop()
            request = arrival.request(seq=len(self.present) + len(self.ended))
            self.present[request], self.since[request] = arrival, self.num_steps
            self.host.enter(request, self.now)
        self.kv.count_private()

    def _leave(self, request: Request, *, is_complete: bool) -> None:
        self.host.leave(request, self.now, is_complete=is_complete)
        self.ended[request] = self.present.pop(request), self.now
        if request in self.kv.tables:
            self.kv.release(request)

    def _checked(self, dispatch: Dispatch) -> Dispatch:
        residents = set(self.host.residents.values())
        assert not self.host.imbalance()
        assert self.kv.tables.keys() == residents, "a request holds KV and is no resident, or the reverse"
        assert sum(r.phase is RUNNING for r in residents) <= self.host.config.slots, "more slots than there are"
        assert not dispatch.num_deferred, "a grant finds no block"
        for request, num_tokens in dispatch.grants:
            assert request.phase is RUNNING, "a request computes without a slot"
            assert 0 < num_tokens <= request.remaining, "a grant is empty, or more than is left"
        assert len(dict(dispatch.grants)) == len(dispatch.grants), "two grants for one request"
        return dispatch
