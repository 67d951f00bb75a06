from __future__ import annotations

import math

import pytest
from engine_stats import make_stats
from hypothesis import given
from hypothesis import strategies as st
from queue_objects import make_status

from ballast_engine.stats import ClassStats
from ballast_policy.jobs.choice import job_slack
from ballast_policy.jobs.deadline import JobWork, Rates
from ballast_policy.request import RequestClass
from ballast_queue.job import Job, JobState, Outlook, RequestCounts
from ballast_queue.status import LEAST_RATE, WorkerStatus
from ballast_worker.forecast import Forecast, order_rates_of
from ballast_worker.status import SmoothedRates

TOKENS = 30
"""Tokens per second of a slot."""


class Engine:
    """An engine whose slots run offline items that all take `seconds`. More items wait."""

    def __init__(self, slots: int, seconds: float, *, spread: float = 1.0, waiting: int = 5) -> None:
        """Start with items whose ages differ by a share of their length: 1 spreads their ends evenly, 0 not at all."""
        self.rates = SmoothedRates()
        self.now = 0.0
        self.waiting = waiting
        self.seconds = seconds
        self.parked = 0
        """Items that are parked. Online requests have their slots."""
        self._ages = [spread * seconds * slot / slots for slot in range(slots)]
        self._started = slots
        self._tokens = 0

    @property
    def slots(self) -> int:
        return len(self._ages) - self.parked

    @property
    def items(self) -> float:
        """The true rate."""
        return self.slots / self.seconds

    def run(self, seconds: float) -> SmoothedRates:
        """Sample each second or, if items are long, a few dozen times in the time of an item."""
        elapsed = max(1, self.seconds // 40)
        for _ in range(math.ceil(seconds / elapsed)):
            self.now += elapsed
            for slot in range(self.slots):
                age = self._ages[slot]
                self._started += int((age + elapsed) / self.seconds + 1e-9) - int(age / self.seconds + 1e-9)
                self._ages[slot] += elapsed
            self._tokens += int(TOKENS * elapsed * self.slots)
            held = ClassStats(running=self.slots, parked=self.parked, waiting=self.waiting, decode_tokens=self._tokens)
            started = {RequestClass.ONLINE: 0, RequestClass.OFFLINE: self._started}
            self.rates.sample(make_stats(offline=held), started, self.now)
        return self.rates

    def outlook(self, seconds_left: float, *, items: int, output: int = 0) -> tuple[Outlook, str]:
        """Return the outlook of a job of this size."""
        counts = RequestCounts(total=items, waiting=items)
        fields = {"tenant": "a", "state": JobState.IN_PROGRESS, "created": 0.0, "deadline": self.now + seconds_left}
        job = Job(id="j", counts=counts, output_left=output, **fields)
        return Forecast([job], [self.status()], self.now, {}).of(job)

    def status(self) -> WorkerStatus:
        """Return the status that the worker publishes."""
        return make_status(
            offline_items_per_second=self.rates.offline_items,
            offline_tokens_per_second=self.rates.offline_tokens,
            offline_items_while_running=self.rates.items_while_running,
            offline_tokens_while_running=self.rates.tokens_while_running,
        )


def test_the_offline_capacity_is_measured_while_more_waits_than_fits() -> None:
    rates = Engine(slots=8, seconds=2).run(3)

    assert (rates.offline_items, rates.offline_tokens) == (4, 8 * TOKENS)


def test_an_idle_worker_keeps_what_it_measured() -> None:
    engine = Engine(slots=8, seconds=2)
    engine.run(30)
    engine.waiting, engine.parked = 0, 7
    rates = engine.run(30)

    assert (rates.offline_items, rates.offline_tokens) == (pytest.approx(4), pytest.approx(8 * TOKENS))
    assert rates.classes[RequestClass.OFFLINE].decode < 2 * TOKENS


def test_nothing_is_known_before_work_had_to_wait() -> None:
    rates = Engine(slots=1, seconds=1, waiting=0).run(10)

    assert (rates.offline_items, rates.offline_tokens) == (0, 0)


@given(
    slots=st.sampled_from([1, 2, 16]),
    seconds=st.sampled_from([0.5, 3, 20, 60, 300, 7200]),
    spread=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    is_in_tokens=st.booleans(),
)
def test_a_steady_load_has_one_outlook_however_long_its_items_are(
    slots: int, seconds: float, spread: float, is_in_tokens: bool
) -> None:
    engine = Engine(slots, seconds, spread=spread)
    engine.run(6 * seconds + 60)
    found, rates = set(), []
    for _ in range(60):
        rate = engine.run(seconds / 15).offline_items
        rates.append(rate)
        output = int(100 * seconds * TOKENS) if is_in_tokens else 0
        needed = 100 / engine.items
        found.add(
            (
                engine.outlook(1.3 * needed, items=100, output=output)[0],
                engine.outlook(0.75 * needed, items=100, output=output)[0],
            )
        )

    assert found == {(Outlook.YES, Outlook.NO)}
    assert sum(rates) / len(rates) == pytest.approx(engine.items, rel=0.1)


@pytest.mark.parametrize("seconds", [1, 60, 600])
@pytest.mark.parametrize("output", [0, 10**6], ids=["items", "tokens"])
def test_a_job_that_is_starved_is_at_risk_after_minutes_and_stays_so(seconds: int, output: int) -> None:
    engine = Engine(slots=8, seconds=seconds)
    engine.run(6 * seconds + 60)
    items = 10**6 // (seconds * TOKENS)
    left = 1.5 * items / engine.items
    before = engine.outlook(left, items=items, output=output)[0]
    engine.parked = 8
    engine.run(300)
    found = [engine.outlook(left, items=items, output=output)[0]]
    for _ in range(6):
        engine.run(600)
        found.append(engine.outlook(left, items=items, output=output)[0])

    assert before is Outlook.YES
    assert set(found) <= {Outlook.NO, Outlook.AT_RISK}
    assert found[-1] is Outlook.NO
    assert engine.outlook(600, items=items, output=output) == (
        Outlook.NO,
        "offline work waits, 1 worker runs none of it, and 10m remain",
    )
    engine.parked = 0
    engine.run(6 * seconds + 300)
    assert engine.rates.offline_items == pytest.approx(engine.items, rel=0.1)


@pytest.mark.parametrize("seconds", [0.25, 3], ids=["many steps", "long steps"])
def test_items_that_hold_a_slot_within_a_step_only_have_a_rate(seconds: float) -> None:
    """Embeddings inside vLLM: no sample finds one that runs."""
    rates, started = SmoothedRates(), {RequestClass.ONLINE: 0, RequestClass.OFFLINE: 0}
    for now in range(120):
        started[RequestClass.OFFLINE] = 8 * int(now / seconds)
        rates.sample(make_stats(offline=ClassStats(waiting=5)), started, float(now))
    before = rates.offline_items
    for now in range(120, 420):
        rates.sample(make_stats(offline=ClassStats(waiting=5)), started, float(now))

    assert before == pytest.approx(8 / seconds, rel=0.1)
    assert rates.offline_items < before / 500, "none runs any more"


@pytest.mark.parametrize("output", [0, 10**6], ids=["items", "tokens"])
def test_a_job_that_is_due_soon_goes_first_while_offline_work_starves(output: int) -> None:
    engine = Engine(slots=8, seconds=10)
    engine.run(600)
    small = JobWork("a", 0, 3600.0, 100, output // 1000)
    huge = JobWork("a", 0, 7 * 86400.0, 100_000, output)
    is_first = set()
    for parked, seconds in [(8, 5), *[(8, 60)] * 10, (8, 12 * 3600), *[(0, 5)] * 9]:
        engine.parked = parked
        engine.run(seconds)
        rates = order_rates_of([engine.status()])
        is_first.add(job_slack(small, rates, 0) < job_slack(huge, rates, 0))

    assert is_first == {True}
    assert order_rates_of([engine.status()]) == Rates(pytest.approx(0.8, rel=0.05), pytest.approx(8 * TOKENS, rel=0.05))


def test_work_that_never_got_a_slot_has_a_measured_rate_of_zero() -> None:
    engine = Engine(slots=8, seconds=1)
    engine.parked = 8
    at_first = engine.run(3).offline_items
    rates = engine.run(10)

    assert at_first == 0
    assert (rates.offline_items, rates.offline_tokens) == (LEAST_RATE, LEAST_RATE)
    assert engine.outlook(60, items=5)[0] is Outlook.NO
    assert order_rates_of([engine.status()]) == Rates(), "the deadlines alone order the jobs"


def test_fewer_slots_show_within_the_length_of_a_few_items() -> None:
    engine = Engine(slots=8, seconds=60)
    engine.run(600)
    engine.parked = 6
    rates = engine.run(4 * 60)

    assert rates.offline_items == pytest.approx(engine.items, rel=0.1)
    assert rates.offline_tokens == pytest.approx(2 * TOKENS, rel=0.05)


def test_tokens_are_known_before_the_first_long_item_ends() -> None:
    engine = Engine(slots=2, seconds=3600, spread=0)
    rates = engine.run(1800)

    assert (rates.offline_items, rates.offline_tokens) == (0, 2 * TOKENS)
    assert engine.outlook(60, items=2, output=10**6)[0] is Outlook.NO
    assert engine.outlook(60, items=2) == (
        Outlook.UNKNOWN,
        "no rate is known yet: no item of 1 worker has ended while others waited for slots",
    )
