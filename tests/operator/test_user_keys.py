"""The Secret with the key of the users' passwords, as somebody may have edited it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import pytest

from ballast_operator.kinds import SECRET, Body, Key
from ballast_operator.redis_users import UserKeyStore


class FakeCluster:
    """Holds one Secret."""

    def __init__(self, **texts: str) -> None:
        data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
        self.body: Body = {"metadata": {"uid": "1", "resourceVersion": "1"}, "data": data}

    async def get(self, _key: Key) -> Body:
        return self.body

    async def apply(self, _key: Key, manifest: Body, **_options: object) -> Body:
        self.body = manifest
        return manifest

    create = replace = overwrite = apply


@pytest.mark.parametrize("rotated", ["yesterday", "nan", "inf", ""])
def test_a_time_that_is_no_number_counts_as_long_ago(rotated: str) -> None:
    cluster = FakeCluster(key="a" * 64, previous="", rotated=rotated)

    keys = asyncio.run(UserKeyStore(cast(Any, cluster), Key(SECRET, "ballast", "users"), days=30).read())

    assert keys.present != "a" * 64
    assert keys.previous == "a" * 64
