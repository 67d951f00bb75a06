"""Values that cannot be read are skipped and named, and users in URLs are replaced."""

from __future__ import annotations

import pytest

from ballast_queue.address import with_user
from ballast_queue.errors import InvalidAddress
from ballast_queue.unreadable import MOST_PLACES, Unreadable


def test_a_value_that_cannot_be_read_is_logged_once_with_its_place(caplog: pytest.LogCaptureFixture):
    found = Unreadable()
    for place in ("job a", "job b", "job a"):
        assert found.try_read(place, lambda: int("x")) is None

    assert caplog.messages == ["value in redis cannot be read, it is skipped"] * 2
    assert found.places == {"job a", "job b"}


def test_any_number_of_unreadable_values_takes_a_bounded_memory():
    found = Unreadable()
    for number in range(MOST_PLACES + 10):
        found.skip(f"job {number}")

    assert len(found.places) == MOST_PLACES


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://db.example:6379/0", "redis://ballast%3Aa%2Fb@db.example:6379/0"),
        ("rediss://old:secret@db.example:6380", "rediss://ballast%3Aa%2Fb@db.example:6380"),
    ],
)
def test_the_user_of_a_url_is_replaced_and_its_password_is_gone(url: str, expected: str):
    assert with_user(url, "ballast:a/b") == expected


def test_a_url_without_a_host_has_no_place_for_a_user():
    with pytest.raises(InvalidAddress, match="the host is missing"):
        with_user("redis://", "a")
