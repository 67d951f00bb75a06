"""Move items from the queue to the engine, and results back, on a thread that may block on Redis.

The feeder prefetches only as many items as are needed to fill a free slot at the next step. While Redis is unavailable,
it claims no items and keeps finished results. It stores them when Redis is back and their leases are still valid.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from ballast_engine.request import FinishReason
from ballast_log import Log
from ballast_queue.errors import QueueError
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.status import QueueStats, WorkerStatus
from ballast_worker.claimer import Claimer
from ballast_worker.feeder_tasks import FeederTasks
from ballast_worker.in_flight import InFlightItems, all_or_each
from ballast_worker.items import ItemLoop, ItemReader
from ballast_worker.loop import Ended, failed
from ballast_worker.outlooks import update_outlooks
from ballast_worker.queue_link import QueueLink
from ballast_worker.requests import Recorder

log = Log(__name__)

TICK_SECONDS = 1.0
"""How often the feeder runs due timers and updates the ledger, the worker's status, outlooks and the inbox."""
TIMER_SECONDS = 0.1
"""How long due timers may run at a tick beyond their first items: enough for some thousand items of an ended job."""
REFILL_SECONDS = 1.0
"""How long items are prepared between two rounds of leases and other tasks, at most a tenth of a lease."""
INTAKE_ENTRIES = 500
"""Inbox entries that are taken in between two rounds of leases and claims; some tens of milliseconds."""
PAGE_SECONDS = 0.05
"""Wait after a page with fewer entries. Long entries may follow, or a writer adds entries one by one."""
STATUS_TTL_SECONDS = 5.0
SETTINGS_SECONDS = 60.0
"""How often the worker writes its settings to the queue again, so that they stay in force."""
GATHER_SECONDS = 0.002
"""How long the feeder waits after a wake-up, so that one round trip reports all requests that end together."""


