"""The work queue: each key once, the earliest due time wins, no key is reconciled twice at the same time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ballast_operator.kinds import INFERENCE_DEPLOYMENT, SERVICE, Key
from ballast_operator.work_queue import LONGEST_DELAY_SECONDS, WorkQueue

KEYS = [Key(kind, "ns", name) for kind in (INFERENCE_DEPLOYMENT, SERVICE) for name in "ab"]


class WorkQueueMachine(RuleBasedStateMachine):
    """Compares the queue with a dictionary of due times."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.due: dict[Key, float] = {}
        self.running: set[Key] = set()
        self.now = 0.0

    @rule(key=st.sampled_from(KEYS), seconds=st.integers(0, 5))
    def add(self, key: Key, seconds: int) -> None:
        self.queue.add(key, self.now + seconds)
        self.due[key] = min(self.due.get(key, self.now + seconds), self.now + seconds)

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

    @rule(key=st.sampled_from(KEYS), failed=st.booleans())
    def finish(self, key: Key, failed: bool) -> None:
        if key in self.running:
            delay = self.queue.finish(key, failed=failed)
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
