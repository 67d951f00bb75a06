"""The engine's thread: run steps while there is work, and pass the outputs to HTTP and to the feeder.

The loop never waits for them. One wake-up of the event loop passes all outputs of a step to HTTP. The feeder has a
wake-up of its own. Requests reach the engine through its inbox.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ballast_engine.errors import InvalidRequest
from ballast_engine.request import FinishReason, GenerationRequest, Output
from ballast_engine.stats import AdmissionRecord, StepRecord
from ballast_log import Log
from ballast_policy.request import RequestClass
from ballast_worker.engine import Engine

log = Log(__name__)

IDLE_SECONDS = 0.5
"""How often an idle engine checks whether it should stop. A request wakes it at once."""
SWITCH_SECONDS = 0.0005
"""The interpreter's switch interval: HTTP waits this long for the lock while the engine runs Python (default 5 ms)."""
FAILURES_TO_BE_UNHEALTHY = 3
BROKEN = "The engine of this worker failed: send the request again."


@dataclass(slots=True)
class WaitingCount:
    """The HTTP requests of one class, or those of one tenant in it. Each number has one thread that writes it."""

    entered: int = 0
    """Streams so far; only the event loop writes."""
    served: int = 0
    """Streams that got a slot, or ended without one; only the engine's thread writes."""

    @property
    def waiting(self) -> int:
        """Streams that wait for a slot."""
        return self.entered - self.served


class Stream:
    """The outputs of one HTTP request. Filled and read on the event loop, by one reader."""

    __slots__ = (
        "_outputs", "_waiter", "counts", "first_at", "has_slot", "is_hung_up", "last_at", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, *counts: WaitingCount) -> None:
        self.request_id = request_id
        self.counts = counts
        """The counts of its tenant and of its class."""
        self.has_slot = False
        """Whether the request got a slot; written by the engine's thread."""
        self.first_at: float | None = None
        """End of the step that made its first token."""
        self.last_at: float | None = None
        """End of the step that made its newest output."""
        self.is_hung_up = False
        """The client is gone."""
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None

    def count_served(self) -> None:
        """Count that it does not wait any more, on the engine's thread."""
        for count in self.counts:
            count.served += 1

    def push(self, output: Output, at: float) -> None:
        """Add an output and wake the reader."""
        if self.first_at is None and output.num_output:
            self.first_at = at
        self.last_at = at
        self._outputs.append(output)
        self.wake()

    def wake(self) -> None:
        """Make `next` return, with an empty list if no output came."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self) -> None:
        """Note that the client closed the connection."""
        self.is_hung_up = True
        self.wake()

    async def next(self) -> list[Output]:
        """Return all outputs since the last call; wait until there is one, or until `wake`."""
        if not self._outputs and not self.is_hung_up:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs


@dataclass(slots=True)
class Ended:
    """The end of a request without an HTTP stream."""

    output: Output
    at: float
    first_at: float | None = None
    """End of the step that made its first token."""
    num_cached: int = 0
    slowest: tuple[float, int] | None = None
    """As in `Recorder.ended`."""
    is_whole: bool = False
    """As in `RequestTiming`."""


class EndedItems:
    """The requests without an HTTP stream that ended, on their way from an engine to the thread of the feeder."""

    def __init__(self) -> None:
        self.num_started = 0
        """Offline requests that have got a slot so far."""
        self.failure: str | None = None
        """Why the engine stopped; None while it runs."""
        self._ended: deque[Ended] = deque()
        self._feeder_event = threading.Event()

    def wake_feeder(self) -> None:
        """End the feeder's wait: a request ended, a slot may be free, or the feeder has new orders."""
        self._feeder_event.set()

    def wait_as_feeder(self, timeout: float) -> bool:
        """Wait for `wake_feeder`, at most `timeout` seconds; return whether it was called."""
        return self._feeder_event.wait(timeout)

    def take_ended(self) -> list[Ended]:
        """Return the requests that ended since the last call."""
        self._feeder_event.clear()  # first: a request that ends later sets it again
        return [self._ended.popleft() for _ in range(len(self._ended))]


