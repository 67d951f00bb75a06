"""A number and its noun agree."""

from __future__ import annotations

import pytest

from ballast_openai.errors import counted


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [
        (0, ("item",), "0 items"),
        (1, ("item",), "1 item"),
        (5000, ("item",), "5,000 items"),
        (1, ("entry", "entries"), "1 entry"),
        (2, ("entry", "entries"), "2 entries"),
        (1, ("item waits", "items wait"), "1 item waits"),
        (0, ("item waits", "items wait"), "0 items wait"),
    ],
)
def test_a_number_and_its_noun_agree(number: int, words: tuple[str, ...], expected: str):
    assert counted(number, *words) == expected
