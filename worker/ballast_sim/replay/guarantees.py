"""Check the guarantees G1 and G2 at every step. `SimulatedKv.check` checks G8.

The checks use the state after a plan was executed, and share only the formula of the reservation with the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, WAITING, RequestClass
from ballast_policy.snapshot import EngineSnapshot
from ballast_sim.errors import PolicyDefect

_EXCUSES = frozenset({Reason.NO_KV, Reason.CHUNK_SPENT, Reason.BATCH_WINDOW})
"""Reasons for which an online request may wait although a slot is free: its KV is not free, the step computes as much
prefill as it may, or an idle engine waits for a batch."""


@dataclass
class Guarantees:
    """Checks the plans of one replica."""

    steps_to_fill: int = 1000
    """Most steps in a row in which the reservation is not met. A reserved slot may wait for an online answer to end."""
    short_steps: int = 0
    """Steps in a row in which offline work waited and held less than its reservation. A step that computes all reserved
    prefill tokens does not count, because it fills the reservation."""

    def check(self, snapshot: EngineSnapshot, plan: StepPlan, running: Mapping[RequestClass, int]) -> None:
        """Check one plan.

        Raises:
            PolicyDefect: a guarantee does not hold.
        """
        reserved = snapshot.reservation.slots
        self._online_first(snapshot, plan, running, reserved)
        self._offline_reservation(snapshot, plan, running, reserved)

    def _online_first(
        self, snapshot: EngineSnapshot, plan: StepPlan, running: Mapping[RequestClass, int], reserved: int
    ) -> None:
        """Check G1: while online requests wait, offline holds no slot beyond its reservation that online could use."""
        if not snapshot.waiting or snapshot.waiting[0].request_class is OFFLINE:
            return
        left = [r for r in snapshot.waiting if r.request_class is ONLINE and r.phase is WAITING]
        if not left:
            return
        first, offline = left[0], running[OFFLINE]
        reason = next((because.reason for because in plan.because if because.request in left), None)
        if reason in _EXCUSES:
            return
        free = snapshot.config.slots - running[ONLINE] - offline
        if free == 0 and offline > reserved:
            found = f"offline holds {offline} slots and has {reserved} reserved"
            raise PolicyDefect(f"G1: online request {first.seq} waits for a slot while {found}")
        if free > 0:
            raise PolicyDefect(f"G1: {free} slots are free and online request {first.seq} waits ({reason})")

    def _offline_reservation(
        self, snapshot: EngineSnapshot, plan: StepPlan, running: Mapping[RequestClass, int], reserved: int
    ) -> None:
        """Check G2: while offline work is there, offline holds its reservation after a bounded number of steps."""
        offline = (r for r in (*snapshot.residents, *snapshot.waiting) if r.request_class is OFFLINE)
        caps, present = snapshot.config.tenant_caps, Counter(request.tenant for request in offline)
        wanted = min(reserved, sum(min(number, caps.get(tenant, number)) for tenant, number in present.items()))
        if not wanted:
            self.short_steps = 0
            return
        short = max(0, wanted - running[OFFLINE])
        tokens = sum(n for r, n in plan.grants if r.request_class is OFFLINE and r.remaining > 1)
        is_filling = tokens >= snapshot.reservation.chunk
        self.short_steps = self.short_steps + 1 if short and not is_filling else 0
        if self.short_steps > self.steps_to_fill:
            raise PolicyDefect(f"G2: offline held less than {wanted} slots for {self.short_steps} steps in a row")
        if short or any(request.request_class is OFFLINE for request, _ in plan.grants):
            return
        if not any(b.reason is Reason.NO_KV and b.request.request_class is OFFLINE for b in plan.because):
            raise PolicyDefect("G2: offline holds slots, but no offline request takes part in the step")
