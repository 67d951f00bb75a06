"""The HTTP requests of an API server: which of them enter, and how they ended.

Each request that enters is counted once, when it ends. The request of a refused call reaches no route of vLLM.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from ballast_engine.request import FinishReason
from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_vllm.calls import Call
from ballast_worker.errors import Refused
from ballast_worker.openai import Caller
from ballast_worker.queue_limit import QueueLimit
from ballast_worker.requests import RequestOutcome, promised
from ballast_worker.responses import stopping

if TYPE_CHECKING:
    from ballast_vllm.server import VllmServer

DIED = "EngineCore of vLLM ended."


class Admission:
    """The requests of one server. It belongs to the event loop of the server."""

    def __init__(self, server: VllmServer) -> None:
        self._server, self._tap = server, server.tap
        self._queue_limit = QueueLimit(server.rates, is_encoder=server.tap.is_encoder)
        self.calls: set[Call] = set()
        """HTTP requests that wait for an answer."""

    def check_open(self) -> None:
        """Refuse a request if the server shuts down, or EngineCore ended or hangs."""
        if self._server.is_closed:
            raise stopping()
        why = DIED if self._tap.is_dead else self._server.loop.failure
        if why is not None:
            raise Refused(500, why, code="engine_failed", kind="server_error")

    def check_queue(self, caller: Caller, *, num_more: int = 0) -> None:
        """Refuse a request if the waiting queue of its class is full: 429 with a time for the next try.

        `num_more`: requests that enter before it, and do not wait yet.
        """
        stats, request_class = self._server.engine.stats(), caller.request_class
        waiting = self._num_waiting(stats, request_class) + num_more

        def num_before() -> tuple[float, float]:
            # Requests in a slot without an output count as well: the scheduler does not report whose they are.
            by_tenant = Counter(self._tap.by_tenant[request_class])
            by_tenant[caller.tenant] += num_more
            return self._server.tenancy.num_before(caller.tenant, by_tenant)

        self._queue_limit.check(self._server.config.limits, lambda: stats, request_class, waiting, num_before)

    def _num_waiting(self, stats: EngineStats, request_class: RequestClass) -> int:
        """Return the HTTP requests of a class that wait for a slot, with the calls on their way to EngineCore.

        Items have a limit of their own. The scheduler reports how many requests of the class hold a slot, but not
        which. So the number is exact online, and may include some in a slot offline, beside items that wait.
        """
        unanswered = self._tap.num_unanswered[request_class]
        return self._tap.num_entering[request_class] + min(unanswered, stats.of(request_class).waiting)

    def check_requests(self, call: Call, number: int) -> None:
        """Refuse a call if its next `number` requests exceed the waiting queue: 400 if no other time is better.

        Clients of embeddings put some thousand inputs into a call. An encoder computes many of them in a step, so one
        call of it counts once.
        """
        if self._tap.is_encoder:
            return
        try:
            self.check_queue(call.caller, num_more=number - 1 - call.is_entering)
        except Refused as refused:
            call.refused = refused
            limit = self._server.config.limits.max_queued_requests
            num_requests = number + sum(not request.is_over for request in call.requests)
            if num_requests > limit:
                call.refused = Refused(
                    400,
                    f"The call makes {num_requests} requests or more, the limit is {limit} (limits.maxQueuedRequests), "
                    "apart from those that find free slots. Divide it into several calls.",
                    code="too_many_requests",
                )
            raise call.refused from None

    def begin(self, call: Call, *, is_queued: bool) -> None:
        """Note that an HTTP request goes to vLLM. With `is_queued`, EngineCore gets requests of it."""
        call.counts_once = self._tap.is_encoder or call.num_searched > 0
        call.was_alone = not self._tap.num_entering[call.request_class]
        if is_queued:
            self._tap.enter(call)
        timing, caller = call.timing, call.caller
        timing.is_whole = self._tap.is_encoder
        configured = self._server.config.slo
        slo = configured if call.request_class is RequestClass.ONLINE else None
        if configured.latency_milliseconds is None:
            timing.ttft_slo = promised(slo, "ttft", caller.ttft_seconds)
            timing.tpot_slo = promised(slo, "tpot", caller.tpot_seconds)
        else:
            timing.latency_slo = promised(slo, "latency", caller.ttft_seconds)
        self.calls.add(call)

    def end(self, call: Call, status: int | None, *, is_complete: bool) -> None:
        """Count an HTTP request that ended. `status` is that of the response, None without one."""
        self.forget(call)
        if status is not None and status >= 400:
            self._server.recorder.refused(call.request_class, outcome_of(status))
            return
        if not call.requests:
            return  # such as /tokenize
        reason = call.ending(is_complete=is_complete, is_dead=self._tap.is_dead)
        is_answered = reason in {FinishReason.STOP, FinishReason.LENGTH}
        ended = (call.ended_at if is_answered else None) or time.monotonic()
        self._server.recorder.ended(call.timing, reason, call.num_prompt, call.num_output, ended, slowest=call.slowest)
        if not is_answered:
            return
        if self._tap.is_encoder:
            if call.request_class is RequestClass.ONLINE:
                self._queue_limit.add_call(ended - call.timing.arrival, call.num_prompt, was_alone=call.was_alone)
        else:
            times = [call.slowest[0]] if call.num_searched else [request.decode_seconds for request in call.requests]
            for seconds in times:
                self._queue_limit.add_answer(seconds)

    def forget(self, call: Call) -> None:
        """Forget an HTTP request that ended, without counting it."""
        self.calls.discard(call)
        self._tap.end(call)

    def add_step(self, seconds: float) -> None:
        """Note the time of a step."""
        self._queue_limit.add_step(seconds)

    def sample(self, stats: EngineStats, now: float) -> None:
        """Measure how fast the waiting queue moves. Call it about once a second."""
        waiting = self._num_waiting(stats, RequestClass.ONLINE)
        self._queue_limit.sample(stats, self._tap.num_answered[RequestClass.ONLINE], waiting, now)


def outcome_of(status: int) -> RequestOutcome:
    """Return the outcome of a request that gets an error."""
    if status == 429:
        return RequestOutcome.QUEUE_FULL
    return RequestOutcome.FAILED if status >= 500 else RequestOutcome.INVALID
