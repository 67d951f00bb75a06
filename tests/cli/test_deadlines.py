from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_cli.deadlines import parse_deadline, spoken
from ballast_cli.errors import Usage

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC).timestamp()


def at(text: str, now: float = NOW) -> float:
    return parse_deadline(text, NOW).by(now, NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86400),
        ("+30m", 1800),
        ("1h30m", 5400),
        ("90s", 90),
        ("2d", 172800),
        ("1w", 604800),
        ("1.5h", 5400),
        (" 24H ", 86400),
        ("2030-01-01T13:00Z", 3600),
        ("2030-01-01T15:00+02:00", 3600),
    ],
)
def test_a_deadline_is_a_span_or_a_moment(text: str, seconds: float):
    assert at(text) == NOW + seconds


@pytest.mark.parametrize(("text", "utc_hour"), [("2030-01-15T16:00", 15), ("2030-07-15T16:00", 14)])
def test_a_moment_without_a_zone_is_local_time_summer_time_included(
    text: str, utc_hour: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = datetime.fromtimestamp(at(text), UTC)
    finally:
        monkeypatch.undo()
        time.tzset()

    assert found.hour == utc_hour


def test_it_says_how_it_understood_the_deadline():
    assert spoken(at("+30m"), NOW) == "2030-01-01 12:30:00 UTC (in 30m)"


def test_a_span_begins_at_the_time_of_the_queue():
    assert at("30m", now=NOW + 3600) == NOW + 5400
    assert at("2030-01-01T13:30Z", now=NOW + 3600) == NOW + 5400


def test_a_deadline_that_has_passed_only_by_the_clock_of_the_queue_names_both_clocks():
    with pytest.raises(Usage) as refused:
        at("2030-01-01T12:30Z", now=NOW + 3600)
    with pytest.raises(Usage) as of_one_clock:
        at("2030-01-01T11:30Z", now=NOW + 1)

    assert str(refused.value).startswith(
        "--deadline: '2030-01-01T12:30Z' is 2030-01-01 12:30:00 UTC, which has passed by the clock of the queue. "
        "There it is 2030-01-01 13:00:00 UTC, on this machine 2030-01-01 12:00:00 UTC. Use"
    )
    assert "clock" not in str(of_one_clock.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "24",
        "h",
        "-3h",
        "3 h",
        "2030-13-01",
        "99999999999999d",
        "9999-12-31T23:59Z",
        "0001-01-01",
        "0001-01-01T00:00+14:00",
    ],
)
def test_what_is_no_deadline_is_refused_with_what_was_wanted(text: str):
    with pytest.raises(Usage, match="Use a time span such as 24h"):
        parse_deadline(text, NOW)


@pytest.mark.parametrize("text", ["2029-12-31", "0s", "2030-01-01T12:00Z"])
def test_a_deadline_in_the_past_is_refused_by_name(text: str):
    with pytest.raises(Usage, match="has passed"):
        at(text)


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from("wdhms")), min_size=1, max_size=4))
def test_the_parts_of_a_span_add_up(parts: list[tuple[int, str]]):
    units = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
    assert at("".join(f"{n}{unit}" for n, unit in parts)) == NOW + sum(n * units[unit] for n, unit in parts)
