"""The names of Secrets that resources name lead to no other object."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ballast_operator.kinds import Key
from ballast_operator.secret_grants import SecretGrants


class EverythingAllowed:
    """A cluster in which every object has the label."""

    async def metadata(self, _: Key) -> dict[str, Any]:
        return {"metadata": {"labels": {"ballast.dev/allow": "true"}}}


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("tls", True),
        ("a.b-c", True),
        ("../../other/secrets/tls", False),
        ("..", False),
        ("a?watch=1", False),
        ("", False),
    ],
)
def test_a_name_that_no_secret_can_have_is_refused_without_a_call(name: str, is_allowed: bool) -> None:
    grants = SecretGrants(cast(Any, EverythingAllowed()), is_required=True, least_seconds=1)

    assert (asyncio.run(grants.refusal("team", [name])) is None) == is_allowed
