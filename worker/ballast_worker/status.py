"""The status that a worker publishes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_policy.reservation import most_slots
from ballast_queue.status import LEAST_RATE, ClassLoad, ReservationStatus, WorkerStatus
from ballast_worker.turnover import Turnover

if TYPE_CHECKING:
    from ballast_worker.model_server import ModelServer

SMOOTHING_SECONDS = 5.0
"""The half-life of the past in smoothed rates."""
CAPACITY_SECONDS = 30.0
"""The half-life of the past in the slots and tokens that forecast deadlines. How long items take follows `Turnover`."""
IDLE_SECONDS = 5.0
"""If items wait for so long and none runs, the measured rate is zero, whether or not an item ever ran."""


@dataclass(slots=True)
class _ClassRates:
    prefill: float = 0.0
    decode: float = 0.0
    requests: float = 0.0


@dataclass(slots=True)
class SmoothedRates:
    """Tokens and requests per second by class, smoothed; `sample` is called about once a second by one thread."""

    classes: dict[RequestClass, _ClassRates] = field(default_factory=lambda: {c: _ClassRates() for c in RequestClass})
    _turnover: Turnover = field(default_factory=lambda: Turnover(CAPACITY_SECONDS))
    """Of offline items, while more of them waited than there were slots."""
    _tokens: float = 0.0
    """Decoded tokens of these items, of which half are forgotten in CAPACITY_SECONDS."""
    _seconds: float = 0.0
    """The time of these tokens."""
    _held: float = 0.0
    """This time, times the slots that offline work held."""
    _busy_seconds: float = 0.0
    """The part of this time in which offline work ran."""
    items_while_running: float = 0.0
    """Items per second of this part. It does not fall while none runs. 0: not measured."""
    tokens_while_running: float = 0.0
    """Tokens of these items decoded per second. 0: not measured."""
    _idle_seconds: float = 0.0
    """How long items have waited while none ran."""
    _running: int = 0
    """Items that ran at the last sample of these rates."""
    _was_full: bool = False
    _before: dict[RequestClass, tuple[int, int, int]] | None = None
    _decoded: int = 0
    """Offline tokens at the last sample."""
    _left: int = 0
    """Items that had left their slots by then."""
    _at: float = 0.0

    def sample(self, stats: EngineStats, started: dict[RequestClass, int], now: float) -> None:
        """Read the counters. `started` counts arrivals (online) and started items (offline)."""
        tokens = stats.offline.decode_tokens
        # A preemption, or a slot without a first token in vLLM, takes back an end until there are more.
        left = started[RequestClass.OFFLINE] - stats.offline.running - stats.offline.parked
        seen = {c: (stats.of(c).prefill_tokens, stats.of(c).decode_tokens, started[c]) for c in RequestClass}
        elapsed = now - self._at
        if self._before is not None and elapsed > 0:
            keep = 0.5 ** (elapsed / SMOOTHING_SECONDS)
            for request_class, rates in self.classes.items():
                rates_now = [
                    (after - before) / elapsed
                    for after, before in zip(seen[request_class], self._before[request_class], strict=True)
                ]
                rates.prefill = rates.prefill * keep + rates_now[0] * (1 - keep)
                rates.decode = rates.decode * keep + rates_now[1] * (1 - keep)
                rates.requests = rates.requests * keep + rates_now[2] * (1 - keep)
            if self._was_full and stats.offline.waiting:
                self._measure(tokens - self._decoded, max(0, left - self._left), elapsed, stats.offline.running)
        self._was_full = stats.offline.waiting > 0
        self._before, self._at = seen, now
        self._decoded, self._left = tokens, max(left, self._left)

    def _measure(self, tokens: int, ended: int, elapsed: float, running: int) -> None:
        """Add a time in which more offline items waited than there were slots."""
        keep = 0.5 ** (elapsed / CAPACITY_SECONDS)
        running = running or int(ended > 0)  # inside vLLM, an embedding holds its slot within a step only
        self._tokens, self._seconds = self._tokens * keep + tokens, self._seconds * keep + elapsed
        self._held = self._held * keep + running * elapsed
        self._turnover.add(ended, elapsed, running)
        self._running = running
        self._busy_seconds *= keep
        if not running and not tokens:
            self._idle_seconds += elapsed
            return
        self._idle_seconds = 0.0
        self._busy_seconds += elapsed
        self.items_while_running = self._turnover.rate(running) * self._held / self._busy_seconds
        self.tokens_while_running = self._tokens / self._busy_seconds

    @property
    def offline_items(self) -> float:
        """Items per second while more waited than there were slots; else the last measured rate. 0: not measured."""
        each = self._turnover.rate(self._running)
        return self._known(each * self._held, is_measured=each > 0)

    @property
    def offline_tokens(self) -> float:
        """Tokens of these items decoded per second. 0: not measured."""
        return self._known(self._tokens, is_measured=self._tokens > 0)

    def _known(self, number: float, *, is_measured: bool) -> float:
        """Return a number of the measured time, per second."""
        return max(LEAST_RATE, number / self._seconds) if is_measured or self._idle_seconds >= IDLE_SECONDS else 0.0

    def load(self, stats: EngineStats, request_class: RequestClass) -> ClassLoad:
        """Return the load of one class for the status."""
        of, rates = stats.of(request_class), self.classes[request_class]
        return ClassLoad(
            running=of.running,
            parked=of.parked,
            waiting=of.waiting,
            held_up=of.held_up,
            reserved=of.reserved,
            borrowed=of.borrowed,
            prefill_tokens_per_second=round(rates.prefill, 3),
            decode_tokens_per_second=round(rates.decode, 3),
            requests_per_second=round(rates.requests, 4),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server serves, and on what."""

    model: str
    revision: str
    """The name of everything that decides the tokens of an answer."""
    device: str


