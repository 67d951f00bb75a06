from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.request import RequestClass
from ballast_worker.status import SmoothedRates


@pytest.fixture
def sample(serving):
    """Feed a second of made-up work at a time into fresh rates."""
    stats = serving.worker.engine.stats()
    rates = SmoothedRates()
    seen = {"now": 0.0, "items": 0, "tokens": 0}

    def feed(items: int, tokens: int, *, waiting: int) -> SmoothedRates:
        seen["now"] += 1
        seen["items"] += items
        seen["tokens"] += tokens
        offline = replace(stats.offline, waiting=waiting, decode_tokens=seen["tokens"])
        taken = {RequestClass.ONLINE: 0, RequestClass.OFFLINE: seen["items"]}
        rates.sample(replace(stats, offline=offline), taken, dict.fromkeys(RequestClass, 0), seen["now"])
        return rates

    return feed


def test_the_offline_capacity_is_measured_while_more_waits_than_fits(sample) -> None:
    sample(0, 0, waiting=5)
    rates = sample(4, 200, waiting=5)

    assert (rates.offline_items, rates.offline_tokens) == (4, 200)


def test_an_idle_worker_keeps_what_it_measured(sample) -> None:
    for _ in range(30):
        sample(4, 200, waiting=5)
    for _ in range(30):
        rates = sample(1, 10, waiting=0)

    assert (rates.offline_items, rates.offline_tokens) == (pytest.approx(4), pytest.approx(200))
    assert rates.classes[RequestClass.OFFLINE].decode < 20


def test_nothing_is_known_before_work_had_to_wait(sample) -> None:
    for _ in range(10):
        rates = sample(1, 10, waiting=0)

    assert (rates.offline_items, rates.offline_tokens) == (0, 0)
