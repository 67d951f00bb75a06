"""From the queue to the engine and back, on a thread of its own that may block on Redis.

Keeps just enough claimed items at hand that a free slot is filled at the next step, and no more. While Redis is away it
claims nothing, keeps finished results, and delivers them when Redis is back and the lease still holds.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty

from ballast_engine.request import FinishReason
from ballast_log import Log
from ballast_policy.request import RequestClass
from ballast_queue.errors import QueueError, QueueUnavailable, ServerUnfit
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.status import QueueStats, WorkerStatus
from ballast_worker.appraisal import appraise
from ballast_worker.claims import Claims
from ballast_worker.holdings import Holdings
from ballast_worker.loop import Ended, EngineLoop
from ballast_worker.openai import Served
from ballast_worker.requests import Recorder

log = Log(__name__)

TICK_SECONDS = 1.0
"""What is due in the queue, the ledger, the worker's status, deadlines, and the inbox."""
INTAKE_ENTRIES = 500
"""Of the inbox between two looks at leases and claims; some tens of milliseconds."""
STATUS_TTL_SECONDS = 5.0
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 2.0
RENEW_SECONDS = 1.0
"""How soon a new address or password is tried again while the old connection serves on."""
GATHER_SECONDS = 0.002
"""After a wake-up the feeder waits this long for what ends in the same moment: one round trip then tells it all."""


