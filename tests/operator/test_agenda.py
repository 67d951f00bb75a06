"""Turns: each name once, the earliest wish wins, nobody has two at a time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ballast_operator.agenda import LONGEST_DELAY_SECONDS, Agenda
from ballast_operator.kinds import Key

KEYS = [Key("ns", name) for name in "abc"]


class AgendaMachine(RuleBasedStateMachine):
    """Against a dictionary of wishes."""

    def __init__(self) -> None:
        super().__init__()
        self.agenda = Agenda()
        self.wishes: dict[Key, float] = {}
        self.running: set[Key] = set()
        self.now = 0.0

    @rule(key=st.sampled_from(KEYS), seconds=st.integers(0, 5))
    def add(self, key: Key, seconds: int) -> None:
        self.agenda.add(key, self.now + seconds)
        self.wishes[key] = min(self.wishes.get(key, self.now + seconds), self.now + seconds)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        key = self.agenda.take(self.now)
        due = {k: at for k, at in self.wishes.items() if k not in self.running and at <= self.now}
        if key is None:
            assert not due
        else:
            assert due[key] == min(due.values())
            del self.wishes[key]
            self.running.add(key)

    @rule(key=st.sampled_from(KEYS), failed=st.booleans())
    def finish(self, key: Key, failed: bool) -> None:
        if key in self.running:
            delay = self.agenda.finish(key, failed=failed)
            assert (delay > 0) == failed
            assert delay <= LONGEST_DELAY_SECONDS
            self.running.discard(key)

    @rule()
    def knows_when_it_is_next_asked(self) -> None:
        waiting = [at for key, at in self.wishes.items() if key not in self.running]
        assert self.agenda.next_due() == (min(waiting) if waiting else None)
        assert self.agenda.num_waiting == len(self.wishes)


TestAgenda = AgendaMachine.TestCase


def test_failures_in_a_row_wait_longer_and_success_forgets_them() -> None:
    agenda, delays = Agenda(), []
    for failed in (True, True, True, False, True):
        agenda.add(KEYS[0], 0)
        assert agenda.take(0) == KEYS[0]
        delays.append(agenda.finish(KEYS[0], failed=failed))

    assert delays == [0.25, 0.5, 1.0, 0.0, 0.25]


def test_an_earlier_wish_uses_up_the_later_one() -> None:
    agenda = Agenda()
    agenda.add(KEYS[0], 5)
    agenda.add(KEYS[0], 1)
    taken = agenda.take(1)
    agenda.finish(KEYS[0])

    assert taken == KEYS[0]
    assert agenda.take(9) is None
