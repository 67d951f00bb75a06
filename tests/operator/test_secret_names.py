"""The Secrets that resources name: their names lead to no other object, and nothing stays of a namespace."""

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


def test_a_namespace_that_goes_while_its_secret_is_read_is_forgotten_later() -> None:
    class SlowCluster:
        is_read, answers = asyncio.Event(), asyncio.Event()

        async def metadata(self, _: Key) -> None:
            self.is_read.set()
            await self.answers.wait()

    async def forget_meanwhile() -> None:
        slow = SlowCluster()
        slow.answers.set()
        grants = SecretGrants(cast(Any, slow), is_required=True, least_seconds=0)
        await grants.refusal("team", ["tls"])
        slow.answers.clear()
        slow.is_read.clear()
        reading = asyncio.create_task(grants.refusal("team", ["tls"]))
        await slow.is_read.wait()
        grants.forget([])
        slow.answers.set()
        await reading
        grants.forget([])

    asyncio.run(forget_meanwhile())