class Feeder:
    """The feeder's thread; `configure`, `drain` and the figures are for any thread."""

    def __init__(
        self,
        *,
        connect: Callable[[], Queue],
        worker: str,
        loop: EngineLoop,
        served: Served,
        status: Callable[[], WorkerStatus],
        settings: QueueSettings,
    ) -> None:
        self.recorder = Recorder()
        self.outcomes: Counter[Outcome] = Counter()
        """What Redis said to what this worker told it."""
        self.is_up = False
        """Redis answers and is fit to hold work."""
        self.stats: QueueStats | None = None
        self.can_claim = False
        """The queue had items at the last tick whose tenant is below its slot cap here."""
        self.drained = threading.Event()
        """Set once a draining feeder holds nothing any more."""
        self._connect = connect
        self._worker = worker
        self._loop = loop
        self._status = status
        self._settings = settings
        self._is_configured = False
        self._holdings = Holdings(worker, served.revision)
        self._claims = Claims(worker, loop, served, self._holdings)
        self._queue: Queue | None = None
        self._is_stale = False
        """Address or password have changed, and the connection is the old one."""
        self._complaint = ""
        self._backoff = FIRST_BACKOFF
        self._posted: dict[str, float] = {}
        """Service of offline tenants that the shared ledger knows of."""
        self._lease_seconds = settings.lease_seconds
        self._tick_at = self._beat_at = self._intake_at = self._retry_at = self._renew_at = 0.0
        self._is_draining = self._is_returned = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ballast-feeder", daemon=True)

    # Any thread

    def start(self) -> None:
        """Begin to feed."""
        self._thread.start()

    def configure(self, settings: QueueSettings) -> None:
        """Write these settings to the queue at the next turn."""
        self._settings = settings
        self._is_configured = False
        self._wake()

    def reconnect(self) -> None:
        """Change over to the address and password that `connect` finds now; what is held stays held."""
        self._is_stale = True
        self._renew_at = self._retry_at = 0.0
        self._wake()

    def drain(self) -> None:
        """Stop claiming and give everything back with what it generated."""
        self._is_draining = True
        self._wake()

    def stop(self) -> None:
        """End the thread after its turn."""
        self._is_stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    @property
    def num_held(self) -> int:
        """Items under lease in this worker."""
        return len(self._holdings)

    @property
    def num_at_risk(self) -> int:
        """Jobs that will miss their deadline at the present rates."""
        return self.stats.jobs_at_risk if self.stats is not None else 0

    def _wake(self) -> None:
        self._loop.ended.put([])

    # The feeder's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._collect()
                self._turn()
            if self._queue is not None and self.is_up:
                self._queue.workers.withdraw(self._worker)
        except QueueError as error:
            log.warning("the worker's status stays until it expires", because=str(error))
        except Exception:  # a defect here must not pass for an empty queue
            log.exception("the feeder failed; offline work stops on this worker")
        finally:
            self.is_up = False
            self.drained.set()  # nobody returns anything any more, so nobody needs to wait for it

    def _collect(self) -> None:
        """Wait until something ended, a slot is free or something is due, then take in all that ended."""
        try:
            batches = [self._loop.ended.get(timeout=self._pause())]
        except Empty:
            return
        time.sleep(GATHER_SECONDS)
        while True:
            try:
                batches.append(self._loop.ended.get_nowait())
            except Empty:
                break
        for batch in batches:
            for ended in batch:
                self._settle(ended)
        if self._loop.failure is not None:
            self._loop.fail_all(list(self._holdings.held), self._settle)

    def _pause(self) -> float:
        now = time.monotonic()
        if not self.is_up:
            return max(0.001, self._retry_at - now)
        due = min(self._tick_at, self._beat_at, self._intake_at)
        if not self._is_draining:
            due = min(due, self._claims.look_at)
        return max(0.001, due - now)

    def _settle(self, ended: Ended) -> None:
        item = self._holdings.settle(ended.output, num_cached=ended.num_cached)
        if item is None:
            return
        item.passage.first_at = ended.first_at
        reason = ended.output.finish_reason or FinishReason.FAILED
        self.recorder.ended(item.passage, reason, item.answer.num_prompt, item.answer.num_output, ended.at)
        self._claims.saw_end(item)

    def _turn(self) -> None:
        if not self.is_up and time.monotonic() < self._retry_at:
            return
        try:
            queue = self._attach()
            self._speak(queue)
        except QueueError as error:
            self._lose(error)
            return
        if not self.is_up:
            self.is_up = True
            self._complaint = ""
            self._backoff = FIRST_BACKOFF
            log.info("queue is up", queue=queue.name)

    def _attach(self) -> Queue:
        """The queue, connected and configured; before it is up, with a server that was found fit."""
        if self._queue is None:
            self._is_stale = False  # before the call: a change that comes during it is taken up after it
            self._queue = self._connect()
        elif self._is_stale and time.monotonic() >= self._renew_at:
            self._renew(self._queue)
        if not self.is_up:
            for warning in self._queue.require_fit():
                if not self._is_configured:
                    log.warning("redis", warning=warning)
            self._beat_at = self._tick_at = self._intake_at = 0.0
        if not self._is_configured:
            self._is_configured = True
            settings = self._settings
            if not self._queue.settings.apply(settings):
                log.info("the queue has newer settings than this worker's configuration")
            self._lease_seconds = self._queue.settings.read().lease_seconds
            self._claims.weights = {tenant.name: tenant.weight for tenant in settings.tenants}
        return self._queue

    def _renew(self, old: Queue) -> None:
        """Change the connection; the old one serves on while the new address or password does not work yet."""
        self._is_stale = False
        fresh: Queue | None = None
        try:
            fresh = self._connect()
            fresh.require_fit()
        except QueueError as error:
            if fresh is not None:
                fresh.close()
            self._is_stale = True
            self._renew_at = time.monotonic() + RENEW_SECONDS
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("new Redis address or password does not work, the old connection stays", because=str(error))
            return
        self._queue = fresh
        old.close()
        self._complaint = ""
        self._is_configured = False
        log.info("new Redis address or password taken up")

    def _speak(self, queue: Queue) -> None:
        """One turn with Redis: results first, then leases, then upkeep, then new items."""
        if self._holdings.has_news:
            self._holdings.tell(queue, self._count)
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat(queue)
            self._beat_at = now + self._lease_seconds / 3
        if now >= self._tick_at:
            self._tick(queue)
            self._tick_at = now + min(TICK_SECONDS, self._lease_seconds / 3)
        if now >= self._intake_at:
            self._take_in(queue)
        if self._is_draining:
            self._drain()
        elif self._loop.is_healthy:
            self._claims.refill(queue)

    def _beat(self, queue: Queue) -> None:
        leases = self._holdings.leases()
        lost = queue.leases.heartbeat(leases) if leases else []
        if lost:
            log.info("leases lost or cancelled", count=len(lost))
            for request_id in self._holdings.lose(lost):
                self._loop.abort(request_id)

    def _tick(self, queue: Queue) -> None:
        queue.timers.run_due()
        self.can_claim = self._finds_work(queue)
        queue.workers.publish(self._status(), STATUS_TTL_SECONDS)
        workers = queue.workers.statuses()
        self._claims.consider(queue, workers, self._gained())
        self.stats = queue.stats()
        appraise(queue, workers, self.stats.at, self._claims.weights)

    def _finds_work(self, queue: Queue) -> bool:
        """Return whether the queue has an item that this worker could run, whether or not it claims any.

        The status publishes the answer, so that a worker that stops claiming does not read as one without work.
        """
        held = Counter(item.claimed.tenant for item in self._holdings.held.values())
        caps = {name: share.max_slots for name, share in self._loop.engine.policy.tenants.items()}
        return any(
            (cap := caps.get(tenant)) is None or held[tenant] < cap for tenant in queue.claimable.demand().tenants
        )

    def _take_in(self, queue: Queue) -> None:
        """Take a page of the inbox in; the next one follows at once where there is more, behind leases and claims."""
        is_full = queue.inbox.take_in(INTAKE_ENTRIES) >= INTAKE_ENTRIES
        self._intake_at = 0.0 if is_full else time.monotonic() + TICK_SECONDS

    def _gained(self) -> dict[str, float]:
        """What the engine charged offline tenants since the last time."""
        served = {
            tenant: service
            for (request_class, tenant), service in self._loop.engine.stats().service.items()
            if request_class is RequestClass.OFFLINE
        }
        weights = self._claims.weights
        gained = {
            tenant: (service - self._posted.get(tenant, 0.0)) / weights.get(tenant, 1.0)
            for tenant, service in served.items()
            if service > self._posted.get(tenant, 0.0)
        }
        self._posted = served  # before the call: one that failed may have counted, and counting twice is worse
        return gained

    def _drain(self) -> None:
        if not self._is_returned:
            self._is_returned = True
            self._loop.engine.give_back(list(self._holdings.held))
        if not len(self._holdings) and not self.drained.is_set():
            log.info("offline items are given back")
            self.drained.set()

    def _lose(self, error: QueueError) -> None:
        """Redis is away, or not fit: pause offline work, keep what is finished, come back later."""
        if self.is_up or str(error) != self._complaint:
            self._complaint = str(error)
            if isinstance(error, ServerUnfit):
                log.error("redis is not fit to hold work; offline work is paused", because=str(error))
            else:
                log.warning("redis is away; offline work is paused", because=str(error), held=len(self._holdings))
        self.is_up = False
        if self._queue is not None:
            self._queue.close()
            self._queue = None  # the next one is opened with the address and password that are there then
        self._is_configured = self._is_configured and isinstance(error, QueueUnavailable)
        self._retry_at = time.monotonic() + self._backoff * random.uniform(0.8, 1.2)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)
        if self._is_draining and not self._is_returned:
            self._drain()

    def _count(self, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