class Feeder:
    """The feeder and its thread. Any thread may call the public methods."""

    stats: QueueStats | None = None
    """The figures of the queue at the last tick; None if they could not be read."""
    can_claim = False
    """Whether the queue had items at the last tick whose tenant is below its slot cap here."""

    def __init__(
        self,
        *,
        connect: Callable[[], Queue],
        worker: str,
        loop: ItemLoop,
        reader: ItemReader,
        status: Callable[[], WorkerStatus],
        settings: QueueSettings,
    ) -> None:
        self.recorder = Recorder()
        self.outcomes: Counter[Outcome] = Counter()
        """The answers of Redis to the reports of this worker."""
        self.tasks = FeederTasks()
        self.held_requests = Counter[str]()
        """Requests of the items in the engine at the last tick, by tenant. An item may be several."""
        self.drained = threading.Event()
        """Set when a draining feeder has no items left."""
        self._link = QueueLink(connect)
        self._worker = worker
        self._loop = loop
        self._status = status
        self._settings = settings
        self._configured: QueueSettings | None = None
        """The settings that this worker wrote last."""
        self._configure_at = 0.0
        self._is_followed = True
        """Whether the queue has the settings of this worker's resource in force."""
        self._unread: set[str] = set()
        """Tenants whose inboxes no worker reads, as logged."""
        self._in_flight = InFlightItems(worker, reader.revision)
        self._claimer = Claimer(worker, loop, reader, self._in_flight, fail=self.tasks.fail)
        self._workers: list[WorkerStatus] = []
        """The statuses of all workers at the last tick."""
        self._lease_seconds = settings.lease_seconds
        self._extended_at = 0.0
        """When the leases were last extended."""
        self._tick_at = self._heartbeat_at = self._intake_at = 0.0
        self._is_draining = self._is_returned = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ballast-feeder", daemon=True)

    # Any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def configure(self, settings: QueueSettings) -> None:
        """Write settings to the queue in the next round."""
        self._settings = settings
        self._wake()

    def reconnect(self) -> None:
        """Connect again with the current address and password. Leases stay valid."""
        self._link.renew_soon()
        self._wake()

    def drain(self) -> None:
        """Stop claiming, and return all items with their generated tokens."""
        self._is_draining = True
        self._wake()

    def stop(self) -> None:
        """End the thread after its current round."""
        self._is_stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    @property
    def is_dead(self) -> bool:
        """Whether the thread ended although `stop` was not called."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._is_stopping

    @property
    def is_up(self) -> bool:
        """Whether Redis answers and its configuration is safe for jobs."""
        return self._link.is_up

    @property
    def num_unreadable(self) -> int:
        """Values in Redis that cannot be read, and are skipped."""
        queue = self._link.queue
        return len(queue.store.unreadable.places) if queue is not None else 0

    @property
    def num_held(self) -> int:
        """Items under lease in this worker."""
        return len(self._in_flight)

    def _wake(self) -> None:
        self._loop.wake_feeder()

    # The feeder's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    self._collect()
                    self._round()
                    self._return_expired()
                except Exception as error:  # noqa: BLE001 -- a defect must end neither offline work nor its signals
                    self.tasks.fail("feeder", error)
                    self._pause_offline(QueueError("the feeder failed"))
            if self._link.queue is not None and self.is_up:
                self._link.queue.workers.withdraw(self._worker)
        except QueueError as error:
            log.warning("worker status not removed, it expires later", because=str(error))
        finally:
            self._link.close()
            self.drained.set()  # no item is returned after this, so the drain does not wait

    def _collect(self) -> None:
        """Wait until a request ends, a slot is free or a task is due, then take in all requests that ended."""
        if not self._loop.wait_as_feeder(self._wait_seconds()):
            return
        time.sleep(GATHER_SECONDS)
        for ended in self._loop.take_ended():
            self.tasks.run("settle", partial(self._settle, ended))
        if (failure := self._loop.failure) is not None:
            for request_id in list(self._in_flight.held):  # a later end finds no item
                self._settle(Ended(failed(request_id, failure), time.monotonic()))

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        if not self.is_up:
            return max(0.001, self._link.retry_at - now)
        due = min(self._tick_at, self._heartbeat_at, self._intake_at)
        if not self._is_draining and self._loop.is_healthy:
            due = min(due, self._claimer.read_at)
        return max(0.001, due - now)

    def _settle(self, ended: Ended) -> None:
        item = self._in_flight.settle(ended.output, num_cached=ended.num_cached)
        if item is None:
            return
        item.timing.first_at, item.timing.is_whole = ended.first_at, ended.is_whole
        reason = ended.output.finish_reason or FinishReason.FAILED
        answer = item.answer
        self.recorder.ended(item.timing, reason, answer.num_prompt, answer.num_output, ended.at, slowest=ended.slowest)
        if not item.is_lost and reason in {
            FinishReason.STOP,
            FinishReason.LENGTH,
        }:  # only a whole answer shows the cost
            self._claimer.add_end(item)

    def _round(self) -> None:
        link = self._link
        if not link.is_up and time.monotonic() < link.retry_at:
            return
        try:
            queue = self._attach()
            self._exchange(queue)
        except QueueError as error:
            self._pause_offline(error)
            return
        link.keep(queue)

    def _attach(self) -> Queue:
        """Return the queue, connected and configured."""
        queue = self._link.attach()
        if not self.is_up:
            self._heartbeat_at = self._tick_at = self._intake_at = 0.0
            self._configure_at = 0.0  # another server may have taken over, without the newest settings
        is_due = self._configured is not self._settings or time.monotonic() >= self._configure_at
        if is_due or self._link.is_new:
            if self.is_up:
                queue.require_fit()  # somebody may have changed the configuration of the server
            self._apply_settings(queue)
        return queue

    def _apply_settings(self, queue: Queue) -> None:
        settings = self._settings
        is_followed = queue.settings.apply(settings)
        if self._is_followed and not is_followed:
            log.info("queue follows the settings of another resource, or newer ones than this worker's configuration")
        self._is_followed = is_followed
        self.tasks.run("unread inboxes", partial(self._name_unread, queue))
        self._read_lease_seconds(queue)
        self._claimer.weights = {tenant.name: tenant.weight for tenant in settings.tenants}
        self._configured, self._link.is_new = settings, False  # last: after a failure, the next round writes them again
        self._configure_at = time.monotonic() + SETTINGS_SECONDS

    def _read_lease_seconds(self, queue: Queue) -> None:
        """Follow the time of a lease in the queue. If it changed, the next heartbeat is due at once."""
        seconds = queue.settings.lease_seconds()
        if seconds != self._lease_seconds:
            self._lease_seconds = seconds
            self._heartbeat_at = 0.0

    def _name_unread(self, queue: Queue) -> None:
        unread = queue.inbox.unread()
        for tenant in unread.keys() - self._unread:
            log.warning("no worker reads an inbox: the queue no longer declares its tenant", tenant=tenant)
        self._unread = set(unread)

    def _exchange(self, queue: Queue) -> None:
        """Run one round with Redis: report results, extend leases, run due tasks, claim items."""
        try:
            if self._in_flight.has_reports:
                self.tasks.run("report", partial(self._in_flight.report, queue, self.outcomes))
        finally:  # if a report breaks the connection each time, the leases of all other items must stay
            now = time.monotonic()
            if now >= self._tick_at:  # another worker may have changed it
                self.tasks.run("lease time", partial(self._read_lease_seconds, queue))
            if now >= self._heartbeat_at:
                self.tasks.run("heartbeat", partial(self._heartbeat, queue))
                self._heartbeat_at = now + self._lease_seconds / 3
        if now >= self._tick_at:
            self._tick(queue)
            self._tick_at = now + min(TICK_SECONDS, self._lease_seconds / 3)
        if now >= self._intake_at:
            self._intake_at = now + TICK_SECONDS
            self.tasks.run("inbox", partial(self._take_in, queue))
        if self._is_draining:
            self._drain()
        elif self._loop.is_healthy and not self.tasks.run("claim", partial(self._claim, queue)):
            self._claimer.read_at = now + TICK_SECONDS

    def _heartbeat(self, queue: Queue) -> None:
        leases, now = self._in_flight.leases(), time.monotonic()
        lost = all_or_each(queue.leases.heartbeat, leases) if leases else []
        self._extended_at = now
        if lost:
            log.info("leases lost or cancelled", count=len(lost))
            for request_id in self._in_flight.lose(lost):
                self._loop.abort(request_id)
        # Last: it fails if the prefixes of one job cannot be read.
        queue.leases.report_progress(self._in_flight.progress(self._loop.engine.num_computed))

    def _return_expired(self) -> None:
        """Stop the items whose leases expired while Redis was away, because other workers may have them by now.

        Their tokens stay in a report, which counts if Redis still knows the lease.
        """
        expired = self._in_flight.expire(self._extended_at, time.monotonic() - self._lease_seconds)
        if expired:
            log.warning("leases expired, items are stopped", count=len(expired))
            self._loop.engine.give_back(expired)

    def _tick(self, queue: Queue) -> None:
        self.tasks.run("timers", partial(queue.timers.run_due, TIMER_SECONDS))
        self.tasks.run("status", partial(self._publish, queue))
        self.tasks.run("ledger", lambda: self._claimer.update(queue, self._workers))
        if not self.tasks.run("figures", partial(self._read_figures, queue)):
            self.stats = None  # old figures would look like the current ones
        self.tasks.run("outlooks", partial(self._update_outlooks, queue))

    def _publish(self, queue: Queue) -> None:
        self.held_requests = self._in_flight.requests_by_tenant()
        self.can_claim = self._finds_work(queue)
        queue.workers.publish(self._status(), STATUS_TTL_SECONDS)
        self._workers = queue.workers.statuses()

    def _read_figures(self, queue: Queue) -> None:
        self.stats = queue.stats()

    def _update_outlooks(self, queue: Queue) -> None:
        if self.stats is not None:
            update_outlooks(queue, self._workers, self.stats.at, self._claimer.weights)

    def _finds_work(self, queue: Queue) -> bool:
        """Return whether the queue has an item that this worker could run, whether or not it claims any.

        The status publishes the answer, so that a worker that stops claiming does not look like a worker without work.
        """
        if self.stats is not None and self.stats.is_exhausted:
            return False
        held = self.held_requests
        caps = {name: share.max_slots for name, share in self._loop.engine.policy.tenants.items()}
        tenants = {group.tenant for group in queue.claimable.demand().groups if not self._claimer.avoids(group)}
        return any((cap := caps.get(tenant)) is None or held[tenant] < cap for tenant in tenants)

    def _take_in(self, queue: Queue) -> None:
        """Read a page of the inbox. If there may be more, the next page follows soon, after leases and claims."""
        taken = queue.inbox.take_in(INTAKE_ENTRIES)
        pause = 0.0 if taken >= INTAKE_ENTRIES else PAGE_SECONDS if taken else TICK_SECONDS
        self._intake_at = time.monotonic() + pause
        if taken:
            self.tasks.note_memory("inbox")

    def _claim(self, queue: Queue) -> None:
        if self._claimer.refill(queue, min(REFILL_SECONDS, self._lease_seconds / 10)):
            self.tasks.note_memory("claim")

    def _drain(self) -> None:
        if not self._is_returned:
            self._is_returned = True
            self._loop.engine.give_back(list(self._in_flight.held))
        if not len(self._in_flight) and not self.drained.is_set():
            log.info("offline items returned")
            self.drained.set()

    def _pause_offline(self, error: QueueError) -> None:
        """Pause offline work because Redis is unavailable or unsafe. Keep finished results and try again later."""
        self._link.lose(error, len(self._in_flight))
        if self._is_draining and not self._is_returned:
            self._drain()
