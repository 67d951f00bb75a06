"""The Secrets that resources name: their names lead to no other object, and nothing stays of a namespace."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import pytest

from ballast_operator.addresses import Address, Addresses
from ballast_operator.children.config import Redis
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


def test_an_audit_finds_a_label_that_is_removed_from_any_secret() -> None:
    class LabeledSecrets:
        labeled = frozenset({"one", "two", "three"})

        async def metadata(self, key: Key) -> dict[str, Any]:
            return {"metadata": {"labels": {"ballast.dev/allow": "true"} if key.name in self.labeled else {}}}

    async def audit() -> list[bool]:
        secrets = LabeledSecrets()
        grants = SecretGrants(cast(Any, secrets), is_required=True, least_seconds=0)
        await grants.refusal("team", sorted(secrets.labeled))
        found = [await grants.audit()]
        secrets.labeled -= {"one"}
        return [*found, await grants.audit(), await grants.audit()]

    assert asyncio.run(audit()) == [False, True, False]


@pytest.mark.parametrize(("only_allowed", "is_labeled", "is_read"), [(True, False, False), (True, True, True),
                                                                     (False, False, True)])  # fmt: skip
def test_the_address_in_a_secret_without_the_label_is_read_only_where_no_label_is_needed(
    only_allowed: bool, is_labeled: bool, is_read: bool
) -> None:
    """The label may go after the check of the resource, and before a poll."""

    class OneSecret:
        async def get(self, _: Key) -> dict[str, Any]:
            labels = {"ballast.dev/allow": "true"} if is_labeled else {}
            return {"metadata": {"labels": labels}, "data": {"url": base64.b64encode(b"redis://redis").decode()}}

    addresses = Addresses(cast(Any, OneSecret()), least_seconds=1, only_allowed=only_allowed)
    found = asyncio.run(addresses.of("team", Redis("redis", "url", None), may_be_outdated=False))

    assert found == (Address("redis://redis", None) if is_read else None)


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