class EngineLoop(EndedItems):
    """Owns the engine's thread. `submit` and `abort` are for any thread, `stream` for the event loop."""

    def __init__(self, engine: Engine, on_step: Callable[[StepRecord], None]) -> None:
        super().__init__()
        self.engine = engine
        self._num_failed = 0
        """Steps that failed since the last one that did not."""
        self._on_step = on_step
        self._streams: dict[str, Stream] = {}
        self._begun: dict[str, tuple[float, int]] = {}
        """Requests without a stream that have their first token: its time, and the tokens from the prefix cache."""
        self._counts = {request_class: WaitingCount() for request_class in RequestClass}
        """Of each class, because a sum over tenants, which clients may invent, would take long for each request."""
        self._by_tenant: dict[RequestClass, dict[str, WaitingCount]] = {c: {} for c in RequestClass}
        """The tenants that wait; only the event loop adds and removes tenants."""
        self.events: asyncio.AbstractEventLoop | None = None
        """The event loop of the streams; None before `start`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ballast-engine", daemon=True)

    def start(self, events: asyncio.AbstractEventLoop) -> None:
        """Start the thread; streams are filled on `events`."""
        self.events = events
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in flight."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine works. Several failed steps in a row make it unhealthy until one succeeds."""
        return self.failure is None and self._num_failed < FAILURES_TO_BE_UNHEALTHY

    def num_entered(self, request_class: RequestClass) -> int:
        """Return the number of HTTP requests of a class so far."""
        return self._counts[request_class].entered

    def num_waiting(self, request_class: RequestClass) -> int:
        """Return the number of HTTP requests of a class that wait for a slot, in the engine or in its inbox."""
        return self._counts[request_class].waiting

    def waiting_by_tenant(self, request_class: RequestClass) -> dict[str, int]:
        """Return these requests by tenant, and forget the tenants without one. Call it on the event loop."""
        counts = self._by_tenant[request_class]
        found = {tenant: count.waiting for tenant, count in counts.items()}
        for tenant, waiting in found.items():
            if not waiting:
                del counts[tenant]
        return found

    def submit(self, request: GenerationRequest) -> None:
        """Submit a request whose end `take_ended` returns.

        Raises:
            InvalidRequest: the message is a sentence for the user.
        """
        if self.failure is not None:
            self._ended.append(Ended(failed(request.request_id, self.failure), time.monotonic()))
            self.wake_feeder()
            return
        self.engine.submit(request)

    def stream(self, request: GenerationRequest) -> Stream:
        """Submit a request and return the stream of its outputs. Call it on the event loop.

        Raises:
            InvalidRequest: the message is a sentence for the user.
        """
        counts = self._by_tenant[request.request_class]
        of_tenant = counts.get(request.tenant) or counts.setdefault(request.tenant, WaitingCount())
        stream = Stream(request.request_id, of_tenant, self._counts[request.request_class])
        for count in stream.counts:
            count.entered += 1
        self._streams[request.request_id] = stream
        # Read after the entry is made: a failure either finds the entry, or is found here.
        if self.failure is None:
            try:
                self.engine.submit(request)
            except InvalidRequest:
                del self._streams[request.request_id]
                for count in stream.counts:
                    count.entered -= 1
                raise
        elif self._streams.pop(request.request_id, None) is not None:
            stream.push(failed(request.request_id, self.failure), time.monotonic())
        return stream

    def abort(self, request_id: str) -> None:
        """End a request before the next plan. Its last output still comes."""
        self.engine.abort(request_id)

    def wake_streams(self) -> None:
        """Make every HTTP request send a keepalive. Call it on the event loop."""
        for stream in list(self._streams.values()):
            stream.wake()

    def abort_streams(self) -> None:
        """Abort every HTTP request."""
        for request_id in list(self._streams):
            self.engine.abort(request_id)

    def _run(self) -> None:
        engine = self.engine
        last = engine.last_step
        try:
            while not self._stopping or engine.is_suspended:
                engine.wait(IDLE_SECONDS)
                outputs = engine.step()
                step = engine.last_step
                if step is not last:
                    self._num_failed = 0
                elif any(output.finish_reason is FinishReason.FAILED for output in outputs):
                    self._num_failed += 1  # before a client hears of the failure
                is_slot_free = self._hand_out(outputs) if outputs else False
                if step is not last:
                    last = step
                    if step.admissions:
                        is_slot_free |= self._note(step.admissions)
                    self._on_step(step)
                if is_slot_free:
                    self.wake_feeder()
        except Exception as error:  # every waiting request gets the reason
            log.exception("engine failed")
            self._fail(f"{BROKEN} ({type(error).__name__})")

    def _note(self, admissions: Iterable[AdmissionRecord]) -> bool:
        """Count first slots. Return True if an offline request got one: fewer items are prefetched now."""
        is_taken = False
        for admission in admissions:
            if admission.request_class is RequestClass.OFFLINE:
                self.num_started += 1
                is_taken = True
            stream = self._streams.get(admission.request_id)
            if stream is not None:
                stream.has_slot = True
                stream.count_served()
        return is_taken

    def _hand_out(self, outputs: list[Output]) -> bool:
        """Pass outputs on. Return whether a request ended, so that a slot may be free."""
        now = time.monotonic()
        streams, begun = self._streams, self._begun
        pushed: list[tuple[Stream, Output]] = []
        is_slot_free = False
        for output in outputs:
            is_over = output.finish_reason is not None
            is_slot_free |= is_over
            stream = streams.get(output.request_id)
            if stream is not None:
                pushed.append((stream, output))
                if is_over:
                    del streams[output.request_id]
                    if not stream.has_slot:
                        stream.count_served()
            elif is_over:
                first_at, num_cached = begun.pop(output.request_id, (None, output.num_cached))
                self._ended.append(Ended(output, now, first_at or (now if output.num_output else None), num_cached))
            else:
                begun[output.request_id] = (now, output.num_cached)
        if pushed:
            self._push_all(pushed, now)
        return is_slot_free

    def _push_all(self, pushed: list[tuple[Stream, Output]], now: float) -> None:
        assert self.events is not None
        try:
            self.events.call_soon_threadsafe(_push, pushed, now)
        except RuntimeError:  # the event loop closed first
            log.debug("outputs after the event loop closed", count=len(pushed))

    def _fail(self, why: str) -> None:
        self.failure = why
        streams, self._streams = self._streams, {}
        now = time.monotonic()
        self._push_all([(stream, failed(request_id, why)) for request_id, stream in streams.items()], now)
        self.wake_feeder()


def _push(pushed: list[tuple[Stream, Output]], at: float) -> None:
    for stream, output in pushed:
        stream.push(output, at)


def failed(request_id: str, why: str) -> Output:
    """Return the last output of a request that the engine lost."""
    return Output(request_id, finish_reason=FinishReason.FAILED, error=why)
