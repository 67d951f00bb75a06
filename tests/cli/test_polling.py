from __future__ import annotations

from ballast_cli.demo.polling import CounterPoll, SlotPoll, by_second, read_metrics


def make_poll(at: float, *, online: int = 0, offline: int = 0, slots: int = 8) -> SlotPoll:
    return SlotPoll(at, slots, online, offline, parked=0, waiting=0)


def make_count(at: float, offline_tokens: float = 0) -> CounterPoll:
    return CounterPoll(at, offline_tokens, online_tokens=0, prompt_tokens=0, cached_tokens=0)


def test_a_second_joins_two_readings_and_the_looks_between_them():
    polls = [make_poll(0.2, online=2, offline=4), make_poll(0.7, online=4, offline=4), make_poll(1.2, offline=1)]
    first, second = by_second(polls, [make_count(0.0), make_count(1.0, 50), make_count(2.0, 60)])

    assert (first.offline_tokens, first.most_free, first.online, first.least_offline) == (50, 2, 3.0, 4)
    assert (second.offline_tokens, second.most_free) == (10, 7)


def test_a_second_that_nobody_looked_at_is_left_out():
    assert by_second([make_poll(0.5)], [make_count(1.0), make_count(2.0)]) == []


def test_metrics_are_read_whatever_the_order_of_their_labels():
    found = read_metrics('# HELP x y\nx_total{phase="decode",class="offline"} 3.0\ny 2.5e1\n')

    assert found == {'x_total{class="offline",phase="decode"}': 3.0, "y": 25.0}
