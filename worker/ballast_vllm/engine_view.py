"""vLLM's engine as the feeder sees it: the figures that its scheduler reports, with the requests as they are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ballast_engine.stats import EngineStats
from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_vllm.engine_client import EngineTap
from ballast_vllm.items import HttpItem


class VllmEngine:
    """The engine. Any thread may read it."""

    def __init__(self, tap: EngineTap, stats: EngineStats, policy: PolicyConfig) -> None:
        self.policy = policy
        self.items: dict[str, HttpItem] = {}
        self.in_step: Mapping[str, int] = {}
        """Requests of an encoder's last step by class; empty for other models."""
        self.crowded: frozenset[str] = frozenset()
        """Adapters of which enough items wait here for a place, while online requests hold all places."""
        self._tap = tap
        self.take(stats)
        self.hang_up: Callable[[Sequence[str]], None] = lambda _: None

    def take(self, stats: EngineStats) -> None:
        """Keep the figures that the scheduler reports now."""
        begun = self._tap.num_begun
        # If more requests have an output than hold a slot, the others are preempted.
        self._num_preempted = {c: max(0, begun[c] - stats.of(c).running - stats.of(c).parked) for c in RequestClass}
        self.latest = stats

    def note_held_up(self, request_ids: Collection[str]) -> bool:
        """Note which requests are held up now. Return whether they are others than before."""
        if not self._tap.note_held_up(request_ids):
            return False
        numbers = Counter[str]()
        for item in list(self.items.values()):
            numbers[item.model] += item.num_held_up
        self.crowded = frozenset(model for model, number in numbers.items() if number >= LEAST_AHEAD)
        return True

    def stats(self) -> EngineStats:
        """Return the figures of the last poll, with the requests of each class as they are now.

        A request that had its first output since then holds a slot.
        """
        found, tap = self.latest, self._tap
        classes = {}
        for request_class in RequestClass:
            of = found.of(request_class)
            num_live = tap.num_live[request_class]
            num_begun = tap.num_begun[request_class] - self._num_preempted[request_class]
            residents = min(num_live, max(of.running + of.parked, num_begun))
            parked = min(of.parked, residents)
            classes[request_class] = replace(
                of, running=residents - parked, parked=parked, waiting=num_live - residents
            )
        return replace(found, online=classes[RequestClass.ONLINE], offline=classes[RequestClass.OFFLINE])

    def shown(self) -> EngineStats:
        """Return the figures for metrics and status.

        A request of an encoder holds its slot within one step, and the scheduler reports between steps. So as many
        requests as the last step had count as those in slots, if there are that many now.
        """
        found = self.stats()
        shown = {}
        for request_class in RequestClass:
            of = found.of(request_class)
            moved = max(0, min(of.waiting, self.in_step.get(str(request_class), 0) - of.running))
            running = of.running + moved
            shown[request_class] = replace(
                of, running=running, waiting=of.waiting - moved, borrowed=max(0, running - of.reserved)
            )
        return replace(found, online=shown[RequestClass.ONLINE], offline=shown[RequestClass.OFFLINE])

    def num_computed(self, request_id: str) -> int:
        """Return the tokens of an item computed so far, by this or an earlier attempt."""
        item = self.items.get(request_id)
        if item is None:
            return 0
        here = sum(r.num_prompt + len(r.replay) + r.num_output for r in list(item.call.requests) if r.is_begun)
        return max(item.call.num_computed, here)

    def give_back(self, request_ids: Sequence[str]) -> None:
        """End items with `FinishReason.GIVEN_BACK`."""
        for request_id in request_ids:
            item = self.items.get(request_id)
            if item is not None:
                item.is_given_back = True
        self.hang_up(request_ids)
