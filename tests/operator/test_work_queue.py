"""The work queue: each key once, the earliest due time wins, no key is reconciled twice at the same time."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ballast_operator.controller import Controller
from ballast_operator.errors import ClusterUnavailable
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, SERVICE, Key
from ballast_operator.work_queue import LONGEST_DELAY_SECONDS, WorkQueue

KEYS = [Key(kind, "ns", name) for kind in (INFERENCE_DEPLOYMENT, SERVICE) for name in "ab"]


class WorkQueueMachine(RuleBasedStateMachine):
    """Compares the queue with a dictionary of due times."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.due: dict[Key, float] = {}
        self.not_before: dict[Key, float] = {}
        self.running: set[Key] = set()
        self.now = 0.0

    @rule(key=st.sampled_from(KEYS), seconds=st.integers(0, 5))
    def add(self, key: Key, seconds: int) -> None:
        self.queue.add(key, self.now + seconds)
        at = max(self.now + seconds, self.not_before.get(key, 0.0))
        self.due[key] = min(self.due.get(key, at), at)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        key = self.queue.take(self.now)
        ready = {k: at for k, at in self.due.items() if k not in self.running and at <= self.now}
        if key is None:
            assert not ready
        else:
            assert ready[key] == min(ready.values())
            del self.due[key]
            self.running.add(key)

    @rule(key=st.sampled_from(KEYS), failed=st.booleans(), asked=st.none() | st.integers(0, 5))
    def finish(self, key: Key, failed: bool, asked: int | None) -> None:
        if key in self.running:
            not_before = None if asked is None else self.now + asked
            delay = self.queue.finish(key, failed=failed, not_before=not_before)
            self.not_before[key] = not_before or 0.0
            if key in self.due:
                self.due[key] = max(self.due[key], self.not_before[key])
            assert (delay > 0) == failed
            assert delay <= LONGEST_DELAY_SECONDS
            self.running.discard(key)

    @rule()
    def knows_when_it_is_next_asked(self) -> None:
        waiting = [at for key, at in self.due.items() if key not in self.running]
        assert self.queue.next_due() == (min(waiting) if waiting else None)
        assert self.queue.num_waiting == len(self.due)


TestWorkQueue = WorkQueueMachine.TestCase


def test_failures_in_a_row_wait_longer_and_success_forgets_them() -> None:
    queue, delays = WorkQueue(), []
    for failed in (True, True, True, False, True):
        queue.add(KEYS[0], 0)
        assert queue.take(0) == KEYS[0]
        delays.append(queue.finish(KEYS[0], failed=failed))

    assert delays == [0.25, 0.5, 1.0, 0.0, 0.25]


def test_neither_a_poll_nor_a_change_cuts_the_time_short_that_the_api_server_asked_for() -> None:
    tries: list[Key] = []

    async def is_busy(key: Key) -> float | None:
        tries.append(key)
        controller.add(key)  # the resource changed meanwhile
        raise ClusterUnavailable("429", retry_after=60.0)

    controller = Controller(is_busy, max_concurrent=1, failed=lambda _: None)

    async def work() -> None:
        running = asyncio.create_task(controller.run())
        for _ in range(3):
            controller.add(KEYS[0])
            for _ in range(20):
                await asyncio.sleep(0)
        running.cancel()

    asyncio.run(work())
    assert tries == [KEYS[0]]
