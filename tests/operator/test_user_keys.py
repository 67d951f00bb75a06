"""The Secret with the key of the users' passwords, as somebody may have edited it."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any, cast

import pytest

from ballast_operator.context import UserKeys
from ballast_operator.errors import Conflict, Forbidden
from ballast_operator.kinds import SECRET, Body, Key
from ballast_operator.user_sync import UserKeyStore


class FakeCluster:
    """Holds one Secret."""

    def __init__(self, **texts: str) -> None:
        self.version = 0
        self.after_read: dict[str, str] | None = None
        """What another process writes after the first read."""
        self.write(texts)

    def write(self, texts: dict[str, str]) -> None:
        self.version += 1
        data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
        self.body: Body = {"metadata": {"uid": "1", "resourceVersion": str(self.version)}, "data": data}

    async def get(self, _key: Key) -> Body:
        found, other, self.after_read = self.body, self.after_read, None
        if other is not None:
            self.write(other)
        return found

    async def apply(self, _key: Key, manifest: Body, **_options: object) -> Body:
        """Refuse an old version, as the API server does. A manifest without a version fits each."""
        if manifest["metadata"].get("resourceVersion", str(self.version)) != str(self.version):
            raise Conflict("apply", 409, "another version")
        self.version += 1
        self.body = manifest
        return manifest


def read(cluster: FakeCluster, days: float = 30) -> UserKeys:
    return asyncio.run(UserKeyStore(cast(Any, cluster), Key(SECRET, "ballast", "users"), days=days).read())


@pytest.mark.parametrize("rotated", ["yesterday", "nan", "inf", ""])
def test_a_time_that_is_no_number_counts_as_long_ago(rotated: str) -> None:
    cluster = FakeCluster(key="a" * 64, previous="", rotated=rotated)
    keys = read(cluster)

    assert keys.present != "a" * 64
    assert keys.previous == "a" * 64


@pytest.mark.parametrize("days", [0, 30])
def test_a_time_in_the_future_keeps_no_previous_key_valid(days: int) -> None:
    cluster = FakeCluster(key="a" * 64, previous="b" * 64, rotated=f"{time.time() + 1e8:.0f}")
    keys = read(cluster, days=days)

    assert keys.previous == ("a" * 64 if days else "")


def test_a_key_that_the_faster_clock_of_another_replica_made_is_kept() -> None:
    cluster = FakeCluster(key="a" * 64, previous="b" * 64, rotated=f"{time.time() + 60:.0f}")
    keys = read(cluster)

    assert (keys.present, keys.previous) == ("a" * 64, "b" * 64)


def test_a_key_that_another_process_made_meanwhile_is_kept() -> None:
    """Workers may have passwords of the other key already."""
    cluster = FakeCluster(key="a" * 64, previous="", rotated="0")
    cluster.after_read = {"key": "b" * 64, "previous": "a" * 64, "rotated": f"{time.time():.0f}"}
    keys = read(cluster)

    assert (keys.present, keys.previous) == ("b" * 64, "a" * 64)


class FullCluster(FakeCluster):
    """Refuses each write, as by a quota."""

    async def apply(self, _key: Key, _manifest: Body, **_options: object) -> Body:
        raise Forbidden("apply", 403, "exceeded quota")


def test_a_key_that_cannot_be_replaced_stays_and_one_that_cannot_be_created_is_an_error() -> None:
    """With the old key, resources are still reconciled."""
    old = {"key": "a" * 64, "previous": "b" * 64, "rotated": "0"}

    assert read(FullCluster(**old)) == UserKeys("a" * 64, "")
    assert read(FullCluster(**(old | {"previous": ""}))).is_first
    with pytest.raises(Forbidden):
        read(FullCluster())
