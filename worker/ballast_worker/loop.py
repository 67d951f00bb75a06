"""The engine's thread: step while there is work, hand what comes out to HTTP and to the feeder.

The loop waits for nobody: HTTP gets all its outputs of a step through one wake-up of the event loop, the feeder gets the
finished items of a step through one queue entry. Submissions reach the engine through its own inbox.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ballast_engine.engine import Engine
from ballast_engine.request import FinishReason, GenerationRequest, Output
from ballast_engine.stats import StepRecord

from ballast_worker.log import Log

log = Log(__name__)

IDLE_SECONDS = 0.5
"""How long an idle engine waits before it looks whether it should stop; a submission wakes it at once."""
SWITCH_SECONDS = 0.0005
"""The interpreter's switch interval: HTTP gets the lock this fast while the engine runs Python (default 5 ms)."""
BROKEN = "The engine failed and this worker is being replaced: send the request again."


class Stream:
    """What one HTTP request hears from the engine. Filled and read on the event loop, by one reader."""

    __slots__ = ("_outputs", "_waiter", "first_at", "request_id", "submitted_at")

    def __init__(self, request_id: str, submitted_at: float) -> None:
        self.request_id = request_id
        self.submitted_at = submitted_at
        """When it was handed to the engine, seconds on the monotonic clock."""
        self.first_at: float | None = None
        """End of the step that made its first token."""
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: Output, at: float) -> None:
        """Add what a step produced, and wake the reader."""
        if self.first_at is None and output.num_output:
            self.first_at = at
        self._outputs.append(output)
        self.wake()

    def wake(self) -> None:
        """Make `next` return, with nothing where nothing came."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[Output]:
        """Everything that came since the last call; waits until there is something, or somebody wakes it."""
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs


Finished = tuple[float, list[Output]]
"""The end of a step, and the offline requests that ended in it."""


class EngineLoop:
    """Owns the engine's thread. `submit`, `stream` and `abort` are for any thread."""

    def __init__(self, engine: Engine, on_step: Callable[[StepRecord], None]) -> None:
        self.engine = engine
        self.finished: SimpleQueue[Finished | None] = SimpleQueue()
        """Ended requests that no HTTP stream waits for: the feeder's; None only wakes it."""
        self.failure: str | None = None
        """Why the engine stopped for good."""
        self._on_step = on_step
        self._streams: dict[str, Stream] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ballast-engine", daemon=True)

    def start(self, events: asyncio.AbstractEventLoop) -> None:
        """Start the thread; streams are filled on `events`."""
        self._events = events
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in flight."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def is_healthy(self) -> bool:
        """False once the engine failed: only a restart helps."""
        return self.failure is None and self.engine.is_healthy

    @property
    def num_streams(self) -> int:
        """HTTP requests that have not had their last output."""
        return len(self._streams)

    def submit(self, request: GenerationRequest) -> None:
        """Hand in a request whose end goes to `finished`."""
        if self.failure is not None:
            self.finished.put((time.monotonic(), [_failed(request.request_id, self.failure)]))
            return
        self.engine.submit(request)

    def stream(self, request: GenerationRequest) -> Stream:
        """Hand in a request and hear of each of its steps. Call it on the event loop."""
        stream = Stream(request.request_id, time.monotonic())
        self._streams[request.request_id] = stream
        # Looked at behind the entry: a failure either sees the entry, or is seen here.
        if self.failure is None:
            self.engine.submit(request)
        elif self._streams.pop(request.request_id, None) is not None:
            stream.push(_failed(request.request_id, self.failure), stream.submitted_at)
        return stream

    def abort(self, request_id: str) -> None:
        """Free what the request holds before the next plan; its last output still comes."""
        self.engine.abort(request_id)

    def abort_streams(self) -> None:
        """Abort every HTTP request."""
        for request_id in list(self._streams):
            self.engine.abort(request_id)

    def _run(self) -> None:
        engine = self.engine
        try:
            while not self._stopping:
                if not engine.has_work:
                    engine.wait(IDLE_SECONDS)
                    continue
                outputs = engine.step()
                if outputs:
                    self._hand_out(outputs)
                self._on_step(engine.last_step)
        except Exception as error:  # noqa: BLE001 - whatever ends the engine is told to everyone who waits for it
            log.exception("engine failed")
            self._fail(f"{BROKEN} ({type(error).__name__})")

    def _hand_out(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        streams = self._streams
        heard: list[tuple[Stream, Output]] = []
        ended: list[Output] = []
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                heard.append((stream, output))
                if output.finish_reason is not None:
                    del streams[output.request_id]
            elif output.finish_reason is not None:
                ended.append(output)
        if heard:
            self._tell(heard, now)
        if ended:
            self.finished.put((now, ended))

    def _tell(self, heard: list[tuple[Stream, Output]], now: float) -> None:
        assert self._events is not None
        try:
            self._events.call_soon_threadsafe(_push, heard, now)
        except RuntimeError:  # the event loop closed first: nobody is there to hear it
            log.debug("outputs after the end of HTTP", count=len(heard))

    def _fail(self, why: str) -> None:
        self.failure = why
        streams, self._streams = self._streams, {}
        now = time.monotonic()
        self._tell([(stream, _failed(request_id, why)) for request_id, stream in streams.items()], now)
        self.finished.put(None)


def _push(heard: list[tuple[Stream, Output]], at: float) -> None:
    for stream, output in heard:
        stream.push(output, at)


def _failed(request_id: str, why: str) -> Output:
    return Output(request_id, finish_reason=FinishReason.FAILED, error=why)