def worker_status(server: ModelServer, stats: EngineStats) -> WorkerStatus:
    """Return the status of a server with these counters."""
    identity, policy, rates, feeder = server.identity, server.policy, server.rates, server.feeder
    now = time.monotonic()
    ttft, tpot, latency = server.recorder.p99(now)
    held = {} if feeder is None else dict(feeder.held_requests)
    # A thousand tenants may be declared: those that were served.
    tenants = held.keys() | {tenant for request_class, tenant in stats.service if request_class is RequestClass.OFFLINE}
    return WorkerStatus(
        worker_id=server.id,
        address=server.address,
        at=time.time(),
        model=identity.model,
        model_revision=identity.revision,
        device=identity.device,
        slots=stats.slots,
        batch_ceiling=stats.batch_ceiling,
        kv_blocks_total=stats.kv_used + stats.kv_cached + stats.kv_free,
        kv_blocks_free=stats.kv_cached + stats.kv_free,
        online=rates.load(stats, RequestClass.ONLINE),
        offline=rates.load(stats, RequestClass.OFFLINE),
        reservation=reservation(stats),
        can_claim=feeder is not None and feeder.can_claim,
        offline_reserved=policy.reservation().slots,
        offline_most=most_slots(policy.offline_max_share, stats.slots),
        tenant_slots={tenant: most for tenant, most in policy.tenant_caps.items() if tenant in tenants},
        tenant_requests=held,
        offline_items_per_second=_rounded(rates.offline_items),
        offline_tokens_per_second=_rounded(rates.offline_tokens),
        offline_items_while_running=_rounded(rates.items_while_running),
        offline_tokens_while_running=_rounded(rates.tokens_while_running),
        ttft_p99_seconds=None if policy.is_encoder else ttft,
        tpot_p99_seconds=tpot,
        latency_p99_seconds=latency if policy.is_encoder else None,
        slo=server.recorder.slo_status(now),
        generation=server.loaded.config.runtime.generation,
        config_hash=server.loaded.content_hash,
        has_invalid_file=server.has_invalid_file,
        is_ready=server.is_ready,
        is_draining=server.is_draining,
    )


def _rounded(rate: float) -> float:
    """Round a rate to four digits, so that a low one does not become 0, which means that none is known."""
    return float(f"{rate:.4g}")


def reservation(stats: EngineStats) -> ReservationStatus:
    """Return the reservation of the engine for the status."""
    found = stats.reservation
    return ReservationStatus(
        slots=found.slots,
        blocks=found.blocks,
        chunk=found.chunk,
        in_use=found.in_use,
        is_met=stats.is_reservation_met,
        is_met_by_tokens=found.is_met_by_tokens,
    )
