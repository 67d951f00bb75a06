"""Which resources of another release a release may claim."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from ballast_operator.errors import Forbidden
from ballast_operator.kinds import Body, Key
from ballast_operator.releases import UNCHANGED_SECONDS, Releases

OWN = "ballast/operator"
REMEDY = "set status.operator of its resources to null"


@dataclass
class FakeCluster:
    """The Leases of one namespace. All others are forbidden."""

    leases: dict[str, float]
    """Minutes since each was renewed, at the first look."""
    is_renewed: bool = False
    """Whether each was renewed again since the last look, by a clock that is slow."""
    start: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def get(self, key: Key) -> Body | None:
        if key.namespace != "ballast" or not key.name:
            raise Forbidden("get", 403, f"cannot get {key.path()}")
        if key.name not in self.leases:
            return None
        renewed = self.start - timedelta(minutes=self.leases[key.name])
        self.start += timedelta(seconds=self.is_renewed)
        return {"spec": {"renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}


def may_claim(holder: str, *, leases: dict[str, float] | None = None, is_renewed: bool = False) -> list[bool]:
    """Return the answers now, now again, and after `UNCHANGED_SECONDS`."""
    now = 0.0
    cluster = FakeCluster(leases or {}, is_renewed)
    releases = Releases(cast(Any, cluster), OWN, seconds=lambda: now)

    async def ask() -> list[bool]:
        nonlocal now
        answers = [await releases.may_claim(holder) for _ in range(2)]
        now = UNCHANGED_SECONDS
        answers.append(await releases.may_claim(holder))
        assert releases.is_former(holder) == answers[-1]
        return answers

    return asyncio.run(ask())


NEVER, LATER, AT_ONCE = [False] * 3, [False, False, True], [True] * 3
CASES: dict[str, tuple[list[bool], dict[str, Any]]] = {
    "no release": (AT_ONCE, {"holder": ""}),
    "a release that renews its Lease": (NEVER, {"holder": "ballast/other", "leases": {"other": 0}}),
    "a release that upgrades": (NEVER, {"holder": "ballast/other", "leases": {"other": 14}}),
    "a release that stopped long ago": (LATER, {"holder": "ballast/other", "leases": {"other": 16}}),
    "a live release whose clock is slow": (
        NEVER,
        {"holder": "ballast/other", "leases": {"other": 16}, "is_renewed": True},
    ),
    "a release without a Lease": (AT_ONCE, {"holder": "ballast/other"}),
    "a release whose Lease may not be read": (NEVER, {"holder": "elsewhere/other"}),
    "no name of a Lease": (NEVER, {"holder": "west"}),
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
