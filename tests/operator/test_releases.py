"""Which resources of another release a release may claim."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from ballast_operator.errors import Forbidden
from ballast_operator.kinds import Body, Key
from ballast_operator.releases import Releases

OWN = "ballast/operator"
REMEDY = "set status.operator of its resources to null"


@dataclass
class FakeCluster:
    """The Leases of one namespace. All others are forbidden."""

    leases: dict[str, float]
    """Minutes since each was renewed."""

    async def get(self, key: Key) -> Body | None:
        if key.namespace != "ballast" or not key.name:
            raise Forbidden("get", 403, f"cannot get {key.path()}")
        if key.name not in self.leases:
            return None
        renewed = datetime.now(UTC) - timedelta(minutes=self.leases[key.name])
        return {"spec": {"renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}


def may_claim(holder: str, *, setting: str = "", leases: dict[str, float] | None = None) -> bool:
    releases = Releases(cast(Any, FakeCluster(leases or {})), OWN, former=setting)

    async def ask_twice() -> list[bool]:
        return [await releases.may_claim(holder) for _ in range(2)]

    first, second = asyncio.run(ask_twice())
    assert first == second
    return first


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "no release": (True, {"holder": ""}),
    "a release that renews its Lease": (False, {"holder": "ballast/other", "leases": {"other": 0}}),
    "a release that upgrades": (False, {"holder": "ballast/other", "leases": {"other": 14}}),
    "a release that stopped long ago": (True, {"holder": "ballast/other", "leases": {"other": 16}}),
    "a release without a Lease": (True, {"holder": "ballast/other"}),
    "a release whose Lease may not be read": (False, {"holder": "elsewhere/other"}),
    "the setting of this release, as older versions wrote it": (True, {"holder": "east", "setting": "east"}),
    "the same with a slash": (True, {"holder": "elsewhere/all", "setting": "elsewhere/all"}),
    "the setting of another release": (False, {"holder": "west", "setting": "east"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_release_claims_only_what_no_other_release_reconciles(case: str) -> None:
    wanted, given = CASES[case]

    assert may_claim(**given) == wanted


@pytest.mark.parametrize(
    ("holder", "because"),
    [
        ("elsewhere/other", "this release may not read the Lease elsewhere/other: get: the API server answered 403"),
        ("west", "this is no NAMESPACE/NAME of a Lease"),
    ],
)
def test_a_release_that_cannot_know_whether_another_is_gone_logs_the_remedy_once(
    holder: str, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    may_claim(holder)

    (record,) = caplog.records
    fields = cast(Any, record).fields
    assert fields["release"] == holder
    assert fields["because"].startswith(because)
    assert REMEDY in fields["remedy"]
    assert "permit this operator to get the Lease" in fields["remedy"]
